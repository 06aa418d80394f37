"""Advantages and shaped rewards, against numbers worked out by hand and against loops."""

import math

import pytest
import torch
from torch import Tensor

from rl.algo.advantages import (
    gae,
    group_relative,
    is_informative,
    leave_one_out,
    moments,
    overlong_penalty,
    returns_to_go,
    standardize,
    token_rewards,
)
from tests.unit.ragged import close, ragged


def floats(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize(
    ("rewards", "ids", "normalize_std", "wanted"),
    [
        # mean 1/2; deviations of 1/2, so the variance (n - 1) is 4 * 1/4 / 3 = 1/3
        ([1, 0, 0, 1], [5, 5, 5, 5], False, [0.5, -0.5, -0.5, 0.5]),
        ([1, 0, 0, 1], [5, 5, 5, 5], True, [0.866025, -0.866025, -0.866025, 0.866025]),
        # groups 9: rewards 3, 5 (mean 4, std sqrt 2); 2: rewards 0, 0, 3 (mean 1, std sqrt 3), interleaved
        ([3, 0, 0, 5, 3], [9, 2, 2, 9, 2], False, [-1, -1, -1, 1, 2]),
        ([3, 0, 0, 5, 3], [9, 2, 2, 9, 2], True, [-0.707106, -0.577350, -0.577350, 0.707106, 1.154700]),
        # equal rewards, and a group of one: nothing to learn
        ([7, 7, 7, 2], [0, 0, 0, 1], True, [0, 0, 0, 0]),
        ([7, 7, 7, 2], [0, 0, 0, 1], False, [0, 0, 0, 0]),
        ([], [], True, []),
    ],
)
def test_group_relative(rewards: list[float], ids: list[int], normalize_std: bool, wanted: list[float]) -> None:
    close(group_relative(floats(rewards), ints(ids), normalize_std), wanted)


@pytest.mark.parametrize("size", [2, 3, 7, 16, 61])
def test_equal_rewards_that_no_float_holds_have_advantage_0(size: int) -> None:
    """A float32 mean of seven rewards of 0.1 is not 0.1."""
    rewards, ids = torch.full((size,), 0.1), torch.zeros(size, dtype=torch.int64)
    for advantages in (group_relative(rewards, ids, True), leave_one_out(rewards, ids)):
        assert advantages.tolist() == [0.0] * size
    assert not is_informative(rewards, ids).any()
    assert standardize(rewards, moments(rewards)).abs().max().item() < 1e-6


@pytest.mark.parametrize(
    ("rewards", "ids", "wanted"),
    [
        # the others of a 1 have mean 1/3, those of a 0 have mean 2/3
        ([1, 0, 0, 1], [5, 5, 5, 5], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        # group 9: 3 - 5 and 5 - 3; group 2: 0 - 3/2 twice and 3 - 0
        ([3, 0, 0, 5, 3], [9, 2, 2, 9, 2], [-2, -1.5, -1.5, 2, 3]),
        ([7, 7, 7], [0, 0, 0], [0, 0, 0]),
        ([2, -4], [0, 1], [2, -4]),  # nobody else: the reward itself
        ([], [], []),
    ],
)
def test_leave_one_out(rewards: list[float], ids: list[int], wanted: list[float]) -> None:
    close(leave_one_out(floats(rewards), ints(ids)), wanted)


def test_group_advantages_against_a_loop() -> None:
    data = ragged()
    for normalize_std in (False, True):
        wanted = []
        for reward, group in zip(data.rewards.tolist(), data.group_ids.tolist()):
            members = [r for r, g in zip(data.rewards.tolist(), data.group_ids.tolist()) if g == group]
            mean = sum(members) / len(members)
            std = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
            wanted.append((reward - mean) / (std + 1e-6 if normalize_std else 1))
        close(group_relative(data.rewards, data.group_ids, normalize_std), wanted)
    # Leaving one of n out gives n / (n - 1) times the distance from the mean.
    centred = group_relative(data.rewards, data.group_ids, normalize_std=False)
    close(leave_one_out(data.rewards, data.group_ids), centred * 4 / 3)


def test_is_informative() -> None:
    rewards = floats([1, 0, -1, 0, 1, 1, 0, -1])
    ids = ints([4, 9, 1, 9, 4, 3, 8, 1])  # 4: 1, 1; 9: 0, 0; 1: -1, -1; 3 and 8: alone
    assert is_informative(rewards, ids).tolist() == [False] * 8
    rewards[[3, 7]] = -0.5
    assert is_informative(rewards, ids).tolist() == [False, True, True, True, False, False, False, True]
    assert is_informative(rewards[:0], ids[:0]).shape == (0,)


def test_overlong_penalty() -> None:
    """With at most 20 tokens, each of the last 4 costs a quarter."""
    lengths = ints([0, 15, 16, 17, 18, 19, 20, 25])
    close(overlong_penalty(lengths, max_length=20, buffer=4), [0, 0, 0, -0.25, -0.5, -0.75, -1, -1])
    close(overlong_penalty(lengths[:3], max_length=20, buffer=20), [0, -0.75, -0.8])
    assert overlong_penalty(lengths[:0], 20, 4).shape == (0,)


def test_token_rewards() -> None:
    lengths, ids = ints([0, 3, 0, 1, 2, 0]), ints([1, 1, 1, 3, 4, 4])
    rewards = floats([9, 5, 9, -7, 1, 9])
    close(token_rewards(rewards, None, 0.0, ids, lengths), [0, 0, 5, -7, 0, 1])
    kl = floats([1, 2, -3, 4, 0, 6])
    close(token_rewards(rewards, kl, 0.5, ids, lengths), [-0.5, -1, 6.5, -9, 0, -2])
    assert token_rewards(rewards[:0], kl[:0], 0.5, ids[:0], lengths[:0]).shape == (0,)
    assert token_rewards(rewards[:1], None, 0.5, ids[:0], lengths[:1]).shape == (0,)  # one sequence, no token


def test_returns_to_go() -> None:
    ids = ints([0, 0, 0, 2, 3, 3])
    rewards = floats([1, 2, 4, 8, 0, 2])
    close(returns_to_go(rewards, ids, gamma=0.5), [1 + 1 + 1, 2 + 2, 4, 8, 1, 2])
    close(returns_to_go(rewards, ids, gamma=1.0), [7, 6, 4, 8, 2, 2])
    close(returns_to_go(rewards, ids, gamma=0.0), rewards)
    assert returns_to_go(rewards[:0], ids[:0], 1.0).shape == (0,)


GAE_REWARDS, GAE_VALUES, GAE_IDS = floats([0, 0, 1, 2]), floats([0.5, 1, 2, 3]), ints([0, 0, 0, 2])


@pytest.mark.parametrize(
    ("gamma", "lam", "wanted"),
    [
        # surprises 0 + 1/2 * 1 - 1/2 = 0, 0 + 1/2 * 2 - 1 = 0, 1 - 2 = -1; each sees a quarter of the next's
        (0.5, 0.5, [-0.0625, -0.25, -1, -1]),
        (1.0, 1.0, [0.5, 0, -1, -1]),  # reward to come minus value
        (1.0, 0.0, [0.5, 1, -1, -1]),  # next value minus value, and reward minus value at the end
        (0.0, 1.0, [-0.5, -1, -1, -1]),  # reward minus value
    ],
)
def test_gae(gamma: float, lam: float, wanted: list[float]) -> None:
    advantages, returns = gae(GAE_REWARDS, GAE_VALUES, GAE_IDS, gamma, lam)
    close(advantages, wanted)
    close(returns, floats(wanted) + GAE_VALUES)


def test_gae_of_nothing() -> None:
    advantages, returns = gae(GAE_REWARDS[:0], GAE_VALUES[:0], GAE_IDS[:0], 1.0, 0.95)
    assert (advantages.shape, returns.shape) == ((0,), (0,))


@pytest.mark.parametrize("max_length", [1, 9, 300])
def test_sums_to_the_end_against_a_loop(max_length: int) -> None:
    data = ragged(seed=1, max_length=max_length)
    rewards, values = data.tokens(2), data.tokens(3)
    gamma, lam = 0.97, 0.9
    returns_wanted, advantages_wanted = [], []
    for sequence_rewards, sequence_values in zip(data.split(rewards), data.split(values)):
        total = advantage = next_value = 0.0
        sequence_returns, sequence_advantages = [], []
        for reward, value in reversed(list(zip(sequence_rewards, sequence_values))):
            total = reward.item() + gamma * total
            advantage = reward.item() + gamma * next_value - value.item() + gamma * lam * advantage
            next_value = value.item()
            sequence_returns.insert(0, total)
            sequence_advantages.insert(0, advantage)
        returns_wanted += sequence_returns
        advantages_wanted += sequence_advantages
    close(returns_to_go(rewards, data.segment_ids, gamma), returns_wanted)
    advantages, returns = gae(rewards, values, data.segment_ids, gamma, lam)
    close(advantages, advantages_wanted)
    close(returns, floats(advantages_wanted) + values)


def test_moments_and_standardize() -> None:
    """1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7."""
    values = floats([1, 2, 6])
    assert moments(values).tolist() == [3, 9, 41]
    close(standardize(values, moments(values)), [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)])


def test_moments_of_ranks_add_up() -> None:
    values = torch.randn(1001) + 1000  # far from 0, where a difference of squares in float32 would be noise
    parts = [values[:10], values[10:10], values[10:]]
    together = torch.stack([moments(part) for part in parts]).sum(0)
    standard = torch.cat([standardize(part, together) for part in parts])
    close(standard, (values.double() - values.double().mean()) / values.double().std())


@pytest.mark.parametrize(("values", "wanted"), [([], []), ([5.0], [0.0]), ([3.0, 3.0, 3.0], [0.0, 0.0, 0.0])])
def test_standardize_limits(values: list[float], wanted: list[float]) -> None:
    close(standardize(floats(values), moments(floats(values))), wanted)
