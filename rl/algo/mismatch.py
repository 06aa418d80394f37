"""The KL between engine and learner. It is 0 if both compute the same probabilities from the same weights.

If older weights have sampled a token, its KL measures their age too. So only tokens of lag 0 show whether engine and
learner agree.
"""

import torch
from torch import Tensor


def mismatch_kl(learner_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(engine || learner) of each token, [T] in float64: its terms nearly cancel."""
    log_ratio = (learner_logprobs.detach() - rollout_logprobs).double()
    return torch.expm1(log_ratio) - log_ratio


def check_mismatch(mean_kl: float, limit: float) -> None:
    """Raise RuntimeError if the KL is above the limit or NaN. A limit of 0 allows everything."""
    if limit and not mean_kl <= limit:
        raise RuntimeError(
            f"engine and learner disagree: policy/mismatch_kl is {mean_kl:.4g}, above rollout.max_mismatch_kl = "
            f"{limit:g}; this batch was not trained on. Raise the limit, or check model.dtype and the engine's settings"
        )
