"""Importance weights between engine and learner, against numbers worked out by hand and against a loop."""

import math

import pytest
import torch

from rl.algo.advantages import moments
from rl.algo.correction import importance_weights
from tests.unit.ragged import close, ragged

MODES = ["token", "sequence", "token_mask", "sequence_mask", "sequence_mask_two_sided"]
LENGTHS, IDS = torch.tensor([2, 0, 1, 2]), torch.tensor([0, 0, 2, 3, 3])
RATIOS = torch.tensor([1.5, 4.0, 0.25, 4.0, 0.5])  # products 6, 1/4, 2


@pytest.mark.parametrize(
    ("mode", "limit", "weights", "cut"),
    [
        ("token", 2.0, [1.5, 2, 0.25, 2, 0.5], [0, 1, 0, 1, 0]),
        ("sequence", 2.5, [2.5, 2.5, 0.25, 2, 2], [1, 1, 0, 0, 0]),
        ("token_mask", 2.5, [1.5, 0, 0, 0, 0.5], [0, 1, 1, 1, 0]),
        ("sequence_mask", 2.5, [0, 0, 0.25, 2, 2], [1, 1, 0, 0, 0]),  # MIS rejects only what is above the limit
        ("sequence_mask_two_sided", 2.5, [0, 0, 0, 2, 2], [1, 1, 1, 0, 0]),
        ("sequence_mask_two_sided", 5.0, [0, 0, 0.25, 2, 2], [1, 1, 0, 0, 0]),
        ("token_mask", 5.0, [1.5, 4, 0.25, 4, 0.5], [0, 0, 0, 0, 0]),
        ("token", 1.0, [1, 1, 0.25, 1, 0.5], [1, 1, 0, 1, 0]),
    ],
)
def test_weights(mode: str, limit: float, weights: list[float], cut: list[int]) -> None:
    rollout = torch.full((5,), -2.0)
    old = (rollout + RATIOS.log()).requires_grad_()
    got = importance_weights(old, rollout, IDS, LENGTHS, mode, limit)
    close(got.weights, weights)
    assert got.cut.tolist() == [bool(flag) for flag in cut]
    assert not got.weights.requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_limits(mode: str) -> None:
    """Equal logprobs have weight 1, the limits themselves are inside, and weights beyond float32 become finite."""
    same = importance_weights(IDS.float(), IDS.float(), IDS, LENGTHS, mode, limit=1.0)
    assert (same.weights.tolist(), same.cut.tolist()) == ([1.0] * 5, [False] * 5)
    edge = importance_weights(torch.tensor([2.0, 0.5]).log(), torch.zeros(2), torch.arange(2), torch.ones(2), mode, 2.0)
    assert (edge.weights.tolist(), edge.cut.tolist()) == ([2.0, 0.5], [False, False])
    far = importance_weights(torch.tensor([0.0, -300.0]), torch.tensor([-300.0, 0.0]), IDS[[0, 2]], LENGTHS, mode, 2.0)
    close(far.weights, [0 if "mask" in mode else 2, 0])
    nothing = importance_weights(torch.zeros(0), torch.zeros(0), IDS[:0], LENGTHS[:0], mode, 2.0)
    assert (nothing.weights.shape, nothing.cut.shape) == ((0,), (0,))


def test_against_a_loop() -> None:
    data = ragged(seed=7)
    rollout = data.tokens(8) - 2
    old = rollout + data.tokens(9, 0.3)
    for mode in MODES:
        wanted = []
        for olds, rollouts in zip(data.split(old), data.split(rollout)):
            ratios = [math.exp(o - r) for o, r in zip(olds, rollouts)]
            if mode.startswith("sequence"):
                ratios = [math.prod(ratios)] * len(ratios)
            if "mask" in mode:
                lowest = 0 if mode == "sequence_mask" else 1 / 1.5
                wanted += [ratio if lowest <= ratio <= 1.5 else 0.0 for ratio in ratios]
            else:
                wanted += [min(ratio, 1.5) for ratio in ratios]
        close(importance_weights(old, rollout, data.segment_ids, data.lengths, mode, 1.5).weights, wanted)


def test_weights_turn_the_engines_expectation_into_the_learners() -> None:
    """The weighted mean reward under the engine's distribution is the mean reward under the learner's."""
    engine, learner = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])
    rewards = torch.tensor([1.0, -2.0, 5.0])
    places = torch.arange(3), torch.ones(3, dtype=torch.int64)
    weights = importance_weights(learner.log(), engine.log(), *places, "token", limit=10.0).weights
    close((engine * weights * rewards).sum(), (learner * rewards).sum())
    # effective samples of weights 0.6, 1, 2: 3.6^2 / (0.36 + 1 + 4) = 2.418
    count, total, squares = moments(weights).tolist()
    assert (count, total**2 / squares) == pytest.approx((3, 12.96 / 5.36))
