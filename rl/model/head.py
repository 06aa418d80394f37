"""Compute logprobs, entropies and KLs from hidden states in chunks, so that all logits need not exist at once.

The backward pass computes the logits of each chunk again. This costs one more product with the head, a few percent of a
model's work, and saves a [tokens, vocabulary] tensor. Where there is memory for it, the logits are kept instead, and
the results are the same to the last bit. Products run in the dtype of the hidden states. Everything else runs in
float32: on GPUs in kernels of our own (head_gpu.py), or compiled by torch if there is a reference too.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 29  # maximum size of a chunk's logits; a GPU computes small chunks less efficiently
EXTRA_COPIES = 4  # of a chunk's logits in float32, if torch computes with them; chunks are smaller by that then


class Scores(NamedTuple):
    """Scores of each row of hidden states, [R] float32, which carry a gradient."""

    logprobs: Tensor
    entropy: Tensor
    reference_kl: Tensor  # KL(policy || reference) over the whole vocabulary; 0 without a reference
    probe_logits: Tensor = torch.empty(0)  # [P, vocabulary] float32, at the tokens of a probe, without gradient


class Reference(NamedTuple):
    """The reference model at the same rows. Its logits are hidden @ weight.T / divisor."""

    hidden: Tensor  # [R, D]
    weight: Tensor  # [V, D]
    divisor: float


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    reference: Reference | None = None,
    keeps_logits: bool = False,
) -> Scores:
    """Return the scores of the targets [R] under the logits hidden [R, D] @ weight [V, D].T / temperature. With
    `keeps_logits`, the first backward pass does not compute the logits again."""
    keeps_logits = keeps_logits and torch.is_grad_enabled()
    return Scores(*_TokenScores.apply(hidden, weight, targets, temperature, reference, keeps_logits))


@torch.no_grad()
def self_certainty(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return KL(uniform || policy) over the whole vocabulary, [R] (arXiv 2502.18581; a reward in arXiv 2505.19590)."""
    certainty = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    measure = _compile_on(hidden.device.type, _certainty_of_chunk)
    for part in _chunks(hidden, weight, EXTRA_COPIES):
        certainty[part] = measure(hidden[part] @ weight.t(), temperature)
    return certainty


def _certainty_of_chunk(logits: Tensor, temperature: float) -> Tensor:
    """Compute -log V - mean(log p)."""
    logits = logits.float() / temperature
    return torch.logsumexp(logits, -1) - logits.mean(-1) - math.log(logits.shape[1])


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        reference: Reference | None,
        keeps_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels = _kernels_for(hidden, reference)
        forward = _compile_on(hidden.device.type, _score_chunk)
        scores = hidden.new_zeros(4, hidden.shape[0], dtype=torch.float32)
        kept = hidden.new_empty(hidden.shape[0], weight.shape[0]) if keeps_logits else None
        for part in _chunks(hidden, weight, 1 if kernels else EXTRA_COPIES):
            logits = torch.mm(hidden[part], weight.t(), out=None if kept is None else kept[part])
            if kernels:
                scores[:3, part] = kernels.score(logits, targets[part], temperature)
            else:
                scores[:, part] = forward(logits, targets[part], temperature, _reference_logits(reference, part))
        ctx.save_for_backward(hidden, weight, targets, scores)
        ctx.temperature, ctx.reference, ctx.kept_logits = temperature, reference, kept
        ctx.set_materialize_grads(False)
        logprobs, entropy, _, reference_kl = scores
        return logprobs.clone(), entropy.clone(), reference_kl.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, targets, scores = ctx.saved_tensors
        kept, ctx.kept_logits = ctx.kept_logits, None  # kernels overwrite them with their gradients
        kernels = _kernels_for(hidden, ctx.reference)
        grad_scores = torch.stack([torch.zeros_like(scores[0]) if grad is None else grad for grad in gradients])
        backward = _compile_on(hidden.device.type, _score_chunk_backward)
        grad_hidden = torch.empty_like(hidden)
        # A frozen head needs no gradient, which has the size of the head in float32.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden, weight, 1 if kernels else EXTRA_COPIES):
            logits = hidden[part] @ weight.t() if kept is None else kept[part]
            about = (targets[part], scores[:, part], grad_scores[:, part])
            if kernels:
                grad = kernels.differentiate(logits, *about, ctx.temperature)
            else:
                grad = backward(logits, *about, ctx.temperature, _reference_logits(ctx.reference, part))
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a float32 total. On a GPU the product is not rounded before it is added."""
    if total.device.type == "cuda" and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _kernels_for(hidden: Tensor, reference: Reference | None) -> Any:
    """Return the module with our kernels, or None where torch computes scores."""
    if hidden.device.type != "cuda" or reference is not None:
        return None
    from rl.model import head_gpu  # needs triton, which only GPU builds of torch bring

    return head_gpu


def _reference_logits(reference: Reference | None, part: slice) -> Tensor | None:
    if reference is None:
        return None
    return (reference.hidden[part] @ reference.weight.t()).float() / reference.divisor


def _chunks(hidden: Tensor, weight: Tensor, num_copies: int) -> list[slice]:
    """Cut the rows so that the logits of a chunk fit into CHUNK_BYTES, together with copies of them."""
    num_rows, row_bytes = hidden.shape[0], weight.shape[0] * hidden.element_size() * num_copies
    size = max(1, CHUNK_BYTES // row_bytes)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def _score_chunk(logits: Tensor, targets: Tensor, temperature: float, ref_logits: Tensor | None) -> Tensor:
    """Return [4, R]: logprobs, entropies, the logsumexp of the logits, and KLs."""
    logits = logits.float() / temperature
    log_sums = torch.logsumexp(logits, -1)
    log_p = logits - log_sums.unsqueeze(1)
    chosen = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    p = torch.exp(log_p)
    kl = torch.zeros_like(chosen) if ref_logits is None else (p * (log_p - torch.log_softmax(ref_logits, -1))).sum(-1)
    return torch.stack([chosen, -(p * log_p).sum(-1), log_sums, kl])


def _score_chunk_backward(
    logits: Tensor, targets: Tensor, scores: Tensor, grad_scores: Tensor, temperature: float, ref_logits: Tensor | None
) -> Tensor:
    """Return the gradient with respect to the logits before the division by the temperature, in their dtype.

    d logprob = onehot - p,  d entropy = -p (log p + entropy),  d KL = p (log p - log q - KL)
    """
    grad_logprob, grad_entropy, grad_kl = grad_scores.unsqueeze(2)
    _, entropy, log_sums, kl = scores.unsqueeze(2)
    log_p = logits.float() / temperature - log_sums
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    p_factor = grad_logprob + grad_entropy * (log_p + entropy)
    if ref_logits is not None:
        p_factor = p_factor - grad_kl * (log_p - torch.log_softmax(ref_logits, -1) - kl)
    grad = is_target * grad_logprob - torch.exp(log_p) * p_factor
    return (grad / temperature).to(logits.dtype)


@cache
def _compile_on(device: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function, compiled for any number of rows if it runs on a GPU."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function
