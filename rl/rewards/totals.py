"""Sums of scores over samples, groups and ranks, and the metrics made from them."""

from collections.abc import Iterable, Mapping
from typing import Any

# How a conversation ended. Limits: `turns`, `tokens` of the model, `context` (all tokens), `seconds`. Failures of the
# user's code: `error`, `timeout`, `crash`. `long_prompt`: it never began.
ENDINGS = ("done", "turns", "tokens", "context", "seconds", "error", "timeout", "crash", "long_prompt")
MEANS = ("turns", "calls")  # per conversation
PROBLEMS = ("unknown_tool", "bad_arguments", "tool_errors", "tool_timeouts", "tool_crashes")  # of calls; sums
Totals = dict[str, list[float]]  # by metric: sum and count; a count of 0 marks a metric that is a sum, not a mean


def total(samples: Iterable[Mapping[str, Any]]) -> Totals:
    """Sum up results of the pool. Calls that hung or crashed count as timeouts, and those that raised as errors."""
    sums: Totals = {"reward/timeouts": [0.0, 0.0], "reward/errors": [0.0, 0.0]}
    for sample in samples:
        _add_to(sums, {f"reward/{name}": [value, 1.0] for name, value in sample["parts"].items()})
        sums["reward/timeouts"][0] += sample["status"] in ("timeout", "crash")
        sums["reward/errors"][0] += sample["status"] == "error"
        if "ending" in sample:
            _add_to(sums, _count_conversation(sample["ending"], sample["counts"]))
    return sums


def _count_conversation(ending: str, counts: Mapping[str, int]) -> Totals:
    sums = {f"environment/ended_{name}": [float(name == ending), 1.0] for name in ENDINGS}
    sums |= {f"environment/{name}": [float(counts.get(name, 0)), 1.0] for name in MEANS}
    return sums | {f"environment/{name}": [float(counts.get(name, 0)), 0.0] for name in PROBLEMS}


def add(parts: Iterable[Totals]) -> Totals:
    """Add totals in the given order. The rounding of a sum depends on it."""
    sums: Totals = {}
    for part in parts:
        _add_to(sums, part)
    return sums


def _add_to(sums: Totals, part: Totals) -> None:
    for name, (value, count) in part.items():
        pair = sums.setdefault(name, [0.0, 0.0])
        pair[0] += value
        pair[1] += count


def metrics_of(sums: Totals) -> dict[str, float]:
    return {name: value / count if count else value for name, (value, count) in sums.items()}


def count_samples(sums: Totals) -> tuple[int, int]:
    """Return the number of samples, and how many of them failed. Every sample has a score of every function."""
    num_samples = max((count for _, count in sums.values()), default=0.0)
    num_failed = sum(sums.get(name, (0.0, 0.0))[0] for name in ("reward/timeouts", "reward/errors"))
    return int(num_samples), int(num_failed)
