"""Sampling on one engine: pull tasks, step the engine, submit each response for scoring, deliver finished groups.

All ranks of a tensor-parallel engine must make the same calls in the same order. The engine's first rank, the lead,
decides. Before each call, it sends a message to its followers, which make the same call. So no rank waits for work
inside a collective.
"""

import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rl.data.batch import Batch
from rl.data.prompts import Tokenizer, sample_seed
from rl.rewards.failure import RewardFailure, quote
from rl.rewards.pool import RewardPool
from rl.rollout.carried import CarriedGroup, FetchGroup
from rl.rollout.dispatch import NewTasks, Pull, Task
from rl.rollout.engine import Completion, Engine, Request
from rl.rollout.recovery import EngineHost
from rl.rollout.responses import Response, pack_group, unpack_group
from rl.rollout.speeds import StepTimer
from rl.watch.heart import HEART, size_class
from rl.world.messages import Letter, Message
from rl.world.orders import Order
from rl.world.service import Service
from rl.world.world import World

PROGRESS_INTERVAL_S = 0.1  # between reports; a training step of an actor takes longer
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
class AddRequests(Message):
    """Tell followers to give these requests to the engine."""

    requests: list[Request]


@dataclass(frozen=True)
class ScoredGroup(Message):
    """Deliver a group to the actor that owns it, at the end of its round. The payload is the group as a Batch. It is
    empty if the group is missing in the files that the phase update trains on."""

    batch: int
    position: int
    engine: str
    scores: list[dict[str, Any] | None]  # by sample; None: not scored in this round
    num_preemptions: int
    num_kept_tokens: int = 0  # tokens of carried responses whose KV cache older weights have computed
    failures: list[RewardFailure] = field(default_factory=list)  # of the samples whose reward functions failed


@dataclass(frozen=True)
class GroupProgress(Message):
    """Tell the leader how far the groups of a batch are that it follows."""

    batch: int
    positions: list[int]
    lengths: list[int]  # that the longest response of each group will have at least


class Recorder(Protocol):
    """Writes groups to files: see rl/rollout/archive.py."""

    def record(self, task: Task, group: ScoredGroup, rollouts: Batch) -> None: ...


@dataclass
class Group:
    """The responses of one prompt in this round."""

    task: Task
    attempt: int = 0  # number of engines that failed while sampling it; scores of earlier attempts are dropped
    carried: bytes | bytearray = b""  # the responses from earlier rounds, once their owner has sent them
    responses: list[Response] = field(default_factory=list)  # by sample, once requests were added
    running: set[int] = field(default_factory=set)  # samples that the engine still has to end or cut
    scores: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the responses that ended in this round
    num_unscored: int = 0
    num_preemptions: int = 0
    num_kept_tokens: int = 0

    @property
    def is_sampled(self) -> bool:
        return bool(self.responses) and not self.running

    @property
    def occupancy(self) -> float:
        """Return how much of a group's room in the engine it needs. A carried group often has few responses left, and
        would otherwise keep new groups out."""
        is_partial = self.task.is_carried and self.responses
        return len(self.running) / len(self.responses) if is_partial else 1.0

    def least_length(self, progress: Mapping[str, int]) -> int:
        """Return how long its longest response will be at least. `progress` is that of the engine, whose responses get
        at least one more token."""
        lengths = [len(response.tokens) for response in self.responses]
        for sample in self.running:
            lengths[sample] += progress[self.request_id(sample)] + 1
        return max(lengths, default=0)

    def request_id(self, sample: int) -> str:
        return f"{self.task.batch}/{self.task.position}/{sample}"

    def begin(self) -> None:
        """Begin the round: continue the carried responses, or start new ones."""
        count = self.task.sampling.num_samples
        self.responses = unpack_group(Batch.from_bytes(self.carried)) if self.carried else _new_responses(count)
        self.running = {sample for sample, response in enumerate(self.responses) if not response.is_ended}

    def again(self) -> "Group":
        """Return the group as it was before this round, for another engine."""
        return Group(self.task, self.attempt + 1, self.carried)


def _new_responses(count: int) -> list[Response]:
    return [Response() for _ in range(count)]


