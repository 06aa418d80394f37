"""Advantages, losses and the learning rate's schedule, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from rl.algo.advantages import group_relative
from rl.algo.kl import kl_penalty
from rl.algo.losses import clipped_ratio
from rl.learner import lr_schedule

LN2 = math.log(2)


def close(got: Tensor, wanted: list[float], atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float32), atol=atol, rtol=0)


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
    got = group_relative(
        torch.tensor(rewards, dtype=torch.float32), torch.tensor(ids, dtype=torch.int64), normalize_std
    )
    close(got, wanted)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # bounds 1 - 0.2 and 1 + 0.3; the loss is -min(r A, clip(r) A), its gradient by the logprob -r A or 0
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.0, -2.0, 2.0, 2.0, 0),
        (0.9, 2.0, -1.8, -1.8, 0),
        (0.9, -2.0, 1.8, 1.8, 0),
        (1.25, 2.0, -2.5, -2.5, 0),  # inside: above 1 + clip_low, below 1 + clip_high
        (1.25, -2.0, 2.5, 2.5, 0),
        (0.75, 2.0, -1.5, -1.5, 0),  # below the bound, but the step would raise it: not clipped
        (0.75, -2.0, 1.6, 0.0, 1),  # outside: below 1 - clip_low, above 1 - clip_high
        (1.5, 2.0, -2.6, 0.0, 1),
        (1.5, -2.0, 3.0, 3.0, 0),  # above the bound, but the step would lower it: not clipped
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clipped_ratio(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    old = torch.tensor([-1.5])
    new = (old + math.log(ratio)).requires_grad_()
    got = clipped_ratio(new, old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.3)
    got.loss.sum().backward()
    assert got.loss.sum().item() == pytest.approx(loss, abs=1e-6)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert got.clipped.sum().item() == clipped


def test_clipped_ratio_of_several_tokens_and_of_none() -> None:
    old = torch.zeros(3)
    new = torch.tensor([0.0, math.log(1.5), math.log(0.75)])
    got = clipped_ratio(new, old, torch.tensor([1.0, 2.0, -2.0]), 0.2, 0.3)
    assert got.loss.sum().item() == pytest.approx(-1.0 - 2.6 + 1.6, abs=1e-6)
    assert got.clipped.sum().item() == 2
    empty = clipped_ratio(new[:0], old[:0], old[:0], 0.2, 0.3)
    assert (empty.loss.shape, empty.clipped.shape) == ((0,), (0,))


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [
        # policy 1/2 and reference 1/4, then the other way round, then equal
        ("k1", [LN2, -LN2, 0.0]),
        ("k2", [LN2**2 / 2, LN2**2 / 2, 0.0]),
        ("k3", [0.5 - 1 + LN2, 2 - 1 - LN2, 0.0]),
    ],
)
def test_kl_penalty(estimator: str, wanted: list[float]) -> None:
    new, ref = torch.tensor([0.5, 0.25, 0.5]).log(), torch.tensor([0.25, 0.5, 0.5]).log()
    close(kl_penalty(new, ref, estimator), wanted)


def test_k3_is_never_negative_and_unbiased() -> None:
    log_ratios = torch.linspace(-6, 6, 241)
    assert kl_penalty(torch.zeros_like(log_ratios), log_ratios, "k3").min().item() >= 0
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    kl = 0.3 * math.log(2.5)  # 0.5 ln(0.5 / 0.2) + 0.2 ln(0.2 / 0.5)
    for estimator in ("k1", "k3"):
        mean = (policy * kl_penalty(policy.log(), reference.log(), estimator)).sum()
        assert mean.item() == pytest.approx(kl, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "warmup_steps", "wanted"),
    [
        # 12 steps; the factor at steps 0, 1, 3, 4, 6, 8, 12 and long after
        ("constant", 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 4, [0.25, 0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", 4, [0.25, 0.5, 1, 1, 0.75, 0.5, 0, 0]),
        ("linear", 0, [1, 11 / 12, 0.75, 2 / 3, 0.5, 1 / 3, 0, 0]),
        ("cosine", 4, [0.25, 0.5, 1, 1, 0.853553, 0.5, 0, 0]),  # (1 + cos(pi / 4)) / 2 at step 6
        ("cosine", 0, [1, 0.982963, 0.853553, 0.75, 0.5, 0.25, 0, 0]),
    ],
)
def test_lr_schedule(name: str, warmup_steps: int, wanted: list[float]) -> None:
    factor = lr_schedule(name, warmup_steps, num_steps=12)
    assert [factor(step) for step in (0, 1, 3, 4, 6, 8, 12, 1000)] == pytest.approx(wanted, abs=1e-6)


def test_lr_schedule_whose_warm_up_is_the_whole_run() -> None:
    factor = lr_schedule("linear", warmup_steps=4, num_steps=4)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
