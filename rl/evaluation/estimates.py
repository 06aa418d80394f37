"""What an evaluation says of a policy, from a table of prompts and their sampled responses, and how sure it is."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

Z_95 = 1.959964  # of the normal distribution: 95 % lie within


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and the interval that holds the true one in 95 of 100 evaluations on other prompts."""

    mean: float
    low: float
    high: float


def pass_at(num_passed: int, num_samples: int, k: int) -> float:
    """The chance that one of k responses passes, without bias from n of which c do: 1 - C(n - c, k) / C(n, k) (arXiv
    2107.03374)."""
    assert 0 <= num_passed <= num_samples and 1 <= k <= num_samples, (num_passed, num_samples, k)
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority(scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """The score of the answer that most responses give (arXiv 2203.11171), of the first given among equals. A response
    without an answer has no vote; without any vote it is 0."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    (winner, _), *_ = votes.most_common(1)  # the first given among equals
    return scores[answers.index(winner)]


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value a prompt: responses to the same prompt depend on each other, so prompts are what is counted.

    Between 0 and 1 the interval is Wilson's, which is honest near both ends, for as many prompts as would have this
    variance if each value were 0 or 1. Otherwise the normal one.
    """
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan)
    mean = fmean(values)
    error = variance(values) / count if count > 1 else 0.0  # of the mean, squared
    if not all(0 <= value <= 1 for value in values):
        half = Z_95 * math.sqrt(error)
        return Estimate(mean, mean - half, mean + half)
    effective = mean * (1 - mean) / error if error else count
    square = Z_95**2 / effective
    centre = (mean + square / 2) / (1 + square)
    half = Z_95 * math.sqrt(mean * (1 - mean) / effective + square / effective / 4) / (1 + square)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    return sorted({1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit} | {limit})
