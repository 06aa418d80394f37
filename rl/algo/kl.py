"""The KL between policy and reference, and the adaptive coefficient of its penalty."""

import torch
from torch import Tensor


def kl_penalty(new_logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at the sampled tokens (joschu.net/blog/kl-approx.html). All tensors are [T].
    k1 belongs in the reward, since its gradient as a loss averages to 0. The gradient of k2 is that of KL(policy ||
    reference), and the gradient of k3 is that of KL(reference || policy)."""
    log_ratio = ref_logprobs - new_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    assert estimator == "k3", estimator
    return torch.expm1(log_ratio) - log_ratio


def adapt_kl_coef(coef: float, kl: float, target: float, num_samples: int, horizon: int = 10000) -> float:
    """Return the next coefficient by proportional control (arXiv 1909.08593). It grows if the KL is above the target
    and shrinks if it is below, by at most a fifth per `horizon` samples."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
