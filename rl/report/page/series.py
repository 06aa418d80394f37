"""Curves of metrics: a running mean beside the exact values, and fewer points for long runs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_POINTS = 600  # of a curve in a chart
SMOOTHED_SHARE = 10  # the running mean spans one tenth of the points
MAX_WINDOW = 50


class CurvePoint(NamedTuple):
    step: int
    value: float  # as it is in metrics.jsonl
    mean: float  # of this value and those before it, in the window


def default_window(num_points: int) -> int:
    """Return the number of values in the running mean. 1: no smoothing, since the curve is short."""
    return max(1, min(MAX_WINDOW, num_points // SMOOTHED_SHARE))


def make_curve(points: Sequence[tuple[int, float]], window: int = 0, max_points: int = MAX_POINTS) -> list[CurvePoint]:
    """Return the points of a curve. `window` 0: the default for its length. The mean is computed before thinning."""
    means = running_mean([value for _, value in points], window or default_window(len(points)))
    curve = [CurvePoint(step, value, mean) for (step, value), mean in zip(points, means, strict=True)]
    return thin(curve, max_points)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to `window` - 1 values before it."""
    if window == 1:
        return list(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    begins = np.maximum(0, ends - window)
    return ((sums[ends] - sums[begins]) / (ends - begins)).tolist()


def thin(curve: Sequence[CurvePoint], max_points: int) -> list[CurvePoint]:
    """Return at most `max_points` of a curve: the first, the last, the lowest and the highest of equal intervals.

    No value is changed. A peak of a single step stays visible.
    """
    if len(curve) <= max_points:
        return list(curve)
    num_intervals = max(1, max_points // 4)
    kept: list[CurvePoint] = []
    for index in range(num_intervals):
        part = curve[index * len(curve) // num_intervals : (index + 1) * len(curve) // num_intervals]
        extremes = {part[0], min(part, key=lambda point: point.value), max(part, key=lambda point: point.value)}
        kept += sorted({*extremes, part[-1]})
    return kept
