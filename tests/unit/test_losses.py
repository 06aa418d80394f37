"""Losses, against numbers worked out by hand and against loops over sequences and tokens."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rl.algo.losses import PolicyLoss, clipped_ratio, clipped_weight, sequence_ratio, token_weights, value_loss
from tests.unit.ragged import Ragged, close, ragged

LOW, HIGH = 0.2, 0.3  # ratios are held within 0.8 and 1.3


def one_token(ratio: float) -> tuple[Tensor, Tensor]:
    old = torch.tensor([-1.5])
    return (old + math.log(ratio)).requires_grad_(), old


def check(got: PolicyLoss, new: Tensor, loss: float, gradient: float, clipped: bool) -> None:
    got.loss.sum().backward()
    assert got.loss.item() == pytest.approx(loss, abs=1e-6)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert got.clipped.tolist() == [clipped]


CLIPS = [
    # the loss is -min(r A, clip(r) A), its gradient by the logprob -r A or 0
    (1.0, 2.0, -2.0, -2.0, False),
    (1.0, -2.0, 2.0, 2.0, False),
    (0.9, 2.0, -1.8, -1.8, False),
    (0.9, -2.0, 1.8, 1.8, False),
    (1.25, 2.0, -2.5, -2.5, False),  # inside: above 1 + LOW, below 1 + HIGH
    (1.25, -2.0, 2.5, 2.5, False),
    (0.75, 2.0, -1.5, -1.5, False),  # below the bound, but the step would raise it: not clipped
    (0.75, -2.0, 1.6, 0.0, True),  # outside: below 1 - LOW, above 1 - HIGH
    (1.5, 2.0, -2.6, 0.0, True),
    (1.5, -2.0, 3.0, 3.0, False),  # above the bound, but the step would lower it: not clipped
    (1.5, 0.0, 0.0, 0.0, False),
    # a thousandth before and behind each edge
    (0.801, -2.0, 1.602, 1.602, False),
    (0.799, -2.0, 1.6, 0.0, True),
    (1.299, 2.0, -2.598, -2.598, False),
    (1.301, 2.0, -2.6, 0.0, True),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), CLIPS)
def test_clipped_ratio(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    new, old = one_token(ratio)
    check(clipped_ratio(new, old, torch.tensor([advantage]), LOW, HIGH), new, loss, gradient, clipped)


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), CLIPS)
def test_sequence_ratio_of_one_token_is_the_tokens(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    new, old = one_token(ratio)
    place = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    check(sequence_ratio(new, old, torch.tensor([advantage]), *place, LOW, HIGH), new, loss, gradient, clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # c = 3: a loss of at most 6 where the advantage is -2
        (1.0, -2.0, 2.0, 2.0, False),
        (0.75, -2.0, 1.6, 0.0, True),  # PPO's own bound
        (1.5, -2.0, 3.0, 3.0, False),
        (2.999, -2.0, 5.998, 5.998, False),
        (3.001, -2.0, 6.0, 0.0, True),
        (50.0, -2.0, 6.0, 0.0, True),
        (50.0, 2.0, -2.6, 0.0, True),  # positive advantages: PPO's bound alone
        (50.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    new, old = one_token(ratio)
    check(clipped_ratio(new, old, torch.tensor([advantage]), LOW, HIGH, dual_clip=3.0), new, loss, gradient, clipped)


def test_edges_keep_the_gradient() -> None:
    """The bounds 1/2, 2 and (dual clip) 4 are exact floats, and the ratios lie on them."""
    ratios, advantages = [0.5, 0.5, 2.0, 2.0, 4.0], torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    new = torch.zeros(5, requires_grad=True)
    old = -torch.tensor(ratios).log()
    assert torch.exp(new - old).tolist() == ratios
    got = clipped_ratio(new, old, advantages, 0.5, 1.0, dual_clip=4.0)
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    close(gradient, [-0.5, 0.5, -2.0, 2.0, 4.0])
    assert got.clipped.tolist() == [False] * 5


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.0, 2.0, 1.0, False),
        (1.0, -2.0, 1.0, False),
        (1.25, 2.0, 1.25, False),
        (1.5, 2.0, 1.3, True),  # where PPO's clip would leave no gradient
        (1.5, -2.0, 1.3, True),
        (0.75, 2.0, 0.8, True),
        (0.75, -2.0, 0.8, True),
        (1.299, 2.0, 1.299, False),
        (1.301, 2.0, 1.3, True),
        (0.801, -2.0, 0.801, False),
        (0.799, -2.0, 0.8, True),
        (1.5, 0.0, 0.0, True),
    ],
)
def test_clipped_weight(ratio: float, advantage: float, weight: float, clipped: bool) -> None:
    """The gradient by the logprob is -weight A, and the loss that times the logprob."""
    new, old = one_token(ratio)
    gradient = -weight * advantage
    got = clipped_weight(new, old, torch.tensor([advantage]), LOW, HIGH)
    check(got, new, gradient * new.item(), gradient, clipped)


def test_sequence_ratio_is_the_geometric_mean() -> None:
    """Ratios 2 and 1/2 give 1. Ratios 1.5 and 1.6 give sqrt 2.4 = 1.549, which is clipped to 1.3. A is 1 and 2."""
    lengths, ids = torch.tensor([2, 0, 2]), torch.tensor([0, 0, 2, 2])
    new = torch.tensor([2, 0.5, 1.5, 1.6]).log().requires_grad_()
    got = sequence_ratio(new, torch.zeros(4), torch.tensor([1.0, 1, 2, 2]), ids, lengths, LOW, HIGH)
    close(got.loss.detach(), [-1, -1, -2.6, -2.6])
    assert got.clipped.tolist() == [False, False, True, True]
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    close(gradient, [-1, -1, 0, 0])
    token = clipped_ratio(new, torch.zeros(4), torch.tensor([1.0, 1, 2, 2]), LOW, HIGH)
    assert token.clipped.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("value", "old", "loss", "gradient", "clipped"),
    [
        # the return is 1, the value may move by 0.5 from the old one
        (1.0, 1.0, 0.0, 0.0, False),
        (2.0, 1.8, 0.5, 1.0, False),  # within the bound
        (0.0, 0.4, 0.5, -1.0, False),
        (1.2, 3.0, 1.125, 0.0, True),  # held at 2.5, from where no gradient comes
        (0.8, -1.0, 1.125, 0.0, True),  # held at -0.5
        (3.0, 1.0, 2.0, 2.0, False),  # went away from the return: held at 1.5, where the error is smaller
        (-1.0, 1.0, 2.0, -2.0, False),
    ],
)
def test_value_loss(value: float, old: float, loss: float, gradient: float, clipped: bool) -> None:
    values = torch.tensor([value], requires_grad=True)
    got, is_clipped = value_loss(values, torch.tensor([old]), torch.tensor([1.0]), clip=0.5)
    check(PolicyLoss(got, is_clipped), values, loss, gradient, clipped)


def test_values_within_the_bound_are_not_clipped() -> None:
    """Many values, since rounding must not change the clipped value."""
    old = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values = old + 0.2
    _, clipped = value_loss(values, old, torch.zeros(1000), clip=0.3)
    assert not clipped.any()


@pytest.mark.parametrize(
    ("normalization", "weights", "denominator"),
    [
        # lengths 2, 0, 3; at most 10 tokens
        ("token", [1, 1, 1, 1, 1], 5),
        ("sequence", [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3], 2),
        ("constant", [1, 1, 1, 1, 1], 30),
    ],
)
def test_token_weights(normalization: str, weights: list[float], denominator: int) -> None:
    lengths, ids = torch.tensor([2, 0, 3]), torch.tensor([0, 0, 2, 2, 2])
    got, total = token_weights(normalization, lengths, ids, max_length=10)
    close(got, weights)
    assert (got.dtype, total.dtype, total.item()) == (torch.float32, torch.int64, denominator)
    got, total = token_weights(normalization, lengths[:0], ids[:0], max_length=10)
    assert (got.shape, total.item()) == ((0,), 0)


def of_clip(new: Tensor, old: Tensor, advantages: Tensor, data: Ragged) -> PolicyLoss:
    return clipped_ratio(new, old, advantages, LOW, HIGH)


def of_dual_clip(new: Tensor, old: Tensor, advantages: Tensor, data: Ragged) -> PolicyLoss:
    return clipped_ratio(new, old, advantages, LOW, HIGH, dual_clip=1.5)


def of_gspo(new: Tensor, old: Tensor, advantages: Tensor, data: Ragged) -> PolicyLoss:
    return sequence_ratio(new, old, advantages, data.segment_ids, data.lengths, LOW, HIGH)


def of_cispo(new: Tensor, old: Tensor, advantages: Tensor, data: Ragged) -> PolicyLoss:
    return clipped_weight(new, old, advantages, LOW, HIGH)


def loop_clip(new: list[Tensor], old: list[Tensor], advantage: Tensor) -> list[Tensor]:
    ratios = [torch.exp(n - o) for n, o in zip(new, old)]
    return [-min(r * advantage, r.clamp(1 - LOW, 1 + HIGH) * advantage) for r in ratios]


def loop_dual_clip(new: list[Tensor], old: list[Tensor], advantage: Tensor) -> list[Tensor]:
    return [min(loss, -1.5 * advantage) if advantage < 0 else loss for loss in loop_clip(new, old, advantage)]


def loop_gspo(new: list[Tensor], old: list[Tensor], advantage: Tensor) -> list[Tensor]:
    """Return the sequence's term, with its gradient through all logprobs, once for each token."""
    log_ratio = sum((n - o for n, o in zip(new, old)), torch.zeros(())) / max(len(new), 1)
    ratio = torch.exp(log_ratio)
    term = -min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
    return [term for _ in new]


