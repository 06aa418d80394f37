"""Cut batches into micro-batches.

A forward pass of a sharded model is a collective, so all ranks of its mesh must run the same number of micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl.data.batch import Batch
from rl.data.packing import count_micro_batches, estimate_costs, pack
from rl.watch.heart import HEART, size_class

MIN_TOKENS = 256  # heartbeats report all smaller micro-batches as one shape


def cut(batch: Batch, max_tokens: int, hidden_size: int, count: int) -> list[list[int]]:
    """Return `count` micro-batches as lists of sequence indices, as even in cost as the token budget allows.

    The one with most tokens comes first, so that all others can reuse the memory that torch has cached for it.
    """
    lengths = batch.lengths.tolist()
    micro_batches = pack(lengths, estimate_costs(lengths, hidden_size), max_tokens, count)
    return sorted(micro_batches, key=lambda sequences: -sum(lengths[sequence] for sequence in sequences))


def cut_together(batch: Batch, max_tokens: int, hidden_size: int, pg: dist.ProcessGroup) -> list[list[int]]:
    """Cut each rank's batch into the same number of micro-batches. All ranks of the group call it.

    The number is the largest that a rank needs, and at least 1, so that metrics and a probe are never left out.
    """
    count = torch.tensor([count_micro_batches(batch.lengths.tolist(), max_tokens)])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=pg)
    return cut(batch, max_tokens, hidden_size, max(1, int(count)))


def micro_batches_of(batch: Batch, micro_batches: list[list[int]], user: str) -> Iterator[Batch]:
    """Yield each micro-batch after a heartbeat that names its size and the `user` that computes with it."""
    for number, sequences in enumerate(micro_batches):
        micro_batch = batch.select(sequences)
        shape = f"{user}, up to {size_class(micro_batch.num_tokens, MIN_TOKENS)} tokens"
        HEART.beat(f"micro-batch {number + 1} of {len(micro_batches)}", shape=shape)
        yield micro_batch


def over_micro_batches(
    batch: Batch, micro_batches: list[list[int]], compute: Callable[[Batch], Sequence[Tensor]], name: str
) -> list[Tensor]:
    """Call `compute` on each micro-batch. Return a [T] tensor, with 0 in prompts, for each quantity that it computes.

    `compute` returns values of the response tokens only. The host waits for the device once, at the end. Heartbeats
    contain `name`.
    """
    parts = [torch.stack(list(compute(each))) for each in micro_batches_of(batch, micro_batches, name)]
    scores = torch.cat(parts, 1).cpu()
    order = [sequence for sequences in micro_batches for sequence in sequences]
    places = batch.token_indices(order)[batch.select(order).response_mask]
    return list(torch.zeros(len(scores), batch.num_tokens).index_copy(1, places, scores))
