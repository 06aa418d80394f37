"""Metrics and checks of a batch before the update, and sample rollouts for TensorBoard."""

from itertools import islice

import torch
from torch import Tensor

from rl.algo.mismatch import mismatch_kl
from rl.common.text import count_of
from rl.data.batch import Batch
from rl.data.conversations import Conversation, count_observed, read_conversations
from rl.data.prompts import Tokenizer
from rl.report.metrics import Measures

MAX_TURNS = 8  # that have a metric of their own
INDENT = " " * 4  # of a block that Markdown shows as it is


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


def show(batch: Batch, tokenizer: Tokenizer, count: int) -> str:
    """Return the first samples as Markdown for TensorBoard: responses as a table, conversations turn by turn."""
    if batch.turns is not None:
        read = islice(read_conversations(batch), count)
        return "\n\n".join(_show_conversation(number, each, tokenizer) for number, each in enumerate(read, start=1))
    rows = ["| reward | prompt | response |", "| --- | --- | --- |"]
    for sequence, reward in enumerate(batch.rewards[:count].tolist()):
        one = batch.select([sequence])
        parts = (one.tokens[: int(one.prompt_lengths)].tolist(), one.tokens[one.loss_mask].tolist())
        texts = [tokenizer.decode(part, skip_special_tokens=False) for part in parts]
        cells = [text.replace("|", "\\|").replace("\n", "<br>") for text in texts]
        rows.append(f"| {reward:g} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def _show_conversation(number: int, conversation: Conversation, tokenizer: Tokenizer) -> str:
    """Return a conversation as headings and blocks of text. Nothing in the text can end a block."""
    cut = ", cut at the limit" if conversation.is_truncated else ""
    parts, turn = [f"### sample {number}: reward {conversation.reward:g}{cut}"], 0
    titled = [("prompt", conversation.prompt)]
    for role, tokens in conversation.turns:
        turn += role == "model"
        titled.append((f"model, turn {turn}" if role == "model" else "environment", tokens))
    for title, tokens in titled:
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        parts += [f"**{title}** ({count_of(len(tokens), 'token')})", _indent(text)]
    return "\n\n".join(parts)


def _indent(text: str) -> str:
    """Return a text as a block that Markdown shows character by character."""
    # Markdown takes a carriage return for the end of a line, and the next line would not be indented.
    return "\n".join(f"{INDENT}{line}" for line in text.replace("\r", "\\r").split("\n"))