class RolloutService(Service):
    """Sample on one engine. Runs on all of its ranks; followers have no groups and only repeat the lead's calls."""

    name = "rollout"
    kinds = (NewTasks, CarriedGroup, AddRequests, StepEngine, RebuildEngine, Scored)

    def __init__(
        self,
        world: World,
        host: EngineHost,
        rewards: RewardPool | None,  # None on followers
        tokenizer: Tokenizer,
        max_num_groups: int,  # sampled at the same time
        run_seed: int | None,  # None: responses differ between runs
        leader: int,  # the rank that hands out tasks
        keeps_kv: bool = False,  # carried responses continue with the KV cache of older weights
    ):
        self.host = host
        self._world, self._mail, self._rewards, self._tokenizer = world, world.mail, rewards, tokenizer
        self._max_num_groups, self._run_seed, self._leader = max_num_groups, run_seed, leader
        self._keeps_kv = keeps_kv
        self._groups: dict[tuple[int, int], Group] = {}  # unfinished, by batch and position
        self._to_restart: list[Group] = []  # groups of a failed engine, until the new engine has weights
        self._is_rebuilt = False  # the engine was replaced, and has sampled nothing yet
        self._num_prompt_tokens = 0  # in requests that were added since the last step
        self._reported_at = 0.0  # when the leader was told of the progress
        self._timer, self._is_decoding = StepTimer(), False  # whether the last step read no prompts
        self.recorder: Recorder | None = None  # in the phase rollout: writes groups to files
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
        return any(group.num_unscored for group in self._groups.values())

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
            case NewTasks(tasks):
                self._start(tasks)
            case CarriedGroup(batch, position):
                group = self._groups[batch, position]
                group.carried = letter.payload
                self._begin([group])
                self._pull()
            case AddRequests(requests):
                self._add(requests)
            case Scored((batch, position, sample, attempt), result):
                scored = self._groups.get((batch, position))
                if scored is None or attempt != scored.attempt:  # from an engine that has failed since then
                    return
                scored.scores[sample] = result
                scored.responses[sample].reward = result["score"]
                scored.num_unscored -= 1
                self._deliver_if_done(scored)
            case StepEngine():
                self.host.follow(self._step, self.name)
            case RebuildEngine():
                self.host.replace()

    def work(self) -> None:
        if self._can_restart:
            groups, self._to_restart, self._is_rebuilt = self._to_restart, [], False
            return self._begin(groups)
        self._tell_followers(StepEngine())
        num_responses, started = self.engine.num_unfinished, time.perf_counter()
        reads_prompts, was_decoding = self._num_prompt_tokens > 0, self._is_decoding
        try:
            ended = self._step()
        except Exception as error:
            return self._recover(error)
        # An engine that schedules asynchronously waits for the prompts of a step in the next one.
        self._is_decoding = not reads_prompts
        if was_decoding and self._is_decoding:
            self._timer.add(num_responses, time.perf_counter() - started)
        HEART.beat(f"{self.engine.num_unfinished} responses", sum(len(done.tokens) for done in ended))
        is_last_of_group = [self._submit(completion) for completion in ended]
        self._report_progress(is_urgent=any(is_last_of_group))
        if any(is_last_of_group):
            self._pull()

    def _submit(self, completion: Completion) -> bool:
        """Submit a response to the reward functions if it has ended. Return whether its group is sampled now."""
        batch, position, sample = map(int, completion.id.split("/"))
        group = self._groups[batch, position]
        task, response = group.task, group.responses[sample]
        if task.is_carried:
            group.num_kept_tokens += completion.num_cached_tokens if self._keeps_kv else 0
        sampling = task.sampling
        response.append(completion, task.version, sampling.max_new_tokens, sampling.length(task.prompt, sample))
        group.running.discard(sample)
        group.num_preemptions += completion.num_preemptions
        if response.is_ended:
            group.num_unscored += 1
            key, row = (batch, position, sample, group.attempt), task.prompt.row | {"answer": task.prompt.answer}
            text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
            assert self._rewards is not None
            self._rewards.submit(key, task.prompt.text, text, row, sampling.answer_of)
        self._deliver_if_done(group)
        return group.is_sampled

    def _report_progress(self, is_urgent: bool) -> None:
        """Tell the leader how far the groups are that it follows. At other than urgent times, do so now and then."""
        now = time.monotonic()
        if not is_urgent and now < self._reported_at + PROGRESS_INTERVAL_S:
            return
        followed = [group for group in self._groups.values() if group.task.is_followed]
        if not followed:
            return
        self._reported_at, progress = now, self.engine.progress()
        lengths = [group.least_length(progress) for group in followed]
        positions = [group.task.position for group in followed]
        self._mail.send(self._leader, GroupProgress(followed[0].task.batch, positions, lengths))

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
        again = {(group.task.batch, group.task.position): group.again() for group in lost}
        self._groups |= again
        # A carried group without responses still waits for its owner.
        self._to_restart = [group for group in again.values() if group.carried or not group.task.is_carried]
        self._is_rebuilt = True
        self._tell_followers(RebuildEngine())
        self.host.replace()
        if self.host.donation is None:
            self._mail.send(self._leader, Order("publish again"))

    def _tell_followers(self, message: Message) -> None:
        for rank in self.host.followers:
            self._mail.send(rank, message)

    def _pull(self) -> None:
        if self.host.is_lead:
            groups = self._being_sampled
            room = math.floor(self._max_num_groups - sum(group.occupancy for group in groups) + 1e-6)
            self._mail.send(self._leader, Pull(max(room, 0), len(groups), self._timer.take()))

    def _start(self, tasks: list[Task]) -> None:
        groups = {(task.batch, task.position): Group(task) for task in tasks}
        self._groups |= groups
        for task in tasks:
            if task.is_carried:
                self._mail.send(task.owner, FetchGroup(task.batch, task.position))
        self._begin([group for group in groups.values() if not group.task.is_carried])
        self._pull()

    def _begin(self, groups: list[Group]) -> None:
        """Give the responses of these groups to the engine. A new engine without weights gets them later."""
        if self._is_rebuilt and not self.engine.version:
            self._to_restart += groups
            return
        for group in groups:
            if group.task.version != self.engine.version:
                held = f"version {self.engine.version}" if self.engine.version else "no version"
                raise RuntimeError(
                    f"got a task for weights of version {group.task.version}, but this engine has verified {held}; "
                    "this is a bug in the order of sync and dispatch"
                )
            group.begin()
        requests = make_requests(groups, self._run_seed, self._keeps_kv)
        self._tell_followers(AddRequests(requests))
        self._add(requests)

    def _add(self, requests: list[Request]) -> None:
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

    def _deliver_if_done(self, group: Group) -> None:
        """Deliver a group at the end of its round: nothing is being sampled, and everything that ended has a score."""
        if not group.is_sampled or group.num_unscored:
            return
        task, samples = group.task, range(len(group.responses))
        del self._groups[task.batch, task.position]
        rollouts = pack_group(task.prompt.tokens, task.position, group.responses)
        kept = [
            {name: group.scores[sample][name] for name in ("parts", "status", "answer")}
            if sample in group.scores
            else None
            for sample in samples
        ]
        failures = [
            replace(score["failure"], sample=self._show(task, group.responses[sample]))
            for sample, score in sorted(group.scores.items())
            if score["failure"] is not None
        ]
        message = ScoredGroup(
            task.batch, task.position, self.engine.name, kept, group.num_preemptions, group.num_kept_tokens, failures
        )
        if self.recorder is not None and task.round:
            self.recorder.record(task, message, rollouts)
        self._mail.send(task.owner, message, payload=rollouts.to_bytes())

    def _show(self, task: Task, response: Response) -> str:
        text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
        return f"{task.prompt.place}, prompt: {quote(task.prompt.text)}, response: {quote(text)}"


def make_requests(groups: Iterable[Group], run_seed: int | None, keeps_kv: bool = False) -> list[Request]:
    """Return one request per response that has not ended. Without `run_seed`, the engine's own generator is used."""
    requests = []
    for group in groups:
        prompt, sampling = group.task.prompt, group.task.sampling
        for sample in sorted(group.running):
            response = group.responses[sample]
            # A carried response may be too long already, if the run was resumed with another mean length.
            num_left = max(1, sampling.length(prompt, sample) - len(response.tokens))
            requests.append(
                Request(
                    id=group.request_id(sample),
                    tokens=prompt.tokens + response.tokens,
                    sampling=sampling,
                    max_tokens=min(num_left, sampling.max_tokens_per_round or num_left),
                    seed=None if run_seed is None else sample_seed(run_seed, prompt.epoch, prompt.id, sample),
                    noise=response.noise,
                    cache_key=f"{prompt.epoch}/{prompt.id}" if keeps_kv and sampling.max_tokens_per_round else "",
                )
            )
    return requests
