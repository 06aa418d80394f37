"""Token logprobs and entropies in chunks equal the plain way, forward and backward, whatever the chunks."""

import pytest
import torch
from torch import Tensor

from rl.model import head
from rl.model.head import token_scores

VOCABULARY = 37


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.t()) / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, 8, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, 8, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (num_rows,), generator=generator)


@pytest.mark.parametrize("num_rows", [0, 1, 20])
@pytest.mark.parametrize("chunk_rows", [1, 3, 20, 1000])
@pytest.mark.parametrize("by", ["logprobs", "entropy", "both"])
def test_it_equals_the_plain_way(num_rows: int, chunk_rows: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk_rows * VOCABULARY + 5)
    hidden, weight, targets = inputs(num_rows)
    factors = torch.randn(2, num_rows, generator=torch.Generator().manual_seed(1))
    factors[0] *= by != "entropy"
    factors[1] *= by != "logprobs"
    results = []
    for function in (token_scores, plain):
        logprobs, entropy = function(hidden, weight, targets, 0.7)
        used = [part for part, kind in ((logprobs, "logprobs"), (entropy, "entropy")) if by in (kind, "both")]
        kept = [row for row, kind in zip(factors, ("logprobs", "entropy")) if by in (kind, "both")]
        sum((part * row).sum() for part, row in zip(used, kept)).backward()  # type: ignore[union-attr]
        assert hidden.grad is not None and weight.grad is not None
        results.append((logprobs, entropy, hidden.grad, weight.grad))
        hidden.grad = weight.grad = None
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_never_more_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the products of the head; what is kept for the backward pass has no dimension of the vocabulary but
    the weight's."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 4 * VOCABULARY)
    hidden, weight, targets = inputs(20)
    seen: list[int] = []
    score = head._score_chunk

    def counted(logits: Tensor, *others: object) -> Tensor:
        seen.append(logits.shape[0])
        return score(logits, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(head, "_score_chunk", counted)
    logprobs = token_scores(hidden, weight, targets, 1.0).logprobs
    assert seen == [4] * 5
    saved = logprobs.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert sorted(tensor.numel() for tensor in saved) == [20, 20, 20, 20 * 8, VOCABULARY * 8]


def test_bfloat16_stays_near_float32() -> None:
    hidden, weight, targets = inputs(200)
    exact = token_scores(hidden, weight, targets, 1.0).logprobs
    rounded = token_scores(hidden.bfloat16(), weight.bfloat16(), targets, 1.0).logprobs
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().mean() < 0.03
