"""Read what a run has left in its folder."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.common.events import Event, read_events
from rl.report.record import RunRecord, read_record
from rl.report.rows import METRICS

RESPONSES = re.compile(r"step_(\d+)\.(.+)\.jsonl")  # in RUN/eval, by step and set
NOT_METRICS = ("step", "version", "at")


class ReportError(Exception):
    """A report cannot be written. The message says what was wrong, what is required, and what to change."""


@dataclass(frozen=True)
class RunData:
    """A run, as its folder shows it."""

    name: str  # unique in the report
    folder: Path
    rows: list[dict[str, Any]]  # by increasing step, one per step
    events: list[Event]
    record: RunRecord | None  # None: the run was started by an older version, or never trained
    is_cut: bool = False  # the last line was incomplete, so it was left out

    def metrics(self) -> list[str]:
        """Return the names of the metrics that are numbers, in the order of their first appearance."""
        names = {name: None for row in self.rows for name in row if name not in NOT_METRICS and is_number(row[name])}
        return list(names)

    def values(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of a metric. Steps without a finite value are left out."""
        return [(row["step"], row[name]) for row in self.rows if is_number(row.get(name))]

    @property
    def began_at(self) -> float | None:
        """When the run was started for the first time, in seconds since 1970. None: it is not known."""
        times = [event.at for event in self.events] + [row["at"] for row in self.rows if "at" in row]
        return min(times, default=None)

    def response_files(self) -> dict[str, dict[int, Path]]:
        """Return the files with the responses of evaluations, by set and step."""
        found: dict[str, dict[int, Path]] = {}
        for path in sorted((self.folder / "eval").glob("step_*.jsonl")):
            if match := RESPONSES.fullmatch(path.name):
                found.setdefault(match[2], {})[int(match[1])] = path
        return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read all runs. Raise ReportError if one of them cannot be read, or if they have no metric in common."""
    runs = [_read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    if len(runs) > 1:
        common = set.intersection(*(set(run.metrics()) for run in runs))
        if not common:
            raise ReportError(
                f"the runs {', '.join(run.name for run in runs)} have no metric in common, so there is nothing to "
                "compare. Give runs of training, or write a report of each"
            )
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: the name of its folder, with as many folders above it as make the names differ."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ReportError(f"got a run twice: {', '.join(map(str, folders))}. Give every run once")
    names = [path.name for path in paths]
    for depth in range(2, max(len(path.parts) for path in paths) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return names


def _read_run(folder: Path, name: str) -> RunData:
    path = folder / METRICS
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}. Give the folder of a run, such as runs/demo")
    if not path.is_file():
        raise ReportError(
            f"{folder} has no {METRICS}, so it is not the folder of a run that trains, or the run has not begun its "
            "first step. On several nodes, the node of the first actor has the file"
        )
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}. Make it readable for this user") from None
    rows: dict[int, dict[str, Any]] = {}
    lines, is_cut = text.split("\n"), False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _read_row(line)
        except ValueError as error:
            if number == len(lines):  # no newline follows: the run is writing it, or was killed while it did
                is_cut = True
                continue
            raise ReportError(
                f"{path}, line {number}: {error}. Every line must be a JSON object with a whole number `step`. Remove "
                "this line, or restore the file"
            ) from None
        rows[row["step"]] = rows.get(row["step"], {}) | row  # a run in phases has two rows of a step
    if not any(is_number(value) for row in rows.values() for key, value in row.items() if key not in NOT_METRICS):
        raise ReportError(f"{path} has no metrics yet. Wait for the first step of the run, or give another run")
    return RunData(
        name, folder, [rows[step] for step in sorted(rows)], read_events(folder), read_record(folder), is_cut
    )


def _read_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("this is not a row of metrics")
    return row


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of responses. Lines that are no objects are skipped."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
