"""Statistics of an evaluation: scores of sampled responses, with confidence intervals."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

Z_95 = 1.959964  # 95 % of a normal distribution lie within this many standard deviations


class Estimate(NamedTuple):
    """A mean over prompts with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def pass_at(num_passed: int, num_samples: int, k: int) -> float:
    """Estimate pass@k without bias from c passes in n samples: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374)."""
    assert 0 <= num_passed <= num_samples and 1 <= k <= num_samples, (num_passed, num_samples, k)
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority(scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """Return the score of the most frequent answer, the first one in a tie, or 0 without answers (arXiv 2203.11171)."""
    votes = Counter(answer for answer in answers if answer is not None)
    return scores[answers.index(votes.most_common(1)[0][0])] if votes else 0.0


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its interval. There is one value per prompt: responses to one prompt are not independent.
    For values between 0 and 1 the interval is Wilson's, which is accurate near both ends. Its sample size is the number
    of prompts that would give the observed variance if each value were 0 or 1. Otherwise the interval is normal.
    """
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan)
    mean = fmean(values)
    error = variance(values) / count if count > 1 else 0.0  # squared standard error of the mean
    if not all(0 <= value <= 1 for value in values):
        half = Z_95 * math.sqrt(error)
        return Estimate(mean, mean - half, mean + half)
    effective = mean * (1 - mean) / error if error else count
    square = Z_95**2 / effective
    centre = (mean + square / 2) / (1 + square)
    half = Z_95 * math.sqrt(mean * (1 - mean) / effective + square / effective / 4) / (1 + square)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... and the limit itself."""
    return sorted({1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit} | {limit})
