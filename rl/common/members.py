"""A metric of many ranks, engines or nodes."""

import statistics
from collections.abc import Mapping

MAX_RANKS = 64  # with a metric of their own


def metrics_of_members(
    prefix: str, values: Mapping[int, float], most: int = MAX_RANKS, unit: float = 1.0
) -> dict[str, float]:
    """Return a metric PREFIX_N for each member N. If there are more than `most`, return PREFIX_min, _median and _max
    instead: one metric per rank of a large run would cost the leader more time than all others, and fill the disk.
    The metrics are the values times `unit`."""
    if len(values) <= most:
        return {f"{prefix}_{number}": value * unit for number, value in sorted(values.items())}
    ordered = sorted(values.values())
    figures = {"min": ordered[0], "median": statistics.median(ordered), "max": ordered[-1]}
    return {f"{prefix}_{name}": figure * unit for name, figure in figures.items()}
