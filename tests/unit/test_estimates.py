"""avg@k, pass@k and maj@k worked out by hand, and the coverage of the confidence intervals."""

import math
import random

import pytest

from rl.evaluation.estimates import Estimate, estimate, majority, pass_at, powers_of_two


@pytest.mark.parametrize(
    ("passed", "samples", "k", "wanted"),
    [
        (0, 4, 1, 0.0),
        (4, 4, 2, 1.0),
        (1, 4, 1, 0.25),
        (1, 4, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (2, 4, 2, 5 / 6),  # 1 - 1 / 6
        (1, 4, 4, 1.0),
        (3, 4, 2, 1.0),  # only one fails, so one of any two passes
    ],
)
def test_pass_at(passed: int, samples: int, k: int, wanted: float) -> None:
    assert pass_at(passed, samples, k) == pytest.approx(wanted, abs=1e-12)


def test_pass_at_is_what_drawing_k_gives() -> None:
    source = random.Random(0)
    outcomes = [1, 1, 1, 0, 0, 0, 0, 0]
    drawn = [max(source.sample(outcomes, 3)) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(pass_at(3, 8, 3), abs=0.015)


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        (["7", "8", "8", None], 0.2),
        (["7", "8", "9", "8"], 0.2),
        (["9", "7", "7", "9"], 0.1),  # a tie: the first answer wins
        ([None, None, "7", None], 0.3),
        ([None, None, None, None], 0.0),
    ],
)
def test_majority(answers: list[str | None], wanted: float) -> None:
    assert majority([0.1, 0.2, 0.3, 0.4], answers) == wanted


def test_interval_of_a_binary_outcome_is_wilsons() -> None:
    """8 of 10. The sample variance divides by n - 1, so the effective size is 9: z^2 / 9 = 0.42683, the centre is
    (0.8 + 0.21342) / 1.42683 = 0.71026, half the width 1.96 sqrt(0.16 / 9 + 0.42683 / 36) / 1.42683 = 0.23647."""
    found = estimate([1.0] * 8 + [0.0] * 2)
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.47379, 0.94673), abs=1e-4)


def test_the_interval_of_equal_values_has_a_width() -> None:
    """0 of 20: the upper end is z^2 / (n + z^2) = 3.8415 / 23.8415."""
    none = estimate([0.0] * 20)
    assert (none.mean, none.low) == (0.0, 0.0) and none.high == pytest.approx(0.16113, abs=1e-4)
    whole = estimate([1.0] * 20)
    assert (whole.mean, whole.high) == (1.0, 1.0) and whole.low == pytest.approx(1 - 0.16113, abs=1e-4)


def test_interval_beyond_0_and_1_is_the_normal_one() -> None:
    found = estimate([-1.0, 3.0])
    assert found == Estimate(1.0, pytest.approx(1 - 1.959964 * 2), pytest.approx(1 + 1.959964 * 2))


def test_no_prompts_and_one_prompt() -> None:
    assert math.isnan(estimate([]).mean)
    alone = estimate([1.0])
    assert alone.mean == 1.0 and 0.2 < alone.low < 0.25


@pytest.mark.parametrize("num_samples", [1, 8])
def test_intervals_contain_the_truth_in_95_percent(num_samples: int) -> None:
    """Prompts differ in difficulty: their chance of success is Beta(1, 3), which has the mean 1/4."""
    source, held, num_evaluations = random.Random(1), 0, 1000
    for _ in range(num_evaluations):
        chances = [source.betavariate(1, 3) for _ in range(60)]
        found = estimate([sum(source.random() < p for _ in range(num_samples)) / num_samples for p in chances])
        held += found.low <= 0.25 <= found.high
    assert 0.93 <= held / num_evaluations <= 0.97


def test_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]
