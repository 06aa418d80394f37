"""How fast each engine decodes, compared with the other engines.

Tokens per second would not show this. A decode step takes a fixed time and a little more for each sequence, so an
engine with few sequences decodes fewer tokens per second than an equal one with many, and would get fewer and fewer
groups. So the time of a decode step is compared only with steps of other engines with about as many sequences.

The times come from the meter of each engine (meter.py). This module has no torch and no messages.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

MIN_STEPS = 32  # of an engine, before its speed is computed
TOLERANCE = 0.1  # engines this close to the median count as equal, so that noise changes nothing
SMOOTHING = 0.5  # weight of a new measurement
NUM_ITERATIONS = 20
MEAN_IN_CLASS = 0.75  # mean number of sequences in a class, over its largest

StepTimes = list[tuple[int, int, float]]  # size class of the sequences, number of steps, their seconds


class EngineSpeeds:
    """The speeds of all engines relative to their median, from the times of their decode steps."""

    def __init__(self, engines: Iterable[int]):
        self._slowness = dict.fromkeys(engines, 0.0)  # logarithm of an engine's time for the same work
        self._is_known = dict.fromkeys(self._slowness, False)
        self._times: dict[int, dict[int, tuple[int, float]]] = {engine: {} for engine in self._slowness}
        self.overhead = 0.0  # number of sequences that take as long as the fixed part of a decode step

    def add(self, engine: int, times: Sequence[tuple[int, int, float]]) -> None:
        own = self._times[engine]
        for size, count, seconds in times:
            before = own.get(size, (0, 0.0))
            own[size] = (before[0] + count, before[1] + seconds)

    def measure(self) -> dict[int, float]:
        """Use the times that were added, if they are enough, and return the speed of each engine."""
        num_engines = defaultdict[int, int](int)  # that have steps of a size
        for own in self._times.values():
            for size in own:
                num_engines[size] += 1
        shared = {
            engine: {size: time for size, time in own.items() if num_engines[size] > 1 and time[1] > 0}
            for engine, own in self._times.items()
        }
        num_steps = {engine: sum(count for count, _ in own.values()) for engine, own in shared.items()}
        measured = [engine for engine, count in num_steps.items() if count >= MIN_STEPS]
        if len(measured) > 1:
            found = self._fit({engine: shared[engine] for engine in measured})
            for engine in measured:
                weight = SMOOTHING if self._is_known[engine] else 1.0
                self._slowness[engine] += weight * (found[engine] - self._slowness[engine])
                self._is_known[engine] = True
                self._times[engine] = {}
        return self._relative()

    def _fit(self, times: dict[int, dict[int, tuple[int, float]]]) -> dict[int, float]:
        """Return each engine's slowness, so that the logarithm of a step's time is the sum of it and of a term of the
        step's size. Least squares, weighted by the number of steps, from the slowness so far."""
        slowness = {engine: self._slowness[engine] for engine in times}
        cells = [
            (engine, size, count, math.log(seconds / count))
            for engine, own in times.items()
            for size, (count, seconds) in own.items()
        ]
        for _ in range(NUM_ITERATIONS):
            by_size = _weighted_means((size, count, log - slowness[engine]) for engine, size, count, log in cells)
            slowness = _weighted_means((engine, count, log - by_size[size]) for engine, size, count, log in cells)
        if len(by_size) > 1:
            self.overhead = _overhead({size: math.exp(log) for size, log in by_size.items()})
        return slowness

    def _relative(self) -> dict[int, float]:
        usual = statistics.median_low(self._slowness.values())
        speeds = {engine: math.exp(usual - slowness) for engine, slowness in self._slowness.items()}
        return {engine: 1.0 if abs(speed - 1.0) < TOLERANCE else speed for engine, speed in speeds.items()}


def _overhead(seconds: Mapping[int, float]) -> float:
    """Return the fixed part of a step's time over the part of one sequence, from the times of steps by their size.

    It is at most the largest size. A larger one could not be told from noise, and would leave out engines that are
    hardly slower than others.
    """
    sizes = {size: MEAN_IN_CLASS * size for size in seconds}
    slope, fixed = statistics.linear_regression([sizes[size] for size in seconds], [*seconds.values()])
    largest = max(sizes.values())
    return largest if slope * largest <= fixed else max(0.0, fixed / slope)


def _weighted_means(values: Iterable[tuple[int, int, float]]) -> dict[int, float]:
    """Return the mean for each key. The values are key, weight and number."""
    sums, weights = defaultdict[int, float](float), defaultdict[int, float](float)
    for key, weight, number in values:
        sums[key] += weight * number
        weights[key] += weight
    return {key: sums[key] / weights[key] for key in sums}
