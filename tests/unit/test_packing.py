"""Micro-batches within a token budget, parts of equal cost, and the balancing of groups over owners."""

import math
import random
from collections.abc import Sequence

import pytest

from rl.data.packing import (
    Unit,
    balance_owners,
    count_micro_batches,
    cut,
    mini_batch_of,
    pack,
    split_evenly,
    units_of,
)
from tests.unit.test_shared_prompts import batch_of


def units(lengths: Sequence[int]) -> list[Unit]:
    """Units of one sequence, whose attention is free."""
    return [Unit([index], length, length) for index, length in enumerate(lengths)]


def test_costs_grow_faster_than_lengths() -> None:
    found = units_of(batch_of([("a", 12), ("b", 24)]), 100, hidden_size=2)
    assert [unit.cost for unit in found] == [18, 48]  # 12 (1 + 12/24) and 24 (1 + 24/24)
    assert units_of(batch_of([]), 100, hidden_size=2) == []


def test_a_prompt_counts_once_and_its_copies_as_a_quarter() -> None:
    (unit,) = units_of(batch_of([("a" * 9, 12), ("a" * 9, 11), ("a" * 9, 10)]), 100, hidden_size=2)
    assert unit.sequences == [0, 1, 2]
    assert unit.num_tokens == 12 + 2 + 1 + 5  # 18 / 4, rounded up
    pairs = 12 * 12 + (11 * 11 - 9 * 9) + (10 * 10 - 9 * 9)
    assert unit.cost == pytest.approx(12 + 2 + 1 + pairs / 24)


def test_samples_of_a_prompt_stay_together_as_far_as_the_budget_allows() -> None:
    batch = batch_of([("a" * 20, 30), ("b" * 20, 30), ("a" * 20, 30), ("b" * 20, 30), ("a" * 20, 30)])
    assert cut(units_of(batch, 70, 64), 70, 2) == [[0, 2, 4], [1, 3]]  # 60 tokens (30 + 2 x 10 + 40 / 4), and 45
    # Two fit into 50 tokens (30 + 10 + 20 / 4), and three do not.
    assert [unit.sequences for unit in units_of(batch, 50, 64)] == [[0, 2], [4], [1, 3]]
    assert [unit.sequences for unit in units_of(batch, 29, 64)] == [[0], [2], [4], [1], [3]]


def test_units_are_smaller_if_that_fills_micro_batches_better() -> None:
    """Eight samples of a short prompt are a little more than half a micro-batch, so only one such unit would fit."""
    batch = batch_of([(prompt * 4, 104) for prompt in "abcdef" for _ in range(8)])
    found = units_of(batch, 1500, hidden_size=64)
    assert len(found) > 6 and count_micro_batches(found, 1500) == 4
    long = batch_of([(prompt * 900, 910) for prompt in "abcdef" for _ in range(8)])
    found = units_of(long, 4900, hidden_size=64)
    assert [len(unit.sequences) for unit in found] == [8] * 6, "a long prompt is not computed twice to fill a gap"


@pytest.mark.parametrize("seed", range(10))
def test_units_hold_every_sequence_once_within_the_budget(seed: int) -> None:
    random_ = random.Random(seed)
    sequences = []
    for prompt in "abcdefgh"[: random_.randint(1, 8)]:
        size = random_.randint(1, 40)
        sequences += [(prompt * size, size + random_.randint(1, 60)) for _ in range(random_.randint(1, 9))]
    random_.shuffle(sequences)
    batch, budget = batch_of(sequences), random_.choice([30, 80, 300, math.inf])
    found = units_of(batch, budget, hidden_size=16)
    assert sorted(s for unit in found for s in unit.sequences) == list(range(len(sequences)))
    for unit in found:
        assert len({sequences[s][0] for s in unit.sequences}) == 1
        assert unit.num_tokens <= budget or len(unit.sequences) == 1


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "wanted"),
    [
        ([3, 4, 3, 9, 1, 1], 7, 3),  # 9 is longer than the budget; 4 + 3; 3 + 1 + 1
        ([6, 4, 3, 3, 2, 2], 10, 2),
        ([7, 7], 7, 2),
        ([1, 1, 1], 100, 1),
        ([9, 9], 1, 2),
        ([], 7, 0),
    ],
)
def test_count_micro_batches(lengths: list[int], max_tokens: int, wanted: int) -> None:
    assert count_micro_batches(units(lengths), max_tokens) == wanted


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "count", "wanted"),
    [
        ([3, 4, 3, 9, 1, 1], 7, 3, [[3], [1, 4, 5], [0, 2]]),  # 9 alone; 4 | 3, 4 | 3 + 3, 4 + 1 + 1 | 6
        ([3, 4, 3, 9, 1, 1], 7, 4, [[3], [1], [0, 4], [2, 5]]),
        ([6, 4, 3, 3, 2, 2], 10, 2, [[0, 1], [2, 3, 4, 5]]),  # evenly 6 + 3 | 4 + 3 + 2 has no room for the last 2
        ([5], 7, 3, [[0], [], []]),
        ([], 7, 2, [[], []]),
        ([], 7, 0, []),
    ],
)
def test_pack(lengths: list[int], max_tokens: int, count: int, wanted: list[list[int]]) -> None:
    assert pack(lengths, lengths, max_tokens, count) == wanted


