"""Sums over samples, groups and ranks, such as of scores, and the metrics that become of them."""

from collections.abc import Iterable, Mapping
from typing import Any

Totals = dict[str, list[float]]  # by metric: the sum and how many it is a mean over; 0: it is no mean


def total(samples: Iterable[Mapping[str, Any]]) -> Totals:
    """Of results of the pool. What hung or crashed counts apart from what raised or returned no number."""
    sums: Totals = {"reward/timeouts": [0.0, 0.0], "reward/errors": [0.0, 0.0]}
    for sample in samples:
        for name, value in sample["parts"].items():
            pair = sums.setdefault(f"reward/{name}", [0.0, 0.0])
            pair[0] += value
            pair[1] += 1
        sums["reward/timeouts"][0] += sample["status"] in ("timeout", "crash")
        sums["reward/errors"][0] += sample["status"] == "error"
    return sums


def add(parts: Iterable[Totals]) -> Totals:
    """In the order given, on which the last bit of a sum depends."""
    sums: Totals = {}
    for part in parts:
        for name, (value, count) in part.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += value
            pair[1] += count
    return sums


def metrics_of(sums: Totals) -> dict[str, float]:
    return {name: value / count if count else value for name, (value, count) in sums.items()}
