"""Sampling on one engine: pull tasks, step the engine, submit each response for scoring, deliver finished groups.

All ranks of a tensor-parallel engine must make the same calls in the same order. The engine's first rank, the lead,
decides. Before each call, it sends a message to its followers, which make the same call. So no rank waits for work
inside a collective.
"""

import sys
from dataclasses import dataclass
from typing import Any

from rl.rollout.dispatch import NewTasks, Pull, Task
from rl.rollout.engine import Completion, Engine
from rl.rollout.groups import Group, OpenGroups, make_requests, pack_group
from rl.rollout.recovery import EngineHost
from rl.watch.heart import HEART, size_class
from rl.world.messages import Letter, Message
from rl.world.orders import Order
from rl.world.service import Service
from rl.world.world import World

MIN_SEQUENCES, MIN_PROMPT_TOKENS = 8, 256  # smaller steps all count as the same shape


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
    awaited = "scores"


@dataclass(frozen=True)
class ScoredGroup(Message):
    """Deliver a finished group to the actor that owns it. The payload is the group as a Batch."""

    batch: int
    position: int
    version: int
    engine: str
    scores: list[dict[str, Any]]  # by sample
    num_preemptions: int
    awaited = "groups"


class RolloutService(Service):
    """Sample on one engine, at most `max_num_groups` groups at a time, from tasks that the leader hands out.

    Runs on all ranks of the engine; followers have no groups and only repeat the lead's calls. Without `run_seed`,
    responses differ between runs.
    """

    name = "rollout"
    kinds = (NewTasks, StepEngine, RebuildEngine, Scored)

    def __init__(
        self, world: World, host: EngineHost, groups: OpenGroups, max_num_groups: int, run_seed: int | None, leader: int
    ):
        self.host = host
        self._world, self._mail, self._groups = world, world.mail, groups
        self._max_num_groups, self._run_seed, self._leader = max_num_groups, run_seed, leader
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
    def _can_restart(self) -> bool:
        return bool(self._to_restart) and self.engine.version > 0

    def handle(self, letter: Letter[Any]) -> None:
        match letter.message:
            case NewTasks(tasks) if self.host.is_lead:
                self._start(tasks)
            case NewTasks(tasks):
                self._add(tasks)
            case Scored(key, result):
                group = self._groups.score(key, result)
                if group is not None:
                    self._deliver(group)
            case StepEngine():
                self.host.follow(self._step, self.name)
            case RebuildEngine():
                self._replace_engine()

    def work(self) -> None:
        if self._can_restart:
            tasks, self._to_restart = self._to_restart, []
            assert {task.version for task in tasks} == {self.engine.version}, (tasks, self.engine.version)
            self._add(tasks)
            return
        self._tell_followers(StepEngine())
        try:
            ended = self._step()
        except Exception as error:
            self._recover(error)
            return
        HEART.beat(f"{self.engine.num_unfinished} responses", sum(len(done.tokens) for done in ended))
        is_last_of_group = [self._groups.complete(completion) for completion in ended]
        if any(is_last_of_group):
            self._pull()

    def _recover(self, error: Exception) -> None:
        """Replace the engine. Its groups are sampled again when the new engine has verified weights.

        A group may be restarted only once. Otherwise a group that crashes every engine would cause endless rebuilds.
        """
        lost = self._groups.being_sampled
        if any(group.attempt > 0 for group in lost):
            raise error
        self.host.require_recoverable(error)
        print(
            f"oneworld: the engine of rank {self._mail.rank} failed at step {self._world.step}: "
            f"{type(error).__name__}: {error}. It is being rebuilt, and its unfinished groups ({len(lost)}) will be "
            "sampled again",
            file=sys.stderr,
            flush=True,
        )
        self._groups.restart(lost)
        self._to_restart = [group.task for group in lost]
        self._tell_followers(RebuildEngine())
        self._replace_engine()
        self._mail.send(self._leader, Order("publish again"))

    def _replace_engine(self) -> None:
        self.host.replace()
        self._num_prompt_tokens = 0

    def _tell_followers(self, message: Message) -> None:
        for rank in self.host.followers:
            self._mail.send(rank, message)

    def _pull(self) -> None:
        if self.host.is_lead:
            held = len(self._groups.being_sampled)
            self._mail.send(self._leader, Pull(max(self._max_num_groups - held, 0), held))

    def _start(self, tasks: list[Task]) -> None:
        self._groups.add(tasks)
        if self._to_restart and not self.engine.version:  # requested before the engine failed; start with the others
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
        samples = range(task.sampling.num_samples)
        scores = [group.scores[sample] for sample in samples]
        completions = [group.completions[sample] for sample in samples]
        rollouts = pack_group(task, completions, [score["score"] for score in scores])
        kept = [{name: score[name] for name in ("parts", "status", "answer")} for score in scores]
        num_preemptions = sum(completion.num_preemptions for completion in completions)
        message = ScoredGroup(task.batch, task.position, task.version, self.engine.name, kept, num_preemptions)
        self._mail.send(task.owner, message, payload=rollouts.to_bytes())
