"""Curves and sums of a run of any length, in bounded memory: rows come in one after the other, and few are kept."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAX_POINTS = 600  # of a curve
MAX_BARS = 60
SMOOTHED_SHARE = 10  # the running mean spans one tenth of the values
MAX_WINDOW = 50  # unless the user sets the window
NUM_ENDS = 5  # values at the beginning and at the end of a curve whose means are compared
VALUE, MEAN = 1, 2  # columns of a point; the first has the step


class CurvePoint(NamedTuple):
    step: int
    value: float  # as it is in metrics.jsonl
    mean: float  # of this value and those before it, in the window


def default_window(num_values: int) -> int:
    """Return the number of values in the running mean. 1: no smoothing, since the curve is short."""
    return max(1, min(MAX_WINDOW, num_values // SMOOTHED_SHARE))


class RunningMean:
    """The mean of each value and up to `window` - 1 values before it. Values come in blocks."""

    def __init__(self, window: int):
        self._window, self._count = window, 0
        self._before = np.zeros(window - 1)  # the last values of earlier blocks

    def add(self, values: np.ndarray) -> np.ndarray:
        """Return the means at these values."""
        values = np.concatenate([self._before, values])
        # Each window is summed on its own: in differences of running sums, a huge value would spoil all later means.
        sums = np.convolve(values, np.ones(self._window), "valid")
        counts = np.minimum(np.arange(1, len(sums) + 1) + self._count, self._window)
        self._before = values[len(sums) :]
        self._count += len(sums)
        return np.asarray(sums / counts)


class ThinnedPoints:
    """At most `max_points` of a curve. A point is a row: the step, the value, and numbers that go with them.

    Up to `max_points`, all points are kept. Beyond that, the curve is cut into intervals with equal numbers of points,
    and the first, the last, the lowest and the highest point of each interval are kept. If there are too many
    intervals, each two become one. So no kept value is changed, and a peak of a single step stays.
    """

    def __init__(self, max_points: int = MAX_POINTS):
        self._max_points, self._max_intervals = max_points, max(2, max_points // 8 * 2)  # 4 points each; an even number
        self._parts: list[np.ndarray] = []  # blocks while all points are kept, then intervals
        self._num_points = 0  # of the curve
        self._length = 1  # points of the curve in an interval
        self._room = 0  # for points in the last interval

    def add(self, points: np.ndarray) -> None:
        """Add points with increasing steps, after those of earlier calls."""
        was_whole = self._num_points <= self._max_points
        self._num_points += len(points)
        if self._num_points <= self._max_points:
            self._parts.append(points)
            return
        if was_whole:
            points, self._parts = np.concatenate([*self._parts, points]), []
            while self._length * self._max_intervals < self._num_points:
                self._length *= 2
        while len(points):
            if not self._room:
                self._open_interval(points[:0])
            part, points = points[: self._room], points[self._room :]
            self._parts[-1] = find_extremes(np.concatenate([self._parts[-1], part]))
            self._room -= len(part)

    def _open_interval(self, empty: np.ndarray) -> None:
        if len(self._parts) == self._max_intervals:
            pairs = zip(self._parts[::2], self._parts[1::2], strict=True)
            self._parts = [find_extremes(np.concatenate(pair)) for pair in pairs]
            self._length *= 2
        self._parts.append(empty)
        self._room = self._length

    def points(self) -> np.ndarray:
        """Return the kept points, by increasing step."""
        return np.concatenate(self._parts) if self._parts else np.empty((0, VALUE + 1))


def find_extremes(points: np.ndarray) -> np.ndarray:
    """Return the first, the last, the lowest and the highest of some points, each once and in their order."""
    values = points[:, VALUE]
    return points[sorted({0, int(values.argmin()), int(values.argmax()), len(points) - 1})]


def thin(points: np.ndarray, max_points: int) -> np.ndarray:
    """Return at most `max_points` of the points."""
    thinned = ThinnedPoints(max_points)
    thinned.add(points)
    return thinned.points()


class Curve:
    """The values of one metric, with their running mean. `window` 0: the default for their number."""

    def __init__(self, window: int = 0):
        self.num_values, self.total = 0, 0.0
        self.first, self.last = np.empty(0), np.empty(0)  # at most NUM_ENDS values of each end
        self._window, self._mean, self._points = window, RunningMean(window or MAX_WINDOW), ThinnedPoints()

    @property
    def window(self) -> int:
        """The number of values in the running mean."""
        return self._window or default_window(self.num_values)

    def add(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add the values of further steps."""
        added = np.array(values, dtype=float)
        self.num_values += len(added)
        self.total += float(added.sum())
        self.first = np.concatenate([self.first, added[:NUM_ENDS]])[:NUM_ENDS]
        self.last = np.concatenate([self.last, added[-NUM_ENDS:]])[-NUM_ENDS:]
        self._points.add(np.column_stack([steps, added, self._mean.add(added)]))

    def points(self, max_points: int = MAX_POINTS) -> list[CurvePoint]:
        """Return at most `max_points` points. The mean was computed before they were thinned."""
        points = self._points.points()
        if self.num_values <= MAX_POINTS:  # only now is it known how long the curve is
            points = points.copy()
            points[:, MEAN] = RunningMean(self.window).add(points[:, VALUE])
        kept = thin(points, max_points).tolist()
        return [CurvePoint(int(step), value, mean) for step, value, mean in kept]


@dataclass
class StepSum:
    """Sums over several steps that follow each other."""

    first: int  # step
    last: int
    num_steps: int
    sums: Counter[Any]


class StepSums:
    """At most MAX_BARS sums over equal numbers of steps. The last may have fewer steps."""

    def __init__(self) -> None:
        self.bars: list[StepSum] = []
        self.num_steps = 1  # in a bar

    def add(self, step: int, amounts: Mapping[Any, float]) -> None:
        """Add the amounts of a step, which is later than those of earlier calls."""
        if not self.bars or self.bars[-1].num_steps == self.num_steps:
            if len(self.bars) == MAX_BARS:
                self.bars = [_join(*pair) for pair in zip(self.bars[::2], self.bars[1::2], strict=True)]
                self.num_steps *= 2
            self.bars.append(StepSum(step, step, 0, Counter()))
        bar = self.bars[-1]
        bar.last, bar.num_steps = step, bar.num_steps + 1
        bar.sums.update(amounts)


def _join(first: StepSum, second: StepSum) -> StepSum:
    first.sums.update(second.sums)  # adds
    return StepSum(first.first, second.last, first.num_steps + second.num_steps, first.sums)
