"""Logprobs, entropies, KLs and self-certainty equal a plain computation, forward and backward, for all chunk sizes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rl.model import head
from rl.model.head import Reference, Scores, self_certainty, token_scores

VOCABULARY = 37
ROW_BYTES = 4 * head.EXTRA_COPIES * VOCABULARY  # of the logits of a row in float32, with copies
FIELDS = Scores._fields[:3]  # without the logits of a probe


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, reference: Reference
) -> tuple[Tensor, Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.t()) / temperature, -1)
    log_q = torch.log_softmax((reference.hidden @ reference.weight.t()) / reference.divisor, -1)
    p = log_p.exp()
    return log_p.gather(1, targets[:, None])[:, 0], -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1)


def inputs(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, 8, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, 8, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (num_rows,), generator=generator)


def reference(num_rows: int) -> Reference:
    hidden, weight, _ = inputs(num_rows + 1)
    return Reference(hidden[:num_rows].detach(), weight.detach(), 1.3)


@pytest.mark.parametrize("num_rows", [0, 1, 20])
@pytest.mark.parametrize("chunk_rows", [1, 3, 20, 1000])
@pytest.mark.parametrize("by", [("logprobs",), ("entropy",), ("reference_kl",), FIELDS])
def test_it_equals_the_plain_way(
    num_rows: int, chunk_rows: int, by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", ROW_BYTES * chunk_rows + 5)
    hidden, weight, targets = inputs(num_rows)
    factors = torch.randn(3, num_rows, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (token_scores, plain):
        scores = function(hidden, weight, targets, 0.7, reference(num_rows))[:3]
        named = zip(FIELDS, scores, factors, strict=True)
        sum((part * row).sum() for name, part, row in named if name in by).backward()  # type: ignore[union-attr]
        assert hidden.grad is not None and weight.grad is not None
        results.append((*scores, hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_without_a_reference_the_rest_stays_the_same() -> None:
    hidden, weight, targets = inputs(20)
    alone, beside = (
        token_scores(hidden, weight, targets, 0.7),
        token_scores(hidden, weight, targets, 0.7, reference(20)),
    )
    assert torch.equal(alone.logprobs, beside.logprobs) and torch.equal(alone.entropy, beside.entropy)
    assert not alone.reference_kl.any() and (beside.reference_kl > 0).all()
    same = Reference(hidden.detach(), weight.detach(), 0.7)
    assert token_scores(hidden, weight, targets, 0.7, same).reference_kl.abs().max() < 1e-6


@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
def test_self_certainty(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL(uniform || p): 0 for equal logits, and (log(1/2 / 3/4) + log(1/2 / 1/4)) / 2 = log(4/3) / 2 for (3/4, 1/4)."""
    monkeypatch.setattr(head, "CHUNK_BYTES", ROW_BYTES * chunk_rows)
    hidden, weight, _ = inputs(20)
    log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    uniform = torch.full_like(log_p, 1 / VOCABULARY)
    wanted = (uniform * (uniform.log() - log_p)).sum(-1)
    torch.testing.assert_close(self_certainty(hidden, weight, 0.7), wanted.detach(), atol=1e-5, rtol=1e-5)
    assert not self_certainty(torch.zeros(3, 8), weight, 1.0).any()
    two = self_certainty(torch.ones(1, 1), torch.tensor([[math.log(3.0)], [0.0]]), 1.0)
    assert two.item() == pytest.approx(0.143841, abs=1e-6)


class Rows(TorchDispatchMode):
    """Records the most rows of any tensor as wide as the vocabulary that an operation has made."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in pytree.tree_leaves(result):
            if isinstance(part, Tensor) and part.dim() == 2 and part.shape[1] == VOCABULARY and part.shape[0] != 8:
                self.most = max(self.most, part.shape[0])
        return result


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        return function(*args, **(kwargs or {}))


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward. Of what is saved in between, only the weight is as wide as the vocabulary."""
    monkeypatch.setattr(head, "CHUNK_BYTES", ROW_BYTES * 4)
    hidden, weight, targets = inputs(20)
    with Rows() as forward:
        scores = token_scores(hidden, weight, targets, 1.0, reference(20))
    saved = scores.logprobs.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert sorted(tensor.numel() for tensor in saved) == [20, 4 * 20, 20 * 8, VOCABULARY * 8]
    with Rows() as backward:
        torch.stack(scores[:3]).sum().backward()
    assert (forward.most, backward.most) == (4, 4)


@pytest.mark.parametrize("num_rows", [0, 1, 20])
@pytest.mark.parametrize("other", [None, reference])
def test_kept_logits_change_no_bit(num_rows: int, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", ROW_BYTES * 4)
    hidden, weight, targets = inputs(num_rows)
    results = []
    for keeps_logits in (False, True):
        scores = token_scores(hidden, weight, targets, 0.7, other and other(num_rows), keeps_logits)[:3]
        for is_again in (False, True):
            with Products() as products:
                loss = torch.stack(scores).square().sum()
                gradients = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
            results.append((*scores, *gradients))
            num_chunks = -(-num_rows // 4)
            logits = int(is_again or not keeps_logits) + (other is not None)  # those of a reference are never kept
            assert products.count == num_chunks * (2 + logits)
    first, *others = results
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def test_logits_are_kept_only_for_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", ROW_BYTES * 4)
    hidden, weight, targets = inputs(20)
    with Rows() as training:
        token_scores(hidden, weight, targets, 1.0, keeps_logits=True)
    with torch.no_grad(), Rows() as scoring:
        token_scores(hidden, weight, targets, 1.0, keeps_logits=True)
    assert (training.most, scoring.most) == (20, 4)


def test_bfloat16_stays_near_float32() -> None:
    hidden, weight, targets = inputs(200)
    exact = token_scores(hidden, weight, targets, 1.0).logprobs
    rounded = token_scores(hidden.bfloat16(), weight.bfloat16(), targets, 1.0).logprobs
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().mean() < 0.03
