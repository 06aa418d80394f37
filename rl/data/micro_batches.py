"""Micro-batches of a mesh: a forward of a sharded model is a collective, so its ranks agree on how many each runs."""

import torch
import torch.distributed as dist

from rl.data.batch import Batch
from rl.data.packing import costs_of, count_micro_batches, pack


def cut(batch: Batch, max_tokens: int, hidden_size: int, count: int) -> list[list[int]]:
    """Lists of sequences, as even in cost as the token budget allows."""
    lengths = batch.lengths.tolist()
    return pack(lengths, costs_of(lengths, hidden_size), max_tokens, count)


def cut_together(batch: Batch, max_tokens: int, hidden_size: int, pg: dist.ProcessGroup) -> list[list[int]]:
    """On every rank of the group, for its own share: as many as the rank that needs most of them."""
    count = torch.tensor([count_micro_batches(batch.lengths.tolist(), max_tokens)])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=pg)
    return cut(batch, max_tokens, hidden_size, int(count))
