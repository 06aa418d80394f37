"""Have responses scored by the reward functions once they have ended. Runs on an engine's lead."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rl.data.prompts import Tokenizer, decode_all
from rl.environments.protocol import Ended
from rl.rewards.failure import RewardFailure, quote
from rl.rewards.pool import RewardPool
from rl.rollout.group import Group
from rl.rollout.responses import Response


@dataclass(frozen=True)
class EndedResponse:
    """A response that is to be scored."""

    group: Group
    sample: int
    tokens: list[int]
    about: dict[str, Any]  # what else the reward functions find in its row


class Scoring:
    """Collects responses that have ended, and submits them together. Results reach the service as messages."""

    def __init__(self, rewards: RewardPool, tokenizer: Tokenizer):
        self._rewards, self._tokenizer = rewards, tokenizer
        self._ended: list[EndedResponse] = []  # not submitted yet

    @contextmanager
    def together(self) -> Iterator[None]:
        """Submit all responses that end in here at once, at the end."""
        with self._rewards.together():
            yield
            self.submit()

    def add(self, response: EndedResponse) -> None:
        response.group.num_unscored += 1
        self._ended.append(response)

    def add_conversation(self, group: Group, ended: Ended) -> None:
        """Have a conversation scored. If the user's code has failed, it has no score."""
        sample = ended.key[2]
        group.scores[sample] = {"ending": ended.ending, "counts": ended.counts}
        if ended.problem:
            status = ended.ending if ended.ending in ("timeout", "crash") else "error"
            group.num_unscored += 1
            group.take_score(sample, self._rewards.failed(status, ended.problem))
        else:
            about = {"messages": ended.messages, "environment_reward": ended.reward}
            self.add(EndedResponse(group, sample, group.conversations[sample].last_tokens, about))

    def submit(self) -> None:
        """Submit what has ended to the reward functions. Responses are decoded together, on all cores."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        for each, text in zip(ended, decode_all(self._tokenizer, [each.tokens for each in ended]), strict=True):
            task, prompt = each.group.task, each.group.task.prompt
            key = (task.batch, task.position, each.sample, each.group.attempt)
            row = prompt.row | {"answer": prompt.answer} | each.about
            self._rewards.submit(key, prompt.text, text, row, task.sampling.answer_of)

    def failures_of(self, group: Group) -> list[RewardFailure]:
        """Return the failures of reward functions in a group, each with the prompt and the response."""
        return [
            replace(score["failure"], sample=self._show(group, sample))
            for sample, score in sorted(group.scores.items())
            if score["failure"] is not None
        ]

    def _show(self, group: Group, number: int) -> str:
        sample, prompt = group.samples[number], group.task.prompt
        tokens = sample.tokens.tolist() if isinstance(sample, Response) else sample.last_tokens
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return f"{prompt.place}, prompt: {quote(prompt.text)}, response: {quote(text)}"
