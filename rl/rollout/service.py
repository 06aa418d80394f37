"""Sampling on one engine: pull tasks, step the engine, submit each response for scoring, deliver finished groups.

All ranks of a tensor-parallel engine must make the same calls in the same order. The engine's first rank, the lead,
decides. Before each call, it sends a message to its followers, which make the same call. So no rank waits for work
inside a collective. See followers.py.
"""

import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl.data.batch import Batch
from rl.data.prompts import Tokenizer, sample_seed
from rl.environments.protocol import Ask, Ended
from rl.rewards.failure import RewardFailure
from rl.rewards.pool import RewardPool
from rl.rollout.carried import CarriedGroup, FetchGroup
from rl.rollout.dispatch import NewTasks, Pull, Task
from rl.rollout.engine import Completion, Engine, Request
from rl.rollout.followers import FROM_LEAD, AddRequests, Followers, Reason, RebuildEngine, StepEngine, describe_wait
from rl.rollout.group import Group
from rl.rollout.meter import EngineMeter
from rl.rollout.recovery import EngineHost, EngineRebuilt
from rl.rollout.scoring import EndedResponse, Scoring
from rl.rollout.turns import Conversations
from rl.watch.heart import HEART, size_class
from rl.world.messages import Letter, Message
from rl.world.orders import Order
from rl.world.service import Service
from rl.world.world import World

PROGRESS_INTERVAL_S = 0.1  # between reports; a training step of an actor takes longer
MIN_SEQUENCES, MIN_PROMPT_TOKENS = 8, 256  # heartbeats treat smaller steps as steps of this size


@dataclass(frozen=True)
class Scored(Message):
    """Deliver the result of the reward functions for one response."""

    key: tuple[int, ...]  # batch, position, sample, attempt
    result: dict[str, Any]


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
    num_read_tokens: int = 0  # of all requests to the engine
    num_cached_tokens: int = 0  # of these, so many were in the prefix cache
    failures: list[RewardFailure] = field(default_factory=list)  # of the samples whose reward functions failed


@dataclass(frozen=True)
class GroupProgress(Message):
    """Tell the leader how far the groups of a batch are that it follows."""

    batch: int
    positions: list[int]
    lengths: list[int]  # that the longest response of each group will have at least


@dataclass(frozen=True)
class TurnAsked(Message):
    """Deliver what a conversation asks of the engine."""

    ask: Ask


@dataclass(frozen=True)
class ConversationEnded(Message):
    """Deliver the end of a conversation."""

    ended: Ended


class Recorder(Protocol):
    """Writes groups to files: see rl/rollout/archive.py."""

    def record(self, task: Task, group: ScoredGroup, rollouts: Batch) -> None: ...


