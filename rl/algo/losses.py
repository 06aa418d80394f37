"""Losses on flat tokens. Each returns a sum over tokens; who calls it divides once, by the count over all ranks.

All tensors are [T]: the response tokens of a micro-batch, laid end to end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    loss_sum: Tensor  # scalar, carries the gradient
    clipped_sum: Tensor  # scalar, tokens whose gradient the clip cut off


def clipped_ratio(
    new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO's pessimistic bound with separate bounds below and above (DAPO's clip-higher, arXiv 2503.14476)."""
    ratio = torch.exp(new_logprobs - old_logprobs)
    free = ratio * advantages
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(loss_sum=-torch.minimum(free, held).sum(), clipped_sum=(held < free).sum())


def kl_penalty(new_logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """[T] estimates of KL(policy || reference) at the sampled tokens (joschu.net/blog/kl-approx.html)."""
    log_ratio = ref_logprobs - new_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    assert estimator == "k3", estimator
    return torch.exp(log_ratio) - 1 - log_ratio
