"""How far the policy is from the reference, and what that costs."""

import torch
from torch import Tensor


def kl_penalty(new_logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """[T] estimates of KL(policy || reference) at the sampled tokens (joschu.net/blog/kl-approx.html).

    k1 belongs in the reward: as a loss its gradient is 0 on average. k2's gradient is that of the KL; k3's is that of
    KL(reference || policy).
    """
    log_ratio = ref_logprobs - new_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    assert estimator == "k3", estimator
    return torch.exp(log_ratio) - 1 - log_ratio


def adapt_kl_coef(coef: float, kl: float, target: float, num_samples: int, horizon: int = 10000) -> float:
    """The next coefficient, by proportional control (arXiv 1909.08593): it grows while the KL is above the target and
    shrinks below it, by at most a fifth a `horizon` of samples."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
