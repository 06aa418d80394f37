"""Samples of a step as Markdown: prompt, reference answer, response or conversation, reward and its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.common.text import count_of
from rl.config.schema import MetricsConfig
from rl.data.batch import Batch
from rl.data.conversations import Turn, read_conversations
from rl.data.prompts import Tokenizer

TAG = "rollout/samples"
INDENT = " " * 4  # of a block that Markdown shows as it is
# These bound what a step adds to the run's files.
MAX_CHARACTERS = 6000  # of a block
MAX_TURNS = 24  # of a conversation


@dataclass(frozen=True)
class ReportedSample:
    """One sample of a prompt, and what the others of its group got."""

    batch: Batch  # the sequences of the sample
    answer: str  # reference answer; empty if there is none
    result: Mapping[str, Any] | None  # parts and status of the reward functions; None if they are unknown
    rewards: Sequence[float]  # of all samples of the prompt


def shows_samples(metrics: MetricsConfig, step: int) -> bool:
    """Return whether samples of this step are written."""
    return bool(metrics.samples_interval and metrics.num_samples) and (step - 1) % metrics.samples_interval == 0


def show(samples: Sequence[ReportedSample], tokenizer: Tokenizer) -> str:
    """Return the samples as headings and blocks. Whatever the texts contain, they stay in their blocks."""
    return "\n\n".join(_show_sample(number, sample, tokenizer) for number, sample in enumerate(samples, start=1))


def _show_sample(number: int, sample: ReportedSample, tokenizer: Tokenizer) -> str:
    batch = sample.batch
    reward, is_truncated = float(batch.rewards[0]), bool(batch.truncated[0])
    cut = f", cut after {count_of(int(batch.loss_mask.sum()), 'token')}" if is_truncated else ""
    parts = [f"### sample {number}: reward {reward:.4g}{cut}"]
    if batch.turns is None:
        prompt = batch.tokens[: int(batch.prompt_lengths[0])].tolist()
        titled = [("prompt", prompt), ("response", batch.tokens[batch.loss_mask].tolist())]
    else:
        (conversation,) = read_conversations(batch)
        titled = [("prompt", conversation.prompt), *_name_turns(conversation.turns)]
    for place, (title, tokens) in enumerate(titled):
        size = f" ({count_of(len(tokens), 'token')})" if tokens else ""
        parts += [f"**{title}**{size}"]
        parts += [block(tokenizer.decode(tokens, skip_special_tokens=False))] if tokens else []
        if place == 0 and sample.answer:
            parts += ["**reference answer**", block(sample.answer)]
    parts += ["**score**", block("\n".join(_score_lines(sample, reward)))]
    return "\n\n".join(parts)


def _name_turns(turns: Sequence[Turn]) -> list[tuple[str, list[int]]]:
    """Return titles and tokens of the turns. The middle of a long conversation is only counted."""
    titled, turn = [], 0
    for role, tokens in turns:
        turn += role == "model"
        titled.append((f"model, turn {turn}" if role == "model" else "environment", tokens))
    num_left_out = len(titled) - MAX_TURNS
    if num_left_out <= 0:
        return titled
    half = MAX_TURNS // 2
    note = f"{count_of(num_left_out, 'message')} left out here"
    return [*titled[:half], (note, []), *titled[len(titled) - half :]]


def _score_lines(sample: ReportedSample, reward: float) -> list[str]:
    lines = [f"reward  {reward:.4g}"]
    if sample.result is not None:
        parts = {f"reward/{name}": value for name, value in sample.result["parts"].items()}
        width = max(map(len, parts), default=0)
        lines += [f"  {name:<{width}}  {value:.4g}" for name, value in parts.items()]
        if sample.result["status"] != "ok":
            lines.append(f"the reward functions failed: {sample.result['status']}")
    if len(sample.rewards) > 1:
        rewards = " ".join(f"{other:.3g}" for other in sample.rewards)
        lines.append(f"rewards of all {len(sample.rewards)} samples of this prompt: {rewards}")
    return lines


def block(text: str) -> str:
    """Return a text as a block that Markdown shows character by character, without the middle of a long text."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        num_left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[... {count_of(num_left_out, 'character')} left out ...]\n{text[-half:]}"
    # Markdown takes a carriage return for the end of a line, and the next line would not be indented.
    return "\n".join(f"{INDENT}{line}" for line in text.replace("\r", "\\r").split("\n"))
