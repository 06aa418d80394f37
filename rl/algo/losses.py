"""Losses per token. The caller multiplies them by `token_weights`, and divides their sum by the denominator, which is
summed over all ranks. rl/algo/choose.py calls the function that algo.loss names, and fills its parameters by their
names.

A micro-batch has S sequences with T response tokens, concatenated. `segment_ids` [T] is the index of each token's
sequence. `lengths` [S] is the number of tokens of each sequence, which may be 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.algo.segments import sequence_sums


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor  # [T], with gradient
    clipped: Tensor  # [T] bool, whether the bounds removed the token's gradient or (CISPO) changed its weight


def clipped_ratio(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """Return PPO's clipped loss (arXiv 1707.06347), with separate bounds below and above (DAPO, arXiv 2503.14476).
    A `dual_clip` c > 1 bounds the ratio by c where the advantage is negative (arXiv 1912.09729). Tensors are [T]."""
    assert dual_clip == 0 or dual_clip > 1, dual_clip
    return _pessimistic(new_logprobs - old_logprobs, advantages, clip_low, clip_high, dual_clip)


def sequence_ratio(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment_ids: Tensor,
    lengths: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return the GSPO loss (arXiv 2507.18071) in the paper's GSPO-token form. The ratio of a sequence is the geometric
    mean of its tokens' ratios. The gradient flows through each token's own logprob. With "sequence" weights and one
    advantage per sequence, loss and gradient are those of GSPO. `lengths` is [S], the other tensors are [T]."""
    log_ratio_sums = sequence_sums((new_logprobs - old_logprobs).detach(), segment_ids, lengths)
    mean_log_ratio = (log_ratio_sums / lengths.clamp(min=1)).to(new_logprobs.dtype)
    log_ratio = mean_log_ratio[segment_ids] + new_logprobs - new_logprobs.detach()
    return _pessimistic(log_ratio, advantages, clip_low, clip_high)


def clipped_weight(
    new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Return the CISPO loss (arXiv 2506.13585): REINFORCE weighted by the clipped ratio. All tensors are [T].
    Every token has a gradient, even where the ratio is clipped."""
    ratio = torch.exp(new_logprobs.detach() - old_logprobs)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(loss=-weight * advantages * new_logprobs, clipped=weight != ratio)


LOSSES: dict[str, Callable[..., PolicyLoss]] = {  # by their names in algo.loss
    "clip": clipped_ratio,
    "gspo": sequence_ratio,
    "cispo": clipped_weight,
}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the critic's loss as in PPO2 (github.com/openai/baselines), and whether clipping removed the gradient.
    The loss is half of the larger squared error: that of the value, or that of the value clipped to within `clip` of
    the old value. All tensors are [T]."""
    error = (values - returns).square()
    clipped_error = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(error, clipped_error) / 2, clipped_error > error


def token_weights(normalization: str, lengths: Tensor, segment_ids: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, and this rank's share of the denominator:

        token     1           tokens                      all tokens count the same (DAPO, arXiv 2503.14476)
        sequence  1 / length  sequences with a token      all sequences count the same (GRPO, arXiv 2402.03300)
        constant  1           sequences * max_length      no length is favoured (Dr.GRPO, arXiv 2503.20783)

    lengths [S], segment_ids [T] -> weights [T] float32, denominator (int64 scalar).
    """
    if normalization == "sequence":
        return (1 / lengths.clamp(min=1))[segment_ids], (lengths > 0).sum()
    weights = torch.ones(segment_ids.shape, device=segment_ids.device)
    if normalization == "token":
        return weights, lengths.sum()
    assert normalization == "constant", normalization
    return weights, lengths.new_tensor(lengths.numel() * max_length)


def _pessimistic(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> PolicyLoss:
    """Return -min(r A, clip(r) A), bounded by -c A where A < 0 if `dual_clip` c is set.

    Where the loss is flat (clipped, or A = 0), the exponential is not differentiated: exp(89) is infinite in float32,
    and the gradient would be 0 times infinity.
    """
    with torch.no_grad():
        ratio = torch.exp(log_ratio)
        bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
        clipped = bounded * advantages < ratio * advantages
        if dual_clip:
            is_cut = (advantages < 0) & (ratio > dual_clip)
            bounded, clipped = bounded.masked_fill(is_cut, dual_clip), clipped | is_cut
        is_flat = clipped | (advantages == 0)
    free = torch.exp(log_ratio.masked_fill(is_flat, 0.0))
    return PolicyLoss(loss=-torch.where(is_flat, bounded, free) * advantages, clipped=clipped)