def loop_cispo(new: list[Tensor], old: list[Tensor], advantage: Tensor) -> list[Tensor]:
    return [-torch.exp(n - o).clamp(1 - LOW, 1 + HIGH).detach() * advantage * n for n, o in zip(new, old)]


LOSSES = [(of_clip, loop_clip), (of_dual_clip, loop_dual_clip), (of_gspo, loop_gspo), (of_cispo, loop_cispo)]


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("flat", "loop"), LOSSES)
@pytest.mark.parametrize("scale", [0.0, 0.8])
def test_loss_and_gradient_against_a_loop(flat: Callable, loop: Callable, normalization: str, scale: float) -> None:
    """At ratio 1 (scale 0) and around the bounds."""
    data = ragged(seed=4, max_length=12)
    old = data.tokens(5) - 2
    new = (old + data.tokens(6, scale)).requires_grad_()
    got = flat(new, old, data.rewards[data.segment_ids], data)
    weights, denominator = token_weights(normalization, data.lengths, data.segment_ids, max_length=12)
    loss = (weights * got.loss).sum() / denominator
    (gradient,) = torch.autograd.grad(loss, new)

    wanted, num_tokens, num_sequences, num_full = torch.zeros(()), 0, 0, 0
    for s, (n, o) in enumerate(zip(data.split(new), data.split(old))):
        terms = loop(n, o, data.rewards[s])
        wanted = wanted + sum(terms, torch.zeros(())) / (max(len(n), 1) if normalization == "sequence" else 1)
        num_tokens += len(n)
        num_sequences += 1
        num_full += len(n) > 0
    wanted = wanted / {"token": num_tokens, "sequence": num_full, "constant": num_sequences * 12}[normalization]
    (gradient_wanted,) = torch.autograd.grad(wanted, new)
    close(loss.detach(), wanted.detach(), atol=1e-6)
    close(gradient, gradient_wanted, atol=1e-6)
    assert gradient.abs().sum() > 0
    assert 0 < got.clipped.sum() < got.clipped.numel() if scale else not got.clipped.any()
    if scale == 0:  # all losses are REINFORCE where the policy is the one that sampled
        close(gradient, -data.rewards[data.segment_ids] * weights / denominator, atol=1e-6)


