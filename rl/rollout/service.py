"""Sampling on one engine: pull tasks, step the engine, submit each response for scoring, deliver finished groups.

All ranks of a tensor-parallel engine must make the same calls in the same order. The engine's first rank, the lead,
decides. Before each call, it sends a message to its followers, which make the same call. So no rank waits for work
inside a collective.
"""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl.data.batch import Batch, batch_of_responses
from rl.data.prompts import Tokenizer, sample_seed
from rl.rewards.failure import RewardFailure, quote
from rl.rewards.pool import RewardPool
from rl.rollout.dispatch import NewTasks, Pull, Task
from rl.rollout.engine import Completion, Engine, Request
from rl.rollout.recovery import EngineHost
from rl.watch.heart import HEART, size_class
from rl.world.messages import Letter, Message
from rl.world.orders import Order
from rl.world.service import Service
from rl.world.world import World

MIN_SEQUENCES, MIN_PROMPT_TOKENS = 8, 256  # heartbeats treat smaller steps as steps of this size


@dataclass(frozen=True)
class StepEngine(Message):
    """Tell followers to step the engine."""


@dataclass(frozen=True)
class RebuildEngine(Message):
    """Tell followers to replace the engine, which failed on all of its ranks."""


@dataclass(frozen=True)
class Scored(Message):
    """Deliver the result of the reward functions for one response."""

    key: tuple[int, ...]  # batch, position, sample, attempt
    result: dict[str, Any]


@dataclass(frozen=True)
class ScoredGroup(Message):
    """Deliver a finished group to the actor that owns it. The payload is the group as a Batch."""

    batch: int
    position: int
    engine: str
    scores: list[dict[str, Any]]  # by sample
    num_preemptions: int
    failures: list[RewardFailure] = field(default_factory=list)  # of the samples whose reward functions failed


@dataclass
class Group:
    """The responses of one prompt and their scores so far, each by the number of the sample."""

    task: Task
    attempt: int = 0  # number of engines that failed while sampling it; scores of earlier attempts are dropped
    completions: dict[int, Completion] = field(default_factory=dict)
    scores: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_sampled(self) -> bool:
        return len(self.completions) == self.task.sampling.num_samples


