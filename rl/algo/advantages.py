"""Advantages: rewards in, one number a sequence out. Pure tensor math; a group is given by equal group ids."""

import torch
from torch import Tensor


def group_relative(rewards: Tensor, group_ids: Tensor, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """GRPO (arXiv 2402.03300): reward minus the group's mean, over the group's standard deviation (n - 1).

    rewards [S], group_ids [S] -> [S]. A group of equal rewards has advantage 0.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    count = torch.bincount(group, minlength=num_groups).to(rewards.dtype)
    mean = rewards.new_zeros(num_groups).index_add_(0, group, rewards) / count
    centred = rewards - mean[group]
    if not normalize_std:
        return centred
    variance = rewards.new_zeros(num_groups).index_add_(0, group, centred.square()) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[group] + eps)
