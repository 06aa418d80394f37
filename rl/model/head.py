"""Token logprobs and entropies straight from hidden states, in chunks: never more than one chunk of logits exists.

The backward pass makes each chunk's logits anew: one more product with the head, a few percent of a model's work, in
place of [tokens, vocabulary] in memory. Products run in the dtype of the hidden states, everything else in float32,
fused by torch.compile on GPUs.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 27  # of logits that exist at a time


class Scores(NamedTuple):
    """Of each row of hidden states: [R] float32."""

    logprobs: Tensor
    entropy: Tensor


def token_scores(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Scores:
    """hidden [R, D], weight [V, D], targets [R]; logits are hidden @ weight.T / temperature."""
    return Scores(*_TokenScores.apply(hidden, weight, targets, temperature))


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        forward = _on(hidden.device.type, _score_chunk)
        scores = hidden.new_empty(3, hidden.shape[0], dtype=torch.float32)
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            scores[:, part] = forward(hidden[part] @ weight.t(), targets[part], temperature)
        logprobs, entropy, log_sums = scores
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        by_logprob, by_entropy = (log_sums.new_zeros(log_sums.shape) if grad is None else grad for grad in gradients)
        backward = _on(hidden.device.type, _score_chunk_backward)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(hidden.shape[0], weight.shape[0]):
            statistics = log_sums[part], entropy[part], by_logprob[part], by_entropy[part]
            grad = backward(hidden[part] @ weight.t(), targets[part], *statistics, ctx.temperature)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _score_chunk(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[3, R]: logprobs, entropies and the logarithms of the sums of exponentials."""
    logits = logits.float() / temperature
    log_sums = torch.logsumexp(logits, -1)
    log_p = logits - log_sums.unsqueeze(1)
    chosen = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return torch.stack([chosen, -(torch.exp(log_p) * log_p).sum(-1), log_sums])


def _score_chunk_backward(
    logits: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    entropy: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """The gradient by the logits before the temperature, in their dtype: d logprob = onehot - p, d entropy =
    -p (log p + entropy)."""
    log_p = logits.float() / temperature - log_sums.unsqueeze(1)
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    by_entropy = by_entropy.unsqueeze(1) * (log_p + entropy.unsqueeze(1))
    grad = is_target * by_logprob.unsqueeze(1) - torch.exp(log_p) * (by_logprob.unsqueeze(1) + by_entropy)
    return (grad / temperature).to(logits.dtype)


@cache
def _on(device: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Chunks differ in their number of rows, so that one is left open."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function
