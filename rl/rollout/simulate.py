"""Estimate how long a step would take with other ranks, or with other rounds, from measured speeds and lengths.

The schedule is the real one (schedule.py). Engines, actors and weight syncs only take time. Engines pull groups when
they have room, in the order of dispatch.py. A decode step takes a fixed time, and a time for each sequence. Training
takes a time for each token, divided by the number of actors. This module has no torch and no messages.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rl.rollout.schedule import Round, Schedule, SchedulePlan
from rl.rollout.shares import mix

EPSILON = 1e-6


@dataclass(frozen=True)
class Speeds:
    """Measured seconds."""

    decode_step: float  # of a decode step, besides its sequences
    decode_sequence: float  # of each sequence in a decode step
    prefill_token: float  # of each token that an engine reads
    score: float  # of each round besides decoding and reading: its beginning, and the time to its last score
    train_token: float  # of each token, on one actor
    logprob_token: float = 0.0  # of each token, on one inference rank; 0: the actors compute logprobs
    sync: float = 0.0
    handover: float = 0.0  # both handovers of a step; only on ranks that sample and train


@dataclass(frozen=True)
class Workload:
    """What the run samples and trains on."""

    num_prompts: int  # groups per update
    groups: Sequence[Sequence[int]]  # lengths of the responses of each group; they are used in turn
    prompt_tokens: float  # mean length
    max_new_tokens: int
    max_num_groups: int  # that an engine samples at once
    informative: float = 1.0  # share of groups that dynamic sampling keeps
    overlap: float = 0.0  # share of the tokens that are trained on while others are sampled (actor.overlap)


@dataclass(frozen=True)
class Setup:
    """Who samples, scores and trains, and how far ahead."""

    num_engines: int
    num_actors: int
    num_scorers: int = 0  # inference ranks; 0: the actors compute logprobs
    limit: int = 0  # tokens per round (Q); 0: none
    ahead: int = 0  # K

    def plan(self, work: Workload) -> SchedulePlan:
        return SchedulePlan(
            work.num_prompts,
            max_rounds=-(-work.max_new_tokens // self.limit) if self.limit else 1,
            is_dynamic=work.informative < 1.0,
            max_sampling_rounds=10,
            ahead=self.ahead,
        )


@dataclass
class SimulatedTask:
    """A group in a round: tokens that it still needs, by response, and tokens that the engine reads."""

    lengths: list[int]
    num_read: float
    occupancy: float  # of a group's room in the engine


class SimulatedEngine:
    """An engine that decodes its responses together."""

    def __init__(self, speeds: Speeds):
        self._speeds = speeds
        self.now, self.room_used = 0.0, 0.0
        self.num_held = 0  # groups
        self._step = 0
        self._ends: list[tuple[int, int]] = []  # last step of a response, number of its group; a heap
        self._left: dict[int, tuple[int, float]] = {}  # by group: responses that have not ended, and its occupancy
        self._numbers = itertools.count()

    def add(self, task: SimulatedTask) -> None:
        number = next(self._numbers)
        for length in task.lengths:
            heapq.heappush(self._ends, (self._step + length, number))
        self._left[number] = (len(task.lengths), task.occupancy)
        self.num_held += 1
        self.room_used += task.occupancy
        self.now += task.num_read * self._speeds.prefill_token

    @property
    def next_end(self) -> float:
        """When the next response ends. Infinite if none is left."""
        if not self._ends:
            return float("inf")
        speeds = self._speeds
        return self.now + (self._ends[0][0] - self._step) * (
            speeds.decode_step + len(self._ends) * speeds.decode_sequence
        )

    def advance(self) -> bool:
        """Decode until the next response ends. Return whether a group has ended with it."""
        self.now, (self._step, number) = self.next_end, heapq.heappop(self._ends)
        count, occupancy = self._left[number]
        self._left[number] = (count - 1, occupancy)
        if count > 1:
            return False
        del self._left[number]
        self.num_held -= 1
        self.room_used -= occupancy
        return True


def time_round(tasks: Sequence[SimulatedTask], num_engines: int, max_num_groups: int, speeds: Speeds) -> float:
    """Return how long the engines take for the groups of a round."""
    engines, waiting = [SimulatedEngine(speeds) for _ in range(num_engines)], deque(tasks)
    share = -(-len(tasks) // num_engines)  # that an engine may hold at a time

    def fill(engine: SimulatedEngine) -> None:
        while waiting and engine.num_held < share and max_num_groups - engine.room_used > 1 - EPSILON:
            engine.add(waiting.popleft())

    for engine in engines:
        fill(engine)
    events = [(engine.next_end, index) for index, engine in enumerate(engines)]
    heapq.heapify(events)
    while events:
        end, index = heapq.heappop(events)
        if end == float("inf"):
            break
        if engines[index].advance():
            fill(engines[index])
        heapq.heappush(events, (engines[index].next_end, index))
    return max(engine.now for engine in engines)


class Simulation:
    """A run of some steps. `seconds` is the time so far."""

    def __init__(self, work: Workload, speeds: Speeds, setup: Setup):
        self.seconds = 0.0
        self._work, self._speeds, self._setup = work, speeds, setup
        self._schedule = Schedule(setup.plan(work))
        self._done: dict[int, int] = {}  # tokens so far of each carried group's longest response
        self._in_flight: tuple[Round, float] | None = None  # and when it ends
        self._num_kept = 0.0  # groups that dynamic sampling should have kept

    def step(self) -> None:
        """Sample and train once, in the order of train.py."""
        self._begin_round()
        while (batch := self._schedule.take_batch()) is None:
            self._end_round()
            self._begin_round()
        work, speeds, setup = self._work, self._speeds, self._setup
        num_tokens: float = sum(sum(self._lengths(group)) for group in batch)
        num_tokens += sum(len(self._lengths(group)) for group in batch) * work.prompt_tokens
        if setup.num_scorers:
            self.seconds += num_tokens * speeds.logprob_token / setup.num_scorers
        self.seconds += num_tokens * speeds.train_token / setup.num_actors * (1 - work.overlap)
        self._end_round()
        self.seconds += speeds.sync + speeds.handover

    def _lengths(self, group: int) -> Sequence[int]:
        return self._work.groups[group % len(self._work.groups)]

    def _begin_round(self) -> None:
        now = self._schedule.begin_round()
        if now is None:
            return
        tasks = [self._task(group) for group in now.groups]
        if self._done:
            tasks = mix(tasks, self._setup.num_engines)
        took = time_round(tasks, self._setup.num_engines, self._work.max_num_groups, self._speeds)
        self._in_flight = (now, self.seconds + took + self._speeds.score)

    def _task(self, group: int) -> SimulatedTask:
        lengths, done, limit = self._lengths(group), self._done.get(group, 0), self._setup.limit
        left = [length - done for length in lengths if length > done]
        num_read = len(left) * (self._work.prompt_tokens + done)
        return SimulatedTask([min(each, limit) if limit else each for each in left], num_read, len(left) / len(lengths))

    def _end_round(self) -> None:
        if self._in_flight is None:
            return
        (now, end), self._in_flight = self._in_flight, None
        self.seconds = max(self.seconds, end)
        finished = []
        for group in now.groups:
            self._done[group] = self._done.get(group, 0) + self._setup.limit
            if not self._setup.limit or self._done[group] >= max(self._lengths(group)):
                finished.append(group)
                del self._done[group]
        self._schedule.end_round(now, finished, self._choose(finished))

    def _choose(self, finished: Sequence[int]) -> list[int]:
        """Return the groups that dynamic sampling keeps: their measured share, evenly spread."""
        kept = []
        for group in finished:
            self._num_kept += self._work.informative
            if self._num_kept >= 1 - EPSILON:
                self._num_kept -= 1
                kept.append(group)
        return kept


def estimate_step(work: Workload, speeds: Speeds, setup: Setup, num_steps: int) -> float:
    """Return the mean seconds of a step, over so many steps after a warm-up."""
    simulation, plan = Simulation(work, speeds, setup), setup.plan(work)
    for _ in range(2 * (plan.max_rounds + plan.ahead)):
        simulation.step()
    started = simulation.seconds
    for _ in range(num_steps):
        simulation.step()
    return (simulation.seconds - started) / num_steps
