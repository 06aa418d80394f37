"""Read what a run has left in its folder."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.common.events import FREQUENT, Event, read_events
from rl.report.page.summary import RowSummary
from rl.report.record import RunRecord, read_record
from rl.report.rows import METRICS

STATUS = "status"  # folder of a run with a file per rank
FATAL = "FATAL"  # why a run was not restarted
MAX_NAMED = 5  # runs in a message
RESPONSES = re.compile(r"step_(\d+)\.(.+)\.jsonl")  # in RUN/eval, by step and set


class ReportError(Exception):
    """A report cannot be written. The message says what was wrong, what is required, and what to change."""


@dataclass(frozen=True)
class RunData:
    """A run, as its folder shows it."""

    name: str  # unique in the report
    folder: Path
    rows: RowSummary
    events: list[Event]
    record: RunRecord | None  # None: the run was started by an older version, or never trained
    is_cut: bool = False  # the last line was incomplete, so it was left out

    def metrics(self) -> list[str]:
        """Return the names of the metrics that are numbers, in the order of their first appearance."""
        return list(self.rows.curves)

    @property
    def began_at(self) -> float | None:
        """When the run was started for the first time, in seconds since 1970. None: it is not known."""
        return min(self._times(self.rows.first_at), default=None)

    @property
    def last_news_at(self) -> float | None:
        """When the run wrote its last event or row. None: it is not known."""
        return max(self._times(self.rows.last_at), default=None)

    def _times(self, of_rows: float | None) -> list[float]:
        return [event.at for event in self.events] + ([] if of_rows is None else [of_rows])

    def response_files(self) -> dict[str, dict[int, Path]]:
        """Return the files with the responses of the first and of the last evaluation, by set and step."""
        found: dict[str, dict[int, Path]] = {}
        for path in sorted((self.folder / "eval").glob("step_*.jsonl")):
            if match := RESPONSES.fullmatch(path.name):
                files = found.get(match[2], {}) | {int(match[1]): path}
                found[match[2]] = {step: files[step] for step in sorted({min(files), max(files)})}
        return found


def read_runs(folders: Sequence[Path], window: int = 0) -> list[RunData]:
    """Read all runs. `window` is the number of values in running means; 0: by length. Raise ReportError if a run cannot
    be read, or if they have no metric in common."""
    runs = [_read_run(folder, name, window) for folder, name in zip(folders, _names(folders), strict=True)]
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


def _read_run(folder: Path, name: str, window: int) -> RunData:
    path = folder / METRICS
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise ReportError(f"{found}. Give the folder of a run, such as runs/demo")
    if not path.is_file():
        raise ReportError(_explain_missing(folder))
    try:
        rows, is_cut = _summarize(path, window)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}. Make it readable for this user") from None
    if not rows.curves:
        raise ReportError(_explain_no_step(folder))
    return RunData(name, folder, rows, read_events(folder), read_record(folder), is_cut)


def _explain_missing(folder: Path) -> str:
    """Say why a folder without metrics cannot be reported."""
    runs = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if runs:
        shown = ", ".join(runs[:MAX_NAMED]) + (f" and {len(runs) - MAX_NAMED} more" if len(runs) > MAX_NAMED else "")
        return f"{folder} is a folder of runs. Give one or several of them, such as {folder / runs[0]}. It has: {shown}"
    if not (folder / STATUS).is_dir():
        return f"{folder} has no {METRICS}, so it is not the folder of a run. Give a folder such as runs/demo"
    return _explain_no_step(folder)


def _explain_no_step(folder: Path) -> str:
    """Say why a run has no row with a metric."""
    last = next((event for event in reversed(read_events(folder)) if event.kind not in FREQUENT), None)
    end = last.text if last is not None and last.kind in ("fault", "stop") else ""
    if not end and (folder / FATAL).is_file():
        end = (folder / FATAL).read_text(errors="replace").partition("\n")[0]
    if end:
        cause = end.removeprefix("oneworld: ")
        return f"{folder} has no metrics, since the run ended before its first step: {cause}. Mend that and start again"
    return (
        f"{folder / METRICS} has no metrics yet. Wait for the first step of the run, or give another run. On several "
        "nodes, the node of the first actor has the file: write the report there"
    )


def _summarize(path: Path, window: int) -> tuple[RowSummary, bool]:
    """Read a file of rows line by line. Also return whether its last line is incomplete."""
    summary, is_cut = RowSummary(window), False
    row: dict[str, Any] | None = None  # the last one; the next line may belong to the same step
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                found = _read_row(line, -1 if row is None else row["step"])
            except ValueError as error:
                if not line.endswith("\n"):  # the run is writing it, or was killed while it did
                    is_cut = True
                    break
                raise ReportError(
                    f"{path}, line {number}: {error}. Every line must be a JSON object with a whole number `step`, and "
                    "steps must not decrease. Remove this line, or restore the file"
                ) from None
            if row is None:
                row = found
            elif found["step"] == row["step"]:
                row |= found  # a run in phases has two rows of a step
            else:
                summary.add(row)
                row = found
    if row is not None:
        summary.add(row)
    summary.flush()
    return summary, is_cut


def _read_row(line: str, last_step: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("this is not a row of metrics")
    if row["step"] < last_step:
        raise ValueError(f"step {row['step']} comes after step {last_step}")
    return row


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of responses. Lines that are no objects are skipped."""
    with path.open(errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