class RolloutService(Service):
    """Sample on one engine. Runs on all of its ranks; followers have no groups and only repeat the lead's calls."""

    name = "rollout"
    kinds = (NewTasks, CarriedGroup, Scored, TurnAsked, ConversationEnded, *FROM_LEAD)

    def __init__(
        self,
        world: World,
        host: EngineHost,
        rewards: RewardPool | None,  # None on followers
        tokenizer: Tokenizer,
        max_num_groups: int,  # of the training, sampled at the same time
        run_seed: int | None,  # None: responses differ between runs
        leader: int,  # the rank that hands out tasks
    ):
        """Set `conversations` before the first task, if samples are conversations."""
        self.host, self._followers = host, Followers(world.mail, host.followers)
        self._world, self._mail = world, world.mail
        self._scoring = None if rewards is None else Scoring(rewards, tokenizer)
        self._max_num_groups, self._run_seed, self._leader = max_num_groups, run_seed, leader
        self._groups: dict[tuple[int, int], Group] = {}  # unfinished, by batch and position
        self._to_restart: list[Group] = []  # groups of a failed engine, until the new engine has weights
        self._is_rebuilt = False  # the engine was replaced, and has sampled nothing yet
        self._num_prompt_tokens = 0  # in requests that were added since the last step
        self._reported_at = 0.0  # when the leader was told of the progress
        self._meter = EngineMeter()
        world.accounts.take_engine_costs = self._meter.take_costs
        self.recorder: Recorder | None = None  # in the phase rollout: writes groups to files
        self.conversations: Conversations | None = None  # on the lead, if samples are conversations
        self._room = 0.0  # for groups, that the leader knows of
        self._has_news = False  # for the leader, who is told once before a step: many carried groups may come at once
        self._pull()

    @property
    def engine(self) -> Engine:
        return self.host.engine

    @property
    def busy(self) -> bool:
        return self.host.is_lead and (self.engine.num_unfinished > 0 or self._can_restart)

    @property
    def is_scoring(self) -> bool:
        """Return whether sampled responses wait for their scores, or conversations for tools."""
        return self._reason in ("scores", "tools")

    @property
    def awaited(self) -> str:
        return describe_wait(self._reason, self._leader if self.host.is_lead else self.host.lead)

    @property
    def _reason(self) -> Reason:
        """Return why this rank waits when it is not busy."""
        if not self.host.is_lead:
            return self._followers.reason
        if any(group.num_unscored for group in self._groups.values()):
            return "scores"
        if any(group.conversations for group in self._groups.values()):
            return "tools"
        return "weights" if self._to_restart else "work"

    @property
    def _can_restart(self) -> bool:
        return bool(self._to_restart) and self.engine.version > 0

    @property
    def _being_sampled(self) -> list[Group]:
        return [group for group in self._groups.values() if not group.is_sampled]

    def handle(self, letter: Letter[Any]) -> None:
        if isinstance(letter.message, FROM_LEAD):
            self._followers.hear(letter.message)
        match letter.message:
            case NewTasks(tasks):
                self._start(tasks)
            case CarriedGroup(batch, position, records):
                group = self._groups[batch, position]
                group.carried, group.records = letter.payload, records
                self._begin([group])
                self._has_news = True  # it may need less room than was thought
                if not self.busy:  # conversations wait for their tools first
                    self._pull()
            case AddRequests(requests):
                self._add(requests)
            case TurnAsked(ask):
                asking = self._find(ask.key)
                if asking is not None and self.conversations is not None and not self.conversations.ask(asking, ask):
                    self._leave(asking, ask.key[2])
            case ConversationEnded(ended):
                ending = self._find(ended.key)
                if ending is not None and ended.key[2] in ending.writing:  # its time is over in the middle of a turn
                    ending.late[ended.key[2]] = ended
                elif ending is not None:
                    self._end_conversation(ending, ended)
            case Scored(key, result):
                scored = self._find(key)
                if scored is not None:
                    scored.take_score(key[2], result)
                    self._deliver_if_done(scored)
            case StepEngine():
                self.host.follow(self._step, self.name)
            case RebuildEngine():
                self.host.replace()
        if self._scoring is not None:
            self._scoring.submit()
        self._tell_reason()

    def _tell_reason(self) -> None:
        """Tell the followers why the lead waits, if it does."""
        if self.host.followers and not self.busy:
            self._followers.tell(self._reason)

    def _find(self, key: tuple[int, ...]) -> Group | None:
        """Return the group of a sample. Return None if the engine that sampled it has failed since then."""
        group = self._groups.get((key[0], key[1]))
        return group if group is not None and group.attempt == key[3] else None

    def work(self) -> None:
        if self._can_restart:
            groups, self._to_restart, self._is_rebuilt = self._to_restart, [], False
            self._begin(groups)
        else:
            self._sample()
        self._tell_reason()

    def _sample(self) -> None:
        """Step the engine, and take what it has sampled."""
        if self._has_news:
            self._pull()
        self._followers.call(StepEngine())
        try:
            ended = self._meter.measure(self._step, self.engine, self._num_prompt_tokens)
        except Exception as error:
            return self._recover(error)
        HEART.beat(f"{self.engine.num_unfinished} responses", sum(len(done.tokens) for done in ended))
        assert self._scoring is not None, "only the lead samples on its own"
        collected = self.conversations.together() if self.conversations is not None else nullcontext()
        with collected, self._scoring.together():
            is_last_of_group = [self._take(completion) for completion in ended]
        self._report_progress(is_urgent=any(is_last_of_group))
        if any(is_last_of_group) or (self.conversations is not None and int(self._num_free) > int(self._room)):
            self._pull()

    def _take(self, completion: Completion) -> bool:
        """Take what the engine has sampled. Return whether its group is sampled now."""
        batch, position, sample = map(int, completion.id.split("/")[:3])
        group = self._groups[batch, position]
        task = group.task
        group.num_preemptions += completion.num_preemptions
        if task.is_carried:
            group.num_kept_tokens += completion.num_cached_tokens if task.cache_key else 0
        if self.conversations is not None:
            goes_on = self.conversations.take(group, sample, completion)
            if (ended := group.late.pop(sample, None)) is not None:
                self._end_conversation(group, ended)
                return group.is_sampled
            if goes_on:
                return False
        else:
            group.num_cached_tokens += completion.num_cached_tokens
            response, sampling = group.responses[sample], task.sampling
            response.append(completion, task.version, sampling.max_new_tokens, sampling.length(task.prompt, sample))
            if response.is_ended:
                assert self._scoring is not None
                self._scoring.add(EndedResponse(group, sample, response.tokens.tolist(), {}))
        group.running.discard(sample)
        self._deliver_if_done(group)
        return group.is_sampled

    def _end_conversation(self, group: Group, ended: Ended) -> None:
        assert self._scoring is not None and self.conversations is not None
        group.conversations[ended.key[2]].end(ended)
        self.conversations.forget(ended.key)
        self._scoring.add_conversation(group, ended)
        self._leave(group, ended.key[2])

    def _leave(self, group: Group, sample: int) -> None:
        """Let a conversation leave the round: it has ended, or goes on in the next round."""
        group.running.discard(sample)
        self._deliver_if_done(group)
        if group.is_sampled:
            self._report_progress(is_urgent=True)
            self._pull()

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
        if self.conversations is not None:
            self.conversations.drop(lost)
        again = {(group.task.batch, group.task.position): group.again() for group in lost}
        self._groups |= again
        # A carried group without responses still waits for its owner.
        self._to_restart = [group for group in again.values() if group.carried or not group.task.is_carried]
        self._is_rebuilt = True
        self._followers.call(RebuildEngine())
        began = time.perf_counter()
        self.host.replace()
        step, reason, took_s = self._world.step, f"{type(error).__name__}: {error}", time.perf_counter() - began
        self._mail.send(self._leader, EngineRebuilt(self.engine.name, step, reason, len(lost), took_s))
        if self.host.donation is None:
            self._mail.send(self._leader, Order("publish again"))

    @property
    def _num_free(self) -> float:
        """Return the number of groups of the training for which the engine has room."""
        free = self._max_num_groups - sum(group.occupancy for group in self._being_sampled)
        return max(0.0, round(free, 9))

    def _pull(self) -> None:
        if self.host.is_lead:
            self._room, self._has_news = self._num_free, False
            pull = Pull(self._room, len(self._being_sampled), self._meter.take_times(), self._meter.take_use())
            self._mail.send(self._leader, pull)

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
            group.begin(are_conversations=self.conversations is not None)
        if self.conversations is not None:
            self.conversations.begin(groups)
        else:
            for group in groups:
                group.count_read_tokens()
            self.add_requests(make_requests(groups, self._run_seed))

    def add_requests(self, requests: list[Request]) -> None:
        """Give requests to the engine, on all of its ranks. Called on the lead."""
        self._followers.call(AddRequests(requests))
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
        assert self._scoring is not None
        task = group.task
        del self._groups[task.batch, task.position]
        rollouts = group.pack()
        message = ScoredGroup(
            task.batch,
            task.position,
            self.engine.name,
            [group.result_of(sample) for sample in range(len(group.samples))],
            group.num_preemptions,
            group.num_kept_tokens,
            group.num_read_tokens,
            group.num_cached_tokens,
            self._scoring.failures_of(group),
        )
        if self.recorder is not None and task.round:
            self.recorder.record(task, message, rollouts)
        self._mail.send(task.owner, message, payload=rollouts.to_bytes())


def make_requests(groups: Iterable[Group], run_seed: int | None) -> list[Request]:
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
                    tokens=prompt.tokens + response.tokens.tolist(),
                    sampling=sampling,
                    max_tokens=min(num_left, sampling.max_tokens_per_round or num_left),
                    seed=None if run_seed is None else sample_seed(run_seed, prompt.epoch, prompt.id, sample),
                    noise=response.noise,
                    cache_key=group.task.cache_key,
                )
            )
    return requests
