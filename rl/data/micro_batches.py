"""Micro-batches of a mesh. A forward of a sharded model is a collective, so all ranks run the same number of them."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl.data.batch import Batch
from rl.data.packing import costs_of, count_micro_batches, pack
from rl.watch.heart import HEART, size_class

MIN_TOKENS = 256  # smaller micro-batches count as one shape


def cut(batch: Batch, max_tokens: int, hidden_size: int, count: int) -> list[list[int]]:
    """Return lists of sequences, as even in cost as the token budget allows.

    The one with most tokens comes first, so that the memory that torch caches for it serves all others.
    """
    lengths = batch.lengths.tolist()
    micro_batches = pack(lengths, costs_of(lengths, hidden_size), max_tokens, count)
    return sorted(micro_batches, key=lambda sequences: -sum(lengths[sequence] for sequence in sequences))


def cut_together(batch: Batch, max_tokens: int, hidden_size: int, pg: dist.ProcessGroup) -> list[list[int]]:
    """Cut each rank's share into as many micro-batches as the rank needs that has most. All ranks of the group call it.

    There is at least one, so that metrics and a probe are never left out.
    """
    count = torch.tensor([count_micro_batches(batch.lengths.tolist(), max_tokens)])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=pg)
    return cut(batch, max_tokens, hidden_size, max(1, int(count)))


def micro_batches_of(batch: Batch, micro_batches: list[list[int]], user: str) -> Iterator[Batch]:
    """Yield each micro-batch, with a heartbeat that names its shape and the `user` that computes with it."""
    for number, sequences in enumerate(micro_batches):
        micro_batch = batch.select(sequences)
        shape = f"{user}, up to {size_class(micro_batch.num_tokens, MIN_TOKENS)} tokens"
        HEART.beat(f"micro-batch {number + 1} of {len(micro_batches)}", shape=shape)
        yield micro_batch


def over_micro_batches(
    batch: Batch, micro_batches: list[list[int]], compute: Callable[[Batch], Sequence[Tensor]], name: str
) -> list[Tensor]:
    """Return a [T] tensor, with 0 in prompts, for each quantity that `compute` returns for response tokens.

    The device is waited for once, at the end. `name` says what is computed.
    """
    parts = [torch.stack(list(compute(each))) for each in micro_batches_of(batch, micro_batches, name)]
    scores = torch.cat(parts, 1).cpu()
    spread = torch.zeros(len(scores), batch.num_tokens)
    order = [sequence for sequences in micro_batches for sequence in sequences]
    spans = batch.response_spans()
    lengths = [last - first for first, last in (spans[sequence] for sequence in order)]
    for sequence, piece in zip(order, scores.split(lengths, 1), strict=True):
        spread[:, slice(*spans[sequence])] = piece
    return list(spread)
