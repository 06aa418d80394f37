"""Sums within the sequences of flat tokens: S sequences, T tokens laid end to end, sequences may have no token."""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, segment_ids: Tensor, lengths: Tensor) -> Tensor:
    """values [T], segment_ids [T], lengths [S] -> [S] float64, the sum over each sequence's tokens."""
    sums = torch.zeros(lengths.shape, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, segment_ids, values.double())


def discounted_sums(values: Tensor, segment_ids: Tensor, factor: float) -> Tensor:
    """values [T], segment_ids [T] -> [T] float64: y[t] = x[t] + factor * y[t + 1] within each sequence.

    Each pass doubles how far a token sees, so the longest sequence takes log2 of its length passes.
    """
    sums, reach = values.double(), 1
    while reach < sums.numel():
        is_same = segment_ids[reach:] == segment_ids[:-reach]
        if not is_same.any():
            break
        later = torch.where(is_same, sums[reach:], 0.0) * factor**reach
        sums = torch.cat([sums[:-reach] + later, sums[-reach:]])
        reach *= 2
    return sums