def test_pack_is_even_in_cost_not_in_tokens() -> None:
    assert pack([4, 3, 3, 2], [10.0, 3.0, 3.0, 2.0], 100, 2) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_pack_places_every_sequence_within_the_budget(seed: int) -> None:
    random_ = random.Random(seed)
    lengths = [random_.randint(1, 60) for _ in range(random_.randint(0, 40))]
    costs, max_tokens = [length * (1 + length / 36) for length in lengths], random_.randint(20, 200)
    fewest = count_micro_batches(units(lengths), max_tokens)
    assert sum(lengths) <= max(max_tokens, *lengths, 0) * fewest
    for count in (fewest, fewest + 1, fewest + 5):
        parts = pack(lengths, costs, max_tokens, count)
        assert len(parts) == count
        assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
        assert all(part == sorted(part) for part in parts)
        assert all(sum(lengths[index] for index in part) <= max_tokens for part in parts if len(part) > 1)
    roomy = pack(lengths, costs, sum(lengths), 4)
    assert_even([sum(costs[index] for index in part) for part in roomy], costs)


def test_the_largest_micro_batch_is_computed_first() -> None:
    assert cut(units([8, 6, 4, 9, 3]), 11, count=3) == [[0, 4], [1, 2], [3]]


def assert_even(spent: list[float], costs: list[float]) -> None:
    """Check that the fullest part exceeds the mean by at most one sequence."""
    assert sum(spent) == pytest.approx(sum(costs))
    assert max(spent) <= sum(costs) / len(spent) + max(costs, default=0) + 1e-6


@pytest.mark.parametrize(
    ("num_prompts", "num_mini_batches", "wanted"),
    [
        (5, 2, [0, 0, 0, 1, 1]),
        (6, 3, [0, 0, 1, 1, 2, 2]),
        (4, 1, [0, 0, 0, 0]),
        (3, 3, [0, 1, 2]),
        (7, 3, [0, 0, 0, 1, 1, 2, 2]),
    ],
)
def test_mini_batch_of(num_prompts: int, num_mini_batches: int, wanted: list[int]) -> None:
    assert [mini_batch_of(position, num_prompts, num_mini_batches) for position in range(num_prompts)] == wanted


@pytest.mark.parametrize(
    ("costs", "num_parts", "wanted"),
    [
        ([5, 1, 4, 2, 3], 2, [[0, 1, 3], [2, 4]]),  # 5 | 4, 5 | 4 + 3, 5 + 2 | 7, then 1 to the first of two equals
        ([0.5, 0.25, 0.25], 2, [[0], [1, 2]]),
        ([5, 1, 4, 2, 3], 1, [[0, 1, 2, 3, 4]]),
        ([2, 9], 3, [[1], [0], []]),
        ([], 2, [[], []]),
    ],
)
def test_split_evenly(costs: list[float], num_parts: int, wanted: list[list[int]]) -> None:
    assert split_evenly(costs, num_parts) == wanted


@pytest.mark.parametrize(
    ("costs", "owners", "num_owners", "wanted"),
    [
        # 12 | 9 before; 6 stays, 5 stays, 4 goes to 5, 3 to 6, 2 stays at one of two equals, 1 stays: 11 | 10
        ([6, 5, 4, 3, 2, 1], [0, 1, 0, 1, 0, 1], 2, [0, 1, 1, 0, 0, 1]),
        ([261, 250, 250, 239], [0, 1, 0, 1], 2, [0, 1, 1, 0]),  # 511 | 489 is 2.2 % above the mean, 500 | 500 after
        ([259, 250, 250, 241], [0, 1, 0, 1], 2, [0, 1, 0, 1]),  # 509 | 491: 1.8 %
        ([32, 32, 20, 20, 20], [0, 0, 1, 1, 1], 2, [0, 0, 1, 1, 1]),  # 64 | 60 is not even, but 72 | 52 is worse
        ([9, 1], [2, 2], 4, [2, 0]),
        ([7], [1], 3, [1]),
        ([5, 5, 5], [1, 2, 0], 3, [1, 2, 0]),
        ([0, 0], [1, 1], 2, [1, 1]),
        ([3, 2], [0, 0], 1, [0, 0]),
        ([], [], 2, []),
    ],
)
def test_balance_owners(costs: list[float], owners: list[int], num_owners: int, wanted: list[int]) -> None:
    assert balance_owners(costs, owners, num_owners, [0] * len(costs)) == wanted


def test_owners_are_even_in_each_mini_batch() -> None:
    """Over the whole batch 10 | 10 is balanced, but each owner would idle in one optimizer step."""
    assert balance_owners([5, 5, 5, 5], [0, 0, 1, 1], 2, [0, 0, 1, 1]) == [0, 1, 1, 0]
    assert balance_owners([5, 5, 5, 5], [0, 0, 1, 1], 2, [0, 0, 0, 0]) == [0, 0, 1, 1]
    # Only the first mini-batch is uneven: the other stays as it is.
    assert balance_owners([4, 4, 6, 6], [1, 1, 1, 0], 2, [0, 0, 1, 1]) == [1, 0, 1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_balancing_never_makes_it_worse_and_is_stable(seed: int) -> None:
    random_ = random.Random(seed)
    num_groups, num_owners, count = random_.randint(1, 60), random_.randint(1, 9), random_.randint(1, 3)
    costs = [random_.randint(1, 1000) for _ in range(num_groups)]
    owners = [random_.randrange(num_owners) for _ in range(num_groups)]
    mini_batches = [mini_batch_of(position, num_groups, count) for position in range(num_groups)]
    new_owners = balance_owners(costs, owners, num_owners, mini_batches)
    for mini_batch in set(mini_batches):
        groups = [group for group in range(num_groups) if mini_batches[group] == mini_batch]
        before, after = [0] * num_owners, [0] * num_owners
        for group in groups:
            before[owners[group]] += costs[group]
            after[new_owners[group]] += costs[group]
        assert max(after) <= max(before)
        if after != before:
            assert_even(after, [costs[group] for group in groups])
        else:
            assert all(owners[group] == new_owners[group] for group in groups)
    assert balance_owners(costs, new_owners, num_owners, mini_batches) == new_owners