class RolloutService(Service):
    """Sample on one engine. Runs on all of its ranks; followers have no groups and only repeat the lead's calls."""

    name = "rollout"
    kinds = (NewTasks, StepEngine, RebuildEngine, Scored)

    def __init__(
        self,
        world: World,
        host: EngineHost,
        rewards: RewardPool | None,  # None on followers
        tokenizer: Tokenizer,
        max_num_groups: int,  # sampled at the same time
        run_seed: int | None,  # None: responses differ between runs
        leader: int,  # the rank that hands out tasks
    ):
        self.host = host
        self._world, self._mail, self._rewards, self._tokenizer = world, world.mail, rewards, tokenizer
        self._max_num_groups, self._run_seed, self._leader = max_num_groups, run_seed, leader
        self._groups: dict[tuple[int, int], Group] = {}  # unfinished, by batch and position
        self._to_restart: list[Task] = []  # tasks of a failed engine, until the new engine has weights
        self._num_prompt_tokens = 0  # in requests that were added since the last step
        self._pull()

    @property
    def engine(self) -> Engine:
        return self.host.engine

    @property
    def busy(self) -> bool:
        return self.host.is_lead and (self.engine.num_unfinished > 0 or self._can_restart)

    @property
    def is_scoring(self) -> bool:
        """Return whether sampled responses wait for their scores."""
        return any(len(group.completions) > len(group.scores) for group in self._groups.values())

    @property
    def awaited(self) -> str:
        if self.is_scoring:
            return "the scores of its responses"
        if self._to_restart:
            return "weights for its new engine"
        return f"work from rank {self._leader if self.host.is_lead else self.host.lead}"

    @property
    def _can_restart(self) -> bool:
        return bool(self._to_restart) and self.engine.version > 0

    @property
    def _being_sampled(self) -> list[Group]:
        return [group for group in self._groups.values() if not group.is_sampled]

    def handle(self, letter: Letter[Any]) -> None:
        match letter.message:
            case NewTasks(tasks) if self.host.is_lead:
                self._start(tasks)
            case NewTasks(tasks):
                self._add(tasks)
            case Scored((batch, position, sample, attempt), result):
                group = self._groups.get((batch, position))
                if group is None or attempt != group.attempt:  # from an engine that has failed since then
                    return
                group.scores[sample] = result
                if len(group.scores) == group.task.sampling.num_samples:
                    self._deliver(self._groups.pop((batch, position)))
            case StepEngine():
                self.host.follow(self._step, self.name)
            case RebuildEngine():
                self.host.replace()

    def work(self) -> None:
        if self._can_restart:
            tasks, self._to_restart = self._to_restart, []
            assert {task.version for task in tasks} == {self.engine.version}, (tasks, self.engine.version)
            return self._add(tasks)
        self._tell_followers(StepEngine())
        try:
            ended = self._step()
        except Exception as error:
            return self._recover(error)
        HEART.beat(f"{self.engine.num_unfinished} responses", sum(len(done.tokens) for done in ended))
        is_last_of_group = [self._submit(completion) for completion in ended]
        if any(is_last_of_group):
            self._pull()

    def _submit(self, completion: Completion) -> bool:
        """Submit a response to the reward functions. Return whether it was the last one of its group."""
        batch, position, sample = map(int, completion.id.split("/"))
        group = self._groups[batch, position]
        group.completions[sample] = completion
        prompt, key = group.task.prompt, (batch, position, sample, group.attempt)
        response = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        row = prompt.row | {"answer": prompt.answer}
        assert self._rewards is not None
        self._rewards.submit(key, prompt.text, response, row, group.task.sampling.answer_of)
        return group.is_sampled

    def _recover(self, error: Exception) -> None:
        """Replace the engine. Its groups are sampled again when the new engine has verified weights.

        A group may be restarted only once. Otherwise a group that crashes every engine would cause endless rebuilds.
        """
        lost = self._being_sampled
        if any(group.attempt > 0 for group in lost):
            raise error
        self.host.require_recoverable(error)
        text = (
            f"oneworld: the engine of rank {self._mail.rank} failed at step {self._world.step}: "
            f"{type(error).__name__}: {error}. It is being rebuilt, and its unfinished groups ({len(lost)}) will be "
            "sampled again"
        )
        print(text, file=sys.stderr, flush=True)
        self._to_restart = [group.task for group in lost]
        self._groups |= {(task.batch, task.position): Group(task, attempt=1) for task in self._to_restart}
        self._tell_followers(RebuildEngine())
        self.host.replace()
        self._mail.send(self._leader, Order("publish again"))

    def _tell_followers(self, message: Message) -> None:
        for rank in self.host.followers:
            self._mail.send(rank, message)

    def _pull(self) -> None:
        if self.host.is_lead:
            held = len(self._being_sampled)
            self._mail.send(self._leader, Pull(max(self._max_num_groups - held, 0), held))

    def _start(self, tasks: list[Task]) -> None:
        self._groups |= {(task.batch, task.position): Group(task) for task in tasks}
        if self._to_restart and not self.engine.version:  # pulled before the failure; they wait for the new weights too
            self._to_restart += tasks
            return
        for task in tasks:
            if task.version != self.engine.version:
                held = f"version {self.engine.version}" if self.engine.version else "no version"
                raise RuntimeError(
                    f"got a task for weights of version {task.version}, but this engine has verified {held}; this is a "
                    "bug in the order of sync and dispatch"
                )
        self._add(tasks)
        self._pull()

    def _add(self, tasks: list[Task]) -> None:
        self._tell_followers(NewTasks(tasks))
        requests = make_requests(tasks, self._run_seed)
        self._num_prompt_tokens += sum(len(request.tokens) for request in requests)
        self.engine.add(requests)

    def _step(self) -> list[Completion]:
        num_responses, num_prompt_tokens = self.engine.num_unfinished, self._num_prompt_tokens
        shape = f"decodes up to {size_class(num_responses, MIN_SEQUENCES)} responses"
        if num_prompt_tokens:
            shape = f"reads up to {size_class(num_prompt_tokens, MIN_PROMPT_TOKENS)} tokens of prompts"
        HEART.beat(f"{num_responses} responses", shape=shape)
        self._num_prompt_tokens = 0
        return self.engine.step()

    def _deliver(self, group: Group) -> None:
        task = group.task
        scores = [score for _, score in sorted(group.scores.items())]
        completions = [completion for _, completion in sorted(group.completions.items())]
        rollouts = pack_group(task, completions, [score["score"] for score in scores])
        kept = [{name: score[name] for name in ("parts", "status", "answer")} for score in scores]
        num_preemptions = sum(completion.num_preemptions for completion in completions)
        failures = [
            replace(score["failure"], sample=self._show(task, completion))
            for score, completion in zip(scores, completions, strict=True)
            if score["failure"] is not None
        ]
        message = ScoredGroup(task.batch, task.position, self.engine.name, kept, num_preemptions, failures)
        self._mail.send(task.owner, message, payload=rollouts.to_bytes())

    def _show(self, task: Task, completion: Completion) -> str:
        response = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return f"{task.prompt.place}, prompt: {quote(task.prompt.text)}, response: {quote(response)}"


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
    return batch_of_responses(
        tokens=torch.frombuffer(tokens, dtype=torch.int64),
        lengths=torch.tensor([len(prompt) + len(c.tokens) for c in completions], dtype=torch.int64),
        prompt_lengths=torch.full((count,), len(prompt), dtype=torch.int64),
        versions=torch.frombuffer(versions, dtype=torch.int32),
        rollout_logprobs=torch.frombuffer(logprobs, dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.full((count,), task.position, dtype=torch.int64),
        truncated=torch.tensor([c.truncated for c in completions], dtype=torch.bool),
    )
