"""Importance weights for what an engine sampled and the learner trains: engine and learner round differently, and the
engine's weights may be older."""

from dataclasses import dataclass

from torch import Tensor

from rl.algo.segments import sequence_sums


@dataclass(frozen=True)
class Correction:
    weights: Tensor  # [T], factors on the policy loss; carry no gradient
    cut: Tensor  # [T] bool, whether the weight was beyond the limit


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, segment_ids: Tensor, lengths: Tensor, mode: str, limit: float
) -> Correction:
    """Return the learner's probability over the engine's, bounded in one of five ways:

        token                    a token's own, at most `limit` (TIS: fengyao.notion.site/off-policy-rl)
        sequence                 the product over its sequence, at most `limit`
        token_mask               a token's own, 0 outside 1 / limit to limit (IcePop: arXiv 2510.18855)
        sequence_mask            the product over its sequence, 0 above limit (MIS: yingru.notion.site)
        sequence_mask_two_sided  the product over its sequence, 0 outside 1 / limit to limit

    A token's own weight is biased but of low variance; the product is unbiased and grows apart with the length.
    `moments(weights)` gives their mean and the effective sample size, sum^2 / sum of squares.

    lengths is [S], the others are [T].
    """
    assert limit >= 1, limit
    assert mode in ("token", "sequence", "token_mask", "sequence_mask", "sequence_mask_two_sided"), mode
    log_weights = (old_logprobs - rollout_logprobs).detach()
    if mode.startswith("sequence"):
        log_weights = sequence_sums(log_weights, segment_ids, lengths)[segment_ids].to(log_weights.dtype)
    weights = log_weights.exp()  # a long sequence's may be infinite, which either bound makes finite
    cut = weights > limit
    if "mask" not in mode:
        return Correction(weights.clamp(max=limit), cut)
    if mode != "sequence_mask":
        cut |= weights < 1 / limit
    return Correction(weights.masked_fill(cut, 0.0), cut)
