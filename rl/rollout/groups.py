"""Groups that an engine is sampling: turn tasks into requests, have completions scored, pack finished groups."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl.data.batch import Batch
from rl.data.prompts import Tokenizer, sample_seed
from rl.rewards.pool import RewardPool
from rl.rollout.dispatch import Task
from rl.rollout.engine import Completion, Request


@dataclass
class Group:
    """The responses of one prompt and their scores so far, each by the number of the sample."""

    task: Task
    attempt: int = 0  # engines that failed while sampling this group; scores of earlier attempts are dropped
    completions: dict[int, Completion] = field(default_factory=dict)
    scores: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_sampled(self) -> bool:
        return len(self.completions) == self.task.sampling.num_samples


class OpenGroups:
    """The unfinished groups of one engine. On its followers there are none, and `rewards` is None."""

    def __init__(self, rewards: RewardPool | None, tokenizer: Tokenizer):
        self._rewards, self._tokenizer = rewards, tokenizer
        self._groups: dict[tuple[int, int], Group] = {}  # by batch and position

    @property
    def being_sampled(self) -> list[Group]:
        return [group for group in self._groups.values() if not group.is_sampled]

    def add(self, tasks: Iterable[Task]) -> None:
        self._groups |= {task.group_id: Group(task) for task in tasks}

    def restart(self, groups: Iterable[Group]) -> None:
        """Sample these groups again from the first token."""
        self._groups |= {group.task.group_id: Group(group.task, group.attempt + 1) for group in groups}

    def complete(self, completion: Completion) -> bool:
        """Submit a response to the reward functions. Return whether it was the last one of its group.

        The score arrives as a `Scored` message.
        """
        assert self._rewards is not None
        batch, position, sample = map(int, completion.id.split("/"))
        group = self._groups[batch, position]
        group.completions[sample] = completion
        prompt, key = group.task.prompt, (batch, position, sample, group.attempt)
        response = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        row = prompt.row | {"answer": prompt.answer}
        self._rewards.submit(key, prompt.text, response, row, group.task.sampling.answer_of)
        return group.is_sampled

    def score(self, key: Sequence[int], result: dict[str, Any]) -> Group | None:
        """Record the score of a response. Return the group if this was its last score, otherwise None."""
        batch, position, sample, attempt = key
        group = self._groups.get((batch, position))
        if group is None or attempt != group.attempt:  # from an engine that has failed since then
            return None
        group.scores[sample] = result
        is_scored = len(group.scores) == group.task.sampling.num_samples
        return self._groups.pop((batch, position)) if is_scored else None


def make_requests(tasks: Iterable[Task], run_seed: int | None) -> list[Request]:
    """Return one request per sample. Without `run_seed`, the engine's own generator is used."""
    requests = []
    for task in tasks:
        prompt = task.prompt
        for sample in range(task.sampling.num_samples):
            seed = None if run_seed is None else sample_seed(run_seed, prompt.epoch, prompt.id, sample)
            name = f"{task.batch}/{task.position}/{sample}"
            requests.append(Request(name, prompt.tokens, task.sampling, seed))
    return requests


def pack_group(task: Task, completions: list[Completion], rewards: list[float]) -> Batch:
    """Return the ragged batch of one group, in the order of its samples."""
    prompt, count = task.prompt.tokens, len(completions)
    tokens, logprobs, versions = array("q"), array("f"), array("i")  # four times as fast as lists
    for completion in completions:
        tokens.fromlist([*prompt, *completion.tokens])
        logprobs.fromlist([0.0] * len(prompt) + completion.logprobs)
        versions.fromlist([-1] * len(prompt) + [task.version] * len(completion.tokens))
    return Batch(
        tokens=torch.frombuffer(tokens, dtype=torch.int64),
        lengths=torch.tensor([len(prompt) + len(c.tokens) for c in completions], dtype=torch.int64),
        prompt_lengths=torch.full((count,), len(prompt), dtype=torch.int64),
        versions=torch.frombuffer(versions, dtype=torch.int32),
        rollout_logprobs=torch.frombuffer(logprobs, dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.full((count,), task.position, dtype=torch.int64),
        truncated=torch.tensor([c.truncated for c in completions], dtype=torch.bool),
    )
