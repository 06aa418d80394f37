"""Sums within sequences. S sequences, some of which may be empty, have T tokens, concatenated."""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, segment_ids: Tensor, lengths: Tensor) -> Tensor:
    """Sum over the tokens of each sequence: values [T], segment_ids [T], lengths [S] -> [S] float64."""
    sums = torch.zeros(lengths.shape, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, segment_ids, values.double())


def discounted_sums(values: Tensor, segment_ids: Tensor, factor: float) -> Tensor:
    """Compute y[t] = x[t] + factor * y[t + 1] within each sequence: values [T], segment_ids [T] -> [T] float64.
    Each pass doubles the reach of a token, so the number of passes is log2 of the longest sequence."""
    sums, reach = values.double(), 1
    while reach < sums.numel():
        is_same = segment_ids[reach:] == segment_ids[:-reach]
        if not is_same.any():
            break
        later = torch.where(is_same, sums[reach:], 0.0) * factor**reach
        sums = torch.cat([sums[:-reach] + later, sums[-reach:]])
        reach *= 2
    return sums
