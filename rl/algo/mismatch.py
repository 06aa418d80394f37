"""How far the engine's logprobs are from the learner's: 0 when engines sample from the weights that are trained."""

import torch
from torch import Tensor


def mismatch_kl(learner_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """The sum over tokens of the k3 estimate of KL(engine || learner); in float64, since nearly equal ones cancel."""
    log_ratio = (learner_logprobs.detach() - rollout_logprobs).double()
    return (torch.exp(log_ratio) - 1 - log_ratio).sum()


def check_mismatch(mean_kl: float, limit: float) -> None:
    if limit and not mean_kl <= limit:  # a NaN does not pass
        raise RuntimeError(
            f"engine and learner disagree: policy/mismatch_kl is {mean_kl:.4g}, above rollout.max_mismatch_kl = "
            f"{limit:g}; nothing was learnt from this batch. Raise the limit or compare model.dtype and the engine's "
            "settings"
        )
