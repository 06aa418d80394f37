"""What a report keeps of the rows of a run. Its size hardly depends on the number of rows."""

from array import array
from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from rl.report.accounting import BUSY, WAIT
from rl.report.page.series import Curve, StepSums, ThinnedPoints

NOT_METRICS = ("step", "version", "at")
BLOCK = 256  # rows that are added to the curves together
MAX_NUMBER = 1e300  # larger ones count as infinite, so that sums of numbers are finite
STEP_SECONDS = "time/step"
# The stages of a step, and those after it. Others belong to the start of an attempt.
STAGES = ["rollout", "logprobs", "advantages", "update", "sync", "handover", "evaluate", "checkpoint", "other"]
LENGTHS = "rollout/lengths"  # a histogram
MEDIANS = ("perf/tokens_per_s", STEP_SECONDS)  # their values are all kept, in 8 bytes each
EVALUATION = "eval/"
NUM_FIRST, NUM_LAST = 20, 40  # evaluations whose values are kept for a table


def is_number(value: Any) -> bool:
    """Return whether a value of a row is a finite number."""
    return (type(value) is float or type(value) is int) and -MAX_NUMBER <= value <= MAX_NUMBER


class RowSummary:
    """The rows of a run, in little memory. `window` is the number of values in the running means; 0: by length."""

    def __init__(self, window: int = 0):
        self.curves: dict[str, Curve] = {}  # by metric, in the order of their first appearance
        self.estimates: dict[str, ThinnedPoints] = {}  # by metric: value, low and high of each evaluation
        self.progress = ThinnedPoints()  # steps, and when they were written
        self.first_at: float | None = None  # seconds since 1970; None: not recorded
        self.last_at: float | None = None
        self.last_step = 0
        self.stages, self.lengths = StepSums(), StepSums()  # `time/...` of the stages, and counts by edges of bins
        self.weighted = Counter[str]()  # sums of a share of a step's time times the seconds of the step
        self.medians = {name: array("d") for name in MEDIANS}
        self.num_evaluations = 0
        self.first_evaluations: list[dict[str, Any]] = []
        self.last_evaluations = deque[dict[str, Any]](maxlen=NUM_LAST)
        self._window = window
        self._block: dict[str, tuple[list[int], list[float]]] = {}  # steps and values that are not in the curves yet
        self._num_waiting = 0  # rows in the block

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row. Its step is larger than those of earlier rows."""
        step, block = row["step"], self._block
        for name, value in row.items():
            # As in is_number; a call would take longer than all of this.
            if (type(value) is float or type(value) is int) and -MAX_NUMBER <= value <= MAX_NUMBER:
                found = block.get(name)
                if found is None:
                    found = block[name] = ([], [])
                found[0].append(step)
                found[1].append(value)
        self.last_step = step
        self._add_bars(step, row)
        self._num_waiting += 1
        if self._num_waiting == BLOCK:
            self.flush()

    def flush(self) -> None:
        """Add the rows that wait to the curves. Call this after the last row."""
        block, self._block, self._num_waiting = self._block, {}, 0
        seconds = dict(zip(*block.get(STEP_SECONDS, ((), ()))))
        evaluations: dict[int, dict[str, float]] = {}  # by step
        for name, (steps, values) in block.items():
            if name == "at":
                self._add_times(steps, values)
            if name in NOT_METRICS:
                continue
            if name not in self.curves:
                self.curves[name] = Curve(1 if name.startswith(EVALUATION) else self._window)
            self.curves[name].add(steps, values)
            if name in self.medians:
                self.medians[name].extend(values)
            if name.startswith((f"{BUSY}/", f"{WAIT}/")):
                self.weighted[name] += sum(value * seconds.get(step, 0.0) for step, value in zip(steps, values))
            if name.startswith(EVALUATION):
                for step, value in zip(steps, values):
                    evaluations.setdefault(step, {})[name] = value
        for step in sorted(evaluations):
            self._add_evaluation(step, evaluations[step])

    def _add_times(self, steps: list[int], times: list[float]) -> None:
        self.progress.add(np.column_stack([steps, times]).astype(float))
        self.first_at = min(times) if self.first_at is None else min(self.first_at, *times)
        self.last_at = max(times) if self.last_at is None else max(self.last_at, *times)

    def _add_bars(self, step: int, row: Mapping[str, Any]) -> None:
        if is_number(row.get(STEP_SECONDS)):
            names = (STEP_SECONDS, *(f"time/{stage}" for stage in STAGES))
            self.stages.add(step, {name: row[name] for name in names if is_number(row.get(name))})
        histogram = row.get(LENGTHS)
        if isinstance(histogram, dict) and sum(histogram.get("counts", ())) > 0:
            edges = histogram["edges"]
            self.lengths.add(step, dict(zip(pairwise(edges), histogram["counts"])))

    def _add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            bounds = [values.get(f"{name}_low"), values.get(f"{name}_high")]
            if None not in bounds:
                points = self.estimates.setdefault(name, ThinnedPoints())
                points.add(np.array([[step, value, *bounds]], dtype=float))
        self.num_evaluations += 1
        kept = self.first_evaluations if len(self.first_evaluations) < NUM_FIRST else self.last_evaluations
        kept.append({"step": step, **values})

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The values of the first and the last evaluations, by increasing step."""
        return [*self.first_evaluations, *self.last_evaluations]
