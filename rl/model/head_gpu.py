"""GPU kernels of the head: scores of a chunk of logits, and their gradient. Each reads the logits once.

torch.compile's kernels for the same formulas read them several times, and take as long as the matrix products of a
small model's head (benchmarks/head.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, NUM_WARPS = 4096, 4
LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is cheaper than exp


@triton.jit
def _score(logits, targets, scores, temperature, row_stride, score_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    places = tl.arange(0, TILE)
    top = -1e30  # not -inf, because all logits of a tile may be that
    total = 0.0  # sum of exp(x - top)
    weighted = 0.0  # sum of x exp(x - top)
    for start in range(0, VOCAB, TILE):
        is_place = start + places < VOCAB
        x = tl.load(logits + start + places, mask=is_place, other=-float("inf")).to(tl.float32) / temperature
        new_top = tl.maximum(top, tl.max(x, axis=0))
        shrink, weight = tl.exp2((top - new_top) * LOG2_E), tl.exp2((x - new_top) * LOG2_E)
        total = total * shrink + tl.sum(weight, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(is_place, weight * x, 0.0), axis=0)
        top = new_top
    log_sum = top + tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(scores + row, chosen - log_sum)
    tl.store(scores + score_stride + row, log_sum - weighted / total)
    tl.store(scores + 2 * score_stride + row, log_sum)


@triton.jit
def _differentiate(
    logits,
    targets,
    scores,
    grad_scores,
    temperature,
    row_stride,
    score_stride,
    grad_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    places = start + tl.arange(0, TILE)
    is_place = places < VOCAB
    entropy, log_sum = tl.load(scores + score_stride + row), tl.load(scores + 2 * score_stride + row)
    grad_logprob, grad_entropy = tl.load(grad_scores + row), tl.load(grad_scores + grad_stride + row)
    logits += row * row_stride + places
    log_p = tl.load(logits, mask=is_place, other=0.0).to(tl.float32) / temperature - log_sum
    grad = -tl.exp2(log_p * LOG2_E) * (grad_logprob + grad_entropy * (log_p + entropy))
    grad += tl.where(places == tl.load(targets + row), grad_logprob, 0.0)
    tl.store(logits, grad / temperature, mask=is_place)


def score(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return [3, R]: logprobs of the targets, entropies, and the logsumexp of the logits, which are [R, V]."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and targets.is_contiguous()
    scores = logits.new_empty(3, num_rows, dtype=torch.float32)
    if num_rows:
        strides = (logits.stride(0), scores.stride(0))
        _score[(num_rows,)](logits, targets, scores, temperature, *strides, vocab_size, TILE, num_warps=NUM_WARPS)
    return scores


def differentiate(logits: Tensor, targets: Tensor, scores: Tensor, grad_scores: Tensor, temperature: float) -> Tensor:
    """Overwrite logits with their gradient. `scores` are those of `score`; of `grad_scores`, the first two rows count:
    the gradients with respect to logprobs and entropies."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == targets.stride(0) == scores.stride(1) == grad_scores.stride(1) == 1
    if num_rows:
        strides = (logits.stride(0), scores.stride(0), grad_scores.stride(0))
        grid = (num_rows, triton.cdiv(vocab_size, TILE))
        tensors = (logits, targets, scores, grad_scores)
        _differentiate[grid](*tensors, temperature, *strides, vocab_size, TILE, num_warps=NUM_WARPS)
    return logits
