"""Turn rewards into advantages: shape the reward of each conversation, then assign credit to its tokens.

C conversations have R tokens that the policy has sampled. The sequences of a conversation follow each other, so its
sampled tokens do too: they are its steps, whatever it read in between. In runs without environments, every sequence is
a conversation.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rl.algo import advantages as rules
from rl.algo.choose import OwnAdvantage
from rl.algo.kl import kl_penalty
from rl.algo.segments import sequence_sums
from rl.config.schema import AlgoConfig
from rl.data.batch import Batch
from rl.report.metrics import Measures, variance
from rl.watch.heart import HEART


def assign_credit(
    whole: Batch,
    algo: AlgoConfig,
    max_new_tokens: int,
    kl_coef: float,
    pg: dist.ProcessGroup,
    measures: Measures,
    own: OwnAdvantage | None = None,
) -> Batch:
    """Return the batch with advantages, and with returns if there is a critic. This is a collective: batch statistics
    cover all ranks of the process group. A rank's batch must hold whole groups. `own` is the user's function, if
    algo.advantage names one.

    Conversations that algo.mask_truncated masks count neither in the mean of their group nor in the batch statistics.
    """
    kept = whole.trained_sequences(algo.mask_truncated)
    batch, fields = whole.select(kept), {}
    segments, lengths = batch.response_conversation_ids, batch.conversation_lengths
    group_ids = batch.group_ids[batch.starts_conversation]
    rewards = _shaped_rewards(batch, algo, max_new_tokens, measures)
    kl = _kl(batch, algo, measures)
    is_standardized = False
    if own is not None:
        is_standardized = own.is_standardized
        credit = own(
            rewards=_with_kl(rewards, kl, kl_coef, segments, lengths),
            token_rewards=rules.token_rewards(rewards, kl, kl_coef, segments, lengths),
            group_ids=group_ids,
            segment_ids=segments,
            lengths=lengths,
        )
    elif algo.advantage == "rloo":
        credit = rules.leave_one_out(_with_kl(rewards, kl, kl_coef, segments, lengths), group_ids)[segments]
    elif algo.advantage in ("grpo", "dr_grpo"):
        rewards, normalize_std = _with_kl(rewards, kl, kl_coef, segments, lengths), algo.advantage == "grpo"
        credit = rules.group_relative(rewards, group_ids, normalize_std)[segments]
    else:
        is_standardized = True
        if algo.advantage == "reinforce_pp_baseline":
            rewards = rules.group_relative(rewards, group_ids, normalize_std=False)
        token_rewards = rules.token_rewards(rewards, kl, kl_coef, segments, lengths)
        if algo.advantage == "gae":
            assert batch.values is not None
            values = batch.values[batch.loss_mask]
            credit, returns = rules.gae(token_rewards, values, segments, algo.gamma, algo.lam)
            fields["returns"] = batch.at_responses(returns)
            measures.mean("critic/return_mean", returns.sum(), len(returns))
            terms = (rules.moments(returns), rules.moments(returns.double() - values.double()))
            measures.combine("critic/explained_variance", terms, _explained_variance)
        else:
            gamma = algo.gamma if algo.advantage == "reinforce_pp" else 1.0
            credit = rules.returns_to_go(token_rewards, segments, gamma)
    if is_standardized:
        moments = rules.moments(credit)
        with HEART.in_collective("actor"):
            dist.all_reduce(moments, group=pg)
        credit = rules.standardize(credit, moments)
    fields["advantages"] = batch.at_responses(credit)
    return whole.replace(**{name: whole.at_sequences(kept, field) for name, field in fields.items()})


def _explained_variance(sums: list[float]) -> float | None:
    """Return which share of the variance of returns the critic's values explain. Return None for equal returns. The
    sums are the moments of the returns, and those of the returns minus the values."""
    of_returns, of_errors = variance(*sums[:3]), variance(*sums[3:])
    return 1 - of_errors / of_returns if of_returns else None


def _with_kl(rewards: Tensor, kl: Tensor | None, kl_coef: float, segments: Tensor, lengths: Tensor) -> Tensor:
    """Subtract the KL of each conversation from its reward, [C]."""
    return rewards if kl is None else rewards - kl_coef * sequence_sums(kl, segments, lengths).float()


def _shaped_rewards(batch: Batch, algo: AlgoConfig, max_new_tokens: int, measures: Measures) -> Tensor:
    """Return the reward of each conversation, [C], with the penalty for its length and the bonus for certainty."""
    rewards, lengths = batch.rewards[batch.starts_conversation], batch.conversation_lengths
    if algo.overlong_tokens:
        penalty = rules.overlong_penalty(lengths, max_new_tokens, algo.overlong_tokens)
        rewards = rewards + penalty
        measures.mean("reward/overlong", penalty.sum(), len(rewards))
    if algo.certainty_coef:
        assert batch.certainty is not None
        sums = sequence_sums(batch.certainty[batch.loss_mask], batch.response_conversation_ids, lengths)
        certainty = (sums / lengths.clamp(min=1)).float()
        rewards = rewards + algo.certainty_coef * certainty
        measures.mean("reward/certainty", certainty.sum(), len(rewards))
    return rewards


def _kl(batch: Batch, algo: AlgoConfig, measures: Measures) -> Tensor | None:
    """Return the KL of each response token, [R], or None if no KL is subtracted from rewards."""
    if not algo.has_kl_in_reward:
        return None
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    mask = batch.loss_mask
    kl = kl_penalty(batch.old_logprobs[mask], batch.ref_logprobs[mask], algo.kl_estimator)
    measures.mean("reward/kl", kl.sum(), torch.tensor(kl.numel()))
    return kl
