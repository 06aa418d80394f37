"""Importance weights of the learner over the engine. They round differently, and the engine's weights may be older."""

from dataclasses import dataclass

from torch import Tensor

from rl.algo.segments import sequence_sums


@dataclass(frozen=True)
class Correction:
    weights: Tensor  # [T], factors of the policy loss, without gradient
    cut: Tensor  # [T] bool, whether the weight was out of bounds


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, segment_ids: Tensor, lengths: Tensor, mode: str, limit: float
) -> Correction:
    """Return the ratio of the learner's probability to the engine's, bounded in one of five ways:

        token                    ratio of the token, at most `limit` (TIS: fengyao.notion.site/off-policy-rl)
        sequence                 product over the sequence, at most `limit`
        token_mask               ratio of the token, 0 outside 1 / limit to limit (IcePop: arXiv 2510.18855)
        sequence_mask            product over the sequence, 0 above limit (MIS: yingru.notion.site)
        sequence_mask_two_sided  product over the sequence, 0 outside 1 / limit to limit

    The ratio of a token is biased but has a low variance. The product is unbiased, but its variance grows with the
    length. `lengths` is [S], the other tensors are [T].
    """
    assert limit >= 1, limit
    assert mode in ("token", "sequence", "token_mask", "sequence_mask", "sequence_mask_two_sided"), mode
    log_weights = (old_logprobs - rollout_logprobs).detach()
    if mode.startswith("sequence"):
        log_weights = sequence_sums(log_weights, segment_ids, lengths)[segment_ids].to(log_weights.dtype)
    weights = log_weights.exp()  # may be infinite for a long sequence, but every mode makes it finite
    cut = weights > limit
    if "mask" not in mode:
        return Correction(weights.clamp(max=limit), cut)
    if mode != "sequence_mask":
        cut |= weights < 1 / limit
    return Correction(weights.masked_fill(cut, 0.0), cut)
