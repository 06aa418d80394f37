"""Sample tokens and compute their logprobs, for vLLM's sampler on GPUs.

vLLM draws a random number for every entry of the vocabulary, and reads the logits four times: to sample, twice for the
logprob, and to rank the token, which nothing here uses. Our kernel draws two numbers per token. The first one chooses a
tile of the vocabulary by its probability, and the second one a token of this tile. So the kernel reads the logits once,
and one tile of them again.

The two numbers depend only on the seed of the request and on the position of the token, as vLLM's numbers do. But all
probabilities before a token decide whether it is chosen. The rounding of logits depends on the other sequences of a
step, and it changes more tokens than with vLLM's kernel. So vLLM samples where tokens must repeat
(rollout.deterministic).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import sampler

from rl.model.head_gpu import score

TILE, NUM_WARPS = 4096, 4
LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is cheaper than exp
LOWEST = tl.constexpr(-1e30)  # not -inf, because all logits of a tile may be that

vllms_sample, vllms_scores = sampler.gumbel_sample, sampler.compute_topk_scores


@triton.jit
def _choose(weights, is_top, uniform, is_greedy, SIZE: tl.constexpr):
    """Return an index with a probability proportional to its weight, or the first top. That one comes last in the
    sums, because rare indices behind a large weight would be lost by rounding."""
    indices = tl.arange(0, SIZE)
    first_top = tl.min(tl.where(is_top, indices, SIZE - 1), axis=0)
    others = tl.where(indices == first_top, 0.0, weights)
    sums = tl.cumsum(others, axis=0)
    total = tl.max(sums, axis=0) + tl.sum(tl.where(indices == first_top, weights, 0.0), axis=0)
    is_reached = (sums > uniform * total) & (others > 0.0)  # a sum may grow by rounding alone
    chosen = tl.min(tl.where(is_reached, indices, SIZE), axis=0)
    return tl.where(is_greedy | (chosen == SIZE), first_top, chosen)


@triton.jit
def _sample(
    logits,
    slots,
    temperatures,
    seeds,
    positions,
    tokens,
    logprobs,
    row_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    places, tiles = tl.arange(0, TILE), tl.arange(0, PADDED_TILES)
    tops, totals = tl.full([PADDED_TILES], LOWEST, tl.float32), tl.zeros([PADDED_TILES], tl.float32)
    for tile in range(0, NUM_TILES):
        place = tile * TILE + places
        x = tl.load(logits + place, mask=place < VOCAB, other=-float("inf")).to(tl.float32)
        top = tl.maximum(tl.max(x, axis=0), LOWEST)
        total = tl.sum(tl.exp2((x - top) * LOG2_E), axis=0)
        tops, totals = tl.where(tiles == tile, top, tops), tl.where(tiles == tile, total, totals)
    top = tl.max(tops, axis=0)
    weights = totals * tl.exp2((tops - top) * LOG2_E)
    log_sum = top + tl.log(tl.sum(weights, axis=0))

    slot = tl.load(slots + row)  # padded rows have none
    is_greedy = tl.load(temperatures + slot, mask=slot >= 0, other=0.0) == 0.0
    seed = tl.load(seeds + slot, mask=slot >= 0, other=0)
    first, second, _, _ = tl.rand4x(seed, tl.load(positions + row))
    start = _choose(weights, tops == top, first, is_greedy, PADDED_TILES) * TILE
    x = tl.load(logits + start + places, mask=start + places < VOCAB, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    token = start + _choose(tl.exp2((x - top) * LOG2_E), x == top, second, is_greedy, TILE)
    token = tl.minimum(token, VOCAB - 1)  # logits that are NaN have no weights
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + token).to(tl.float32) - log_sum)


def sample(logits: Tensor, slots: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Sample a token from each row of logits, which are divided by the temperature already. Return tokens and logprobs.
    Temperatures, of which 0 means the most probable token, and seeds are found by the slot of the row."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == slots.stride(0) == positions.stride(0) == 1
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        tensors = (logits, slots, temperatures, seeds, positions, tokens, logprobs)
        num_tiles = triton.cdiv(vocab_size, TILE)
        sizes = (vocab_size, TILE, num_tiles, triton.next_power_of_2(num_tiles))
        _sample[(num_rows,)](*tensors, logits.stride(0), *sizes, num_warps=NUM_WARPS)
    return tokens, logprobs


class TokenSampler:
    """Two functions of vLLM's sampler, which it calls one after the other. What they do not support is left to vLLM."""

    def __init__(self) -> None:
        self._tokens = self._logprobs = torch.empty(0)  # of the last call of `sample`

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        apply_temperature: bool,
        **options: Any,
    ) -> Tensor:
        is_plain = all(option is None or option is False for option in options.values())
        if apply_temperature or not is_plain:
            return vllms_sample(logits, slots, temperatures, seeds, positions, apply_temperature, **options)
        self._tokens, self._logprobs = sample(logits, slots.contiguous(), temperatures, seeds, positions.contiguous())
        return self._tokens

    def score(
        self, logits: Tensor, num_logprobs: int, sampled: Tensor, cu_num_logits: Any = None, **options: Any
    ) -> LogprobsTensors:
        asks_for_more = num_logprobs or options.get("max_per_req_token_ids") or options.get("logits_mode")
        if asks_for_more or cu_num_logits is not None:
            return vllms_scores(logits, num_logprobs, sampled, cu_num_logits, **options)
        logprobs = self._logprobs if sampled is self._tokens else score(logits, sampled, temperature=1.0)[0]
        return LogprobsTensors(
            logprob_token_ids=sampled.unsqueeze(-1),
            logprobs=logprobs.unsqueeze(-1),
            selected_token_ranks=torch.zeros_like(sampled),
        )


def use_our_sampler(must_repeat: bool) -> None:
    """Replace vLLM's functions in the engines of this process. If tokens must repeat, vLLM samples them."""
    ours = TokenSampler()
    sampler.gumbel_sample = vllms_sample if must_repeat else ours.sample
    sampler.compute_topk_scores = ours.score
