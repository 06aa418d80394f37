"""Metrics and checks of a batch before the update, and sample rollouts for TensorBoard."""

import torch
from torch import Tensor

from rl.algo.mismatch import mismatch_kl
from rl.data.batch import Batch
from rl.data.prompts import Tokenizer
from rl.report.metrics import Measures


def describe(batch: Batch) -> Measures:
    """Return the metrics of a batch. Without old logprobs, the update measures the KL between engine and learner."""
    measures = Measures()
    mask, count = batch.loss_mask, batch.num_sequences
    measures.mean("reward/mean", batch.rewards.sum(), count)
    measures.mean("rollout/length_mean", batch.response_lengths.sum(), count)
    measures.mean("rollout/truncated", batch.truncated.sum(), count)
    measures.sum("rollout/tokens", mask.sum())
    lags = None if batch.lags is None else batch.lags[mask]
    if lags is not None:
        measures.mean("rollout/lag_mean", lags.sum(), mask.sum())
    if batch.old_logprobs is not None:
        measure_mismatch(measures, batch.old_logprobs[mask], batch.rollout_logprobs[mask], lags)
    return measures


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
            place = int(batch.positions[first] - batch.prompt_lengths[sequence])
            raise FloatingPointError(
                f"{len(bad)} of {int(batch.loss_mask.sum())} {name} are not finite; the first is {scores[first]} "
                f"at token {place} of a response to prompt {int(batch.group_ids[sequence])} of this step, sampled by "
                f"version {int(batch.versions[first])}. A model has overflowed: try model.dtype=float32, or resume "
                "from an earlier checkpoint with a lower learning rate"
            )


def show(batch: Batch, tokenizer: Tokenizer, count: int) -> str:
    """Return the first rollouts as a Markdown table for TensorBoard."""
    rows = ["| reward | prompt | response |", "| --- | --- | --- |"]
    sequences = batch.tokens.split(batch.lengths.tolist())
    for tokens, split, reward in list(zip(sequences, batch.prompt_lengths.tolist(), batch.rewards.tolist()))[:count]:
        parts = (tokens[:split].tolist(), tokens[split:].tolist())
        texts = [tokenizer.decode(part, skip_special_tokens=False) for part in parts]
        cells = [text.replace("|", "\\|").replace("\n", "<br>") for text in texts]
        rows.append(f"| {reward:g} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)
