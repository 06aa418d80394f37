"""Metrics and checks of a batch before the update."""

import torch
from torch import Tensor

from rl.algo.mismatch import mismatch_kl
from rl.data.batch import Batch
from rl.data.conversations import count_observed
from rl.report.metrics import Measures

MAX_TURNS = 8  # that have a metric of their own


def describe(batch: Batch, has_turns: bool = False) -> Measures:
    """Return the metrics of a batch, in which each conversation counts once. Without old logprobs, the update measures
    the KL between engine and learner. `has_turns` is True in runs with environments, also on ranks without a group."""
    measures = Measures()
    mask, starts, count = batch.loss_mask, batch.starts_conversation, batch.num_conversations
    measures.mean("reward/mean", batch.rewards[starts].sum(), count)
    measures.deviation("reward/std", batch.rewards[starts])
    measures.mean("rollout/length_mean", mask.sum(), count)
    measures.maximum("rollout/length_max", batch.conversation_lengths)
    measures.mean("rollout/truncated", batch.truncated[starts].sum(), count)
    if has_turns:
        _describe_turns(measures, batch)
    measures.sum("rollout/tokens", mask.sum())
    lags = None if batch.lags is None else batch.lags[mask]
    if lags is not None:
        measures.mean("rollout/lag_mean", lags.sum(), mask.sum())
    if batch.old_logprobs is not None:
        measure_mismatch(measures, batch.old_logprobs[mask], batch.rollout_logprobs[mask], lags)
    return measures


def _describe_turns(measures: Measures, batch: Batch) -> None:
    """Add the metrics of conversations."""
    assert batch.turns is not None or not batch.num_sequences, "a run with environments records turns"
    turns = torch.empty(0) if batch.turns is None else batch.turns[batch.loss_mask]
    conversations, count = batch.response_conversation_ids, batch.num_conversations
    measures.mean("environment/observation_tokens", count_observed(batch).sum(), count)
    measures.mean("environment/sequences", batch.num_sequences, count)
    for turn in range(MAX_TURNS):
        tokens = torch.bincount(conversations[turns == turn], minlength=count)
        measures.mean_if_any(f"environment/tokens_turn_{turn + 1}", tokens.sum(), (tokens > 0).sum())


def measure_mismatch(
    measures: Measures, learner_logprobs: Tensor, rollout_logprobs: Tensor, lags: Tensor | None
) -> None:
    """Add the KL between engine and learner over tokens of lag 0, and that of older tokens as `policy/staleness_kl`.
    A batch may have no tokens of one kind. All tensors are [R]. If `lags` is None, every lag is 0."""
    kl = mismatch_kl(learner_logprobs, rollout_logprobs)
    if lags is None:
        measures.mean("policy/mismatch_kl", kl.sum(), kl.numel())
        return
    is_fresh = lags == 0  # selecting the tokens by index would wait for the device
    measures.mean_if_any("policy/mismatch_kl", kl.where(is_fresh, 0.0).sum(), is_fresh.sum())
    measures.mean_if_any("policy/staleness_kl", kl.where(~is_fresh, 0.0).sum(), (~is_fresh).sum())


def check_finite(batch: Batch) -> None:
    """Raise FloatingPointError for infinite or NaN logprobs and values. They would spoil all weights of the model."""
    for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "certainty", "values"):
        scores = getattr(batch, name)
        bad = [] if scores is None else (batch.loss_mask & ~torch.isfinite(scores)).nonzero().flatten().tolist()
        if bad:
            first, sequence = bad[0], int(batch.segment_ids[bad[0]])
            place = int((batch.loss_mask[:first] & (batch.segment_ids[:first] == sequence)).sum())
            raise FloatingPointError(
                f"{len(bad)} of {int(batch.loss_mask.sum())} {name} are not finite; the first is {scores[first]} "
                f"at token {place} of a response to prompt {int(batch.group_ids[sequence])} of this step, sampled by "
                f"version {int(batch.versions[first])}. A model has overflowed: try model.dtype=float32, or resume "
                "from an earlier checkpoint with a lower learning rate"
            )
