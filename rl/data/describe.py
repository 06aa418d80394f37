"""What a batch says before anything is learnt from it."""

from rl.algo.mismatch import mismatch_kl
from rl.data.batch import Batch
from rl.data.prompts import Tokenizer
from rl.metrics import Measures


def describe(batch: Batch) -> Measures:
    """Where there are no old logprobs yet, the update measures `policy/mismatch_kl`."""
    measures = Measures()
    mask, count = batch.response_mask, batch.num_sequences
    measures.mean("reward/mean", batch.rewards.sum(), count)
    measures.mean("rollout/length_mean", batch.response_lengths.sum(), count)
    measures.mean("rollout/truncated", batch.truncated.sum(), count)
    measures.sum("rollout/tokens", mask.sum())
    if batch.old_logprobs is not None:
        mismatch = mismatch_kl(batch.old_logprobs[mask], batch.rollout_logprobs[mask])
        measures.mean("policy/mismatch_kl", mismatch, mask.sum())
    return measures


def show(batch: Batch, tokenizer: Tokenizer, count: int) -> str:
    """The first rollouts as a Markdown table for TensorBoard."""
    rows = ["| reward | prompt | response |", "| --- | --- | --- |"]
    sequences = batch.tokens.split(batch.lengths.tolist())
    for tokens, split, reward in list(zip(sequences, batch.prompt_lengths.tolist(), batch.rewards.tolist()))[:count]:
        parts = (tokens[:split].tolist(), tokens[split:].tolist())
        texts = [tokenizer.decode(part, skip_special_tokens=False) for part in parts]
        cells = [text.replace("|", "\\|").replace("\n", "<br>") for text in texts]
        rows.append(f"| {reward:g} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)
