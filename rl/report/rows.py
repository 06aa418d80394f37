"""metrics.jsonl: one line of JSON per step, in the run's folder.

A line has the step, the version of the weights after it, `at` (when it was written, in seconds since 1970), and the
metrics by name. Steps increase from line to line, and `at` too: a resumed run drops the lines that it writes again.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rl.common.files import write_atomically
from rl.report.histogram import Histogram

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts"  # folder beside it, with the groups that debug.save_rollouts saves


class RowFile:
    """The file of a run. `step` is the step from which the run resumes. Rows after it are dropped, since the run writes
    them again. If it is 0, the files of an earlier run with the same name are renamed, unless this command `continues`
    a run in phases. The rows before it stay on the disk: only the names of their metrics and their rewards are held."""

    def __init__(self, run_dir: Path, step: int, continues: bool):
        path = run_dir / METRICS
        if not step and not continues:
            set_aside(path)
            set_aside(run_dir / "eval.jsonl")
            set_aside(run_dir / "accounting.jsonl")
        self._path, self._num_kept = path, 0  # rows of earlier starts
        self.names: set[str] = set()  # of all values in them
        self.rewards: list[float] = []  # mean rewards of their steps; a step without one is left out
        write_atomically(path, self._keep(step))
        self._file = path.open("a", buffering=1)

    def _keep(self, step: int) -> Iterator[str]:
        """Yield the lines up to a step, and note what is held of them."""
        for row in iterate_rows(self._path):
            if row["step"] <= step:
                self._num_kept += 1
                self.names |= row.keys()
                if row.get("reward/mean") is not None:  # null stands for NaN
                    self.rewards.append(row["reward/mean"])
                yield json.dumps(row) + "\n"

    def read_kept(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of earlier starts, which are read from the file again."""
        return islice(iterate_rows(self._path), self._num_kept)

    def write(
        self, step: int, version: int, values: Mapping[str, float], histograms: Mapping[str, Histogram] | None = None
    ) -> None:
        """Write a row. A histogram is an object with `edges` and `counts`; every other value is a number or null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        counted = {name: histogram._asdict() for name, histogram in (histograms or {}).items()}
        row = {"step": step, "version": version, "at": round(time.time(), 3), **finite, **counted}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run with the same name, if there is one."""
    if path.exists():
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        path.rename(path.with_name(f"{path.stem}.{stamp}{path.suffix}"))


def last_step(path: Path) -> int:
    """Return the last step in a file of metrics, or 0 if there is none."""
    return max((row["step"] for row in iterate_rows(path)), default=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of metrics. There are none if the file does not exist."""
    return [*iterate_rows(path)]


def iterate_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the same rows one at a time, so that a long file does not have to fit in memory."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # a kill has cut the line off
                continue
            yield row