@pytest.mark.parametrize(
    ("flat", "advantage", "loss"),
    [
        (of_clip, 2.0, -2.6),  # held at 1.3
        (of_clip, 0.0, 0.0),
        (of_dual_clip, 2.0, -2.6),
        (of_dual_clip, 0.0, 0.0),
        (of_dual_clip, -2.0, 3.0),  # at most 1.5 times 2
        (of_gspo, 2.0, -2.6),
        (of_gspo, 0.0, 0.0),
    ],
)
def test_a_ratio_beyond_float32_gives_no_gradient_where_the_loss_is_flat(
    flat: Callable, advantage: float, loss: float
) -> None:
    """exp(100) is infinite in float32; the gradient must be 0 there, not 0 times infinity."""
    data = Ragged(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]), torch.zeros(1))
    old = torch.tensor([-101.0])
    new = (old + 100).requires_grad_()
    got = flat(new, old, torch.tensor([advantage]), data)
    assert got.loss.item() == pytest.approx(loss)
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    assert gradient.item() == 0.0
    assert got.clipped.item() == (advantage != 0)


def test_an_unbounded_loss_stays_infinite() -> None:
    """Without dual_clip nothing bounds a negative advantage: the learner must see that and skip the step."""
    new = torch.tensor([-1.0], requires_grad=True)
    got = clipped_ratio(new, torch.tensor([-101.0]), torch.tensor([-2.0]), LOW, HIGH)
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    assert (got.loss.item(), gradient.item()) == (math.inf, math.inf)


@pytest.mark.parametrize("flat", [flat for flat, _ in LOSSES])
def test_no_tokens(flat: Callable) -> None:
    data = ragged(num_groups=1, group_size=3)
    data = Ragged(torch.zeros(3, dtype=torch.int64), data.segment_ids[:0], data.group_ids, data.rewards)
    nothing = torch.zeros(0, requires_grad=True)
    got = flat(nothing, nothing.detach(), nothing.detach(), data)
    assert (got.loss.shape, got.clipped.shape, got.loss.sum().item()) == ((0,), (0,), 0.0)
    got.loss.sum().backward()
