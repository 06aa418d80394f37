"""Divide the groups of a round among engines. Used by the dispatcher, and by the estimates of simulate.py."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def mix(tasks: Sequence[T], num_engines: int) -> list[T]:
    """Order the tasks of a round with carried groups so that consecutive ones have carried groups of all ages, and new
    ones. Otherwise one engine would read the longest responses again, while another only starts new ones."""
    return [task for first in range(num_engines) for task in tasks[first::num_engines]]


def divide(count: int, shares: Mapping[int, float]) -> dict[int, int]:
    """Divide a number of groups by shares that add up to 1. Rounded down; the largest remainders get what is left."""
    found = {key: math.floor(count * share + 1e-9) for key, share in shares.items()}
    by_remainder = sorted(shares, key=lambda key: found[key] - count * shares[key])
    for key in by_remainder[: count - sum(found.values())]:
        found[key] += 1
    return found


def share_by_speed(count: int, speeds: Mapping[int, float], overhead: float = 0.0) -> dict[int, int]:
    """Return how many groups each engine may hold at a time, rounded up, so that all engines end together.

    An engine with k groups takes (k + overhead) / speed: the overhead is the number of groups that take as long as the
    fixed part of its decode steps. An engine gets no group if its fixed part alone takes as long as the others need.
    Equal engines have equal shares.
    """
    engines = sorted(speeds, key=speeds.__getitem__)
    while True:
        seconds = (count + len(engines) * overhead) / sum(speeds[lead] for lead in engines)
        if seconds * speeds[engines[0]] > overhead or len(engines) == 1:
            break
        del engines[0]
    shares = {lead: math.ceil(seconds * speeds[lead] - overhead - 1e-9) for lead in engines}
    return dict.fromkeys(speeds, 0) | shares
