"""Hand out the prompts of a round to the engines. Runs on the leader.

The dispatcher runs in the mailbox's I/O thread, so that engines never wait for a busy leader. Engines pull when they
have room.

By default, shares follow from measured speeds (speeds.py). At any time, an engine holds at most its share of the batch.
So the first engine to ask does not take everything, and an engine that finishes early gets more. Equal engines have
equal shares. When few groups are left, a slow engine takes none that faster ones would finish sooner.

With placement.rank_weights, each engine gets exactly the share that the user states.

With rollout.keep_kv, an engine first gets those of the carried groups whose KV cache it has (task_queue.py).

Only the choice of engines depends on time. Which groups a batch has, and their seeds, do not.
"""

import math
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl.data.prompts import Prompt, sample_seed
from rl.rollout.shares import divide, mix, share_by_speed
from rl.rollout.speeds import EngineSpeeds, StepTimes
from rl.rollout.task_queue import TaskQueue
from rl.rollout.use import EngineUse
from rl.world.messages import Letter, Mailbox, Message

MAX_IDLE = 16  # after so many batches without a group, a slow engine gets one, to see whether it is still slow


@dataclass(frozen=True)
class Sampling:
    num_samples: int
    temperature: float  # 0: greedy
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    max_tokens_per_round: int = 0  # 0: no limit
    answer_of: str = ""  # name of the reward function that also extracts the final answer; empty: none
    mean_tokens: int = 0  # if set, the length of each response is drawn; see `length`
    length_seed: int = 0  # run.seed, also if responses themselves have no seeds
    keeps_kv: bool = False  # carried responses continue with the KV cache of older weights
    room: float = 1.0  # that a group takes in an engine, compared with a group of the training

    def length(self, prompt: Prompt, sample: int) -> int:
        """Return the number of tokens at which a response ends, unless a stop token ends it before.

        Drawn lengths are lognormal with sigma 1. `mean_tokens` is their mean before they are cut at `max_new_tokens`.
        With a mean of `max_new_tokens` or more, that is the length of every response.
        """
        if not 0 < self.mean_tokens < self.max_new_tokens:
            return self.max_new_tokens
        source = random.Random(sample_seed(self.length_seed, prompt.epoch, prompt.id, sample))
        drawn = round(source.lognormvariate(math.log(self.mean_tokens) - 0.5, 1.0))
        return min(max(1, drawn), self.max_new_tokens)


@dataclass(frozen=True)
class Task:
    """A prompt for which an engine samples a group. The finished group goes to `owner`, an actor rank."""

    batch: int
    position: int
    owner: int
    prompt: Prompt
    sampling: Sampling
    version: int  # of the weights to sample from
    is_carried: bool = False  # the owner holds responses to continue
    is_followed: bool = False  # the leader wants to know how far it is; see GroupProgress
    round: int = 0  # in the phase rollout: the round of the step, under which the group is recorded; 0: it is not

    @property
    def cache_key(self) -> str:
        """What names its KV cache in all rounds; empty: it is not kept."""
        return f"{self.prompt.epoch}/{self.prompt.id}" if self.sampling.keeps_kv else ""


@dataclass(frozen=True)
class Pull(Message):
    """Ask the leader for tasks. Sent by the lead of an engine."""

    room: float  # number of groups of the training that the engine can take
    held: int  # number of groups that the engine is sampling
    step_times: StepTimes = field(default_factory=list)  # since the last pull
    use: EngineUse = EngineUse()  # since the last pull


@dataclass(frozen=True)
class NewTasks(Message):
    """Give tasks to the lead of an engine."""

    tasks: list[Task]


@dataclass(frozen=True)
class BatchTime:
    """How long the engines took for a batch, and what the slowest of them cost.

    The slowest engine is the one with the lowest measured speed. If all engines are equally fast, it is the one that
    ended last. It costs the time from the median end of the other engines to its own end. If its speed is low, it also
    costs the time that the batch would have taken less if it were as fast as the median engine.
    """

    seconds: float
    slowest: int  # lead of the engine
    cost_s: float  # 0 without other engines
    speed: float = 1.0  # of the slowest engine, relative to the median engine
    trained_s: float = 0.0  # in which the leader trained on parts of the batch, with actor.overlap


class Dispatcher:
    def __init__(self, mail: Mailbox, engines: Sequence[int], stated: Mapping[int, float] | None = None):
        """`engines` are the leads of all engines. `stated` are their shares of the work, which add up to 1."""
        self._mail, self._stated = mail, stated
        self._lock = threading.Lock()
        self._opened_at = 0.0
        self._ended_at: dict[int, float] = {}  # engine lead -> when it had sampled its tasks; infinite until then
        self._tasks = TaskQueue[Task]()
        self.measured = EngineSpeeds(engines)
        self._speeds = dict.fromkeys(engines, 1.0)
        self._shares = dict.fromkeys(engines, 0)  # of the open batch, by engine lead
        self.num_taken = dict.fromkeys(engines, 0)  # of the open batch
        self._num_idle = dict.fromkeys(engines, 0)  # batches in a row of which an engine took nothing
        self._pulls: dict[int, Pull] = {}  # engine lead -> latest pull
        self._sampling: Sampling | None = None  # of tasks that wait
        self._held = dict.fromkeys(engines, 0)
        self._fit_at_once = True  # the engines can sample all groups of the open batch at once
        self._waiting: dict[int, Pull] = {}  # engine lead -> latest pull, until it is answered
        self._uses = dict.fromkeys(engines, EngineUse())  # since they were taken
        self._caches: dict[str, int] = {}  # key of a KV cache -> engine that has it
        mail.on(Pull, self._on_pull)

    def open(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            self._opened_at, self._ended_at = time.monotonic(), {}
            if any(task.is_carried for task in tasks):
                carried = {task.cache_key for task in tasks if task.is_carried}
                self._caches = {key: lead for key, lead in self._caches.items() if key in carried}  # others have ended
                tasks = mix(tasks, len(self._shares))
            for task in tasks:
                self._tasks.add(task, self._caches.get(task.cache_key))
            self._sampling = waiting.sampling if (waiting := self._tasks.any) is not None else None
            self._speeds = self.measured.measure()
            self._shares = self._divide()
            for lead, taken in self.num_taken.items():
                self._num_idle[lead] = 0 if taken else self._num_idle[lead] + 1
            self.num_taken = dict.fromkeys(self._shares, 0)
            self._fit_at_once = len(self._tasks) <= sum(self._slots_of(lead) for lead in self._shares)
            self._answer()

    def _divide(self) -> dict[int, int]:
        """Return how many of the waiting groups are the share of each engine."""
        if self._stated is not None:
            return divide(len(self._tasks), self._stated)
        num_samples = self._sampling.num_samples if self._sampling is not None else 1
        return share_by_speed(len(self._tasks), self._speeds, self.measured.overhead / num_samples)

    def time_batch(self) -> BatchTime | None:
        """Return how long the last batch took, all of whose groups have arrived. Return None if a later one is open,
        and no engine has taken a task of it yet."""
        with self._lock:
            if not self._ended_at:
                return None
            now = time.monotonic()  # the end of an engine whose last pull has not arrived yet
            ended_at = {lead: min(ended, now) for lead, ended in self._ended_at.items()}
            speeds = self.measured.measure()
        last = max(ended_at, key=ended_at.__getitem__)
        slowest = min(speeds, key=speeds.__getitem__)
        if speeds[slowest] == 1.0:
            slowest = last
        others = [ended for lead, ended in ended_at.items() if lead != slowest]
        seconds = ended_at[last] - self._opened_at
        late_s = max(0.0, ended_at[slowest] - statistics.median(others)) if slowest in ended_at and others else 0.0
        total = sum(speeds[lead] for lead in ended_at)  # speed of the engines that took part
        missing = 1.0 - (speeds[slowest] if slowest in ended_at else 0.0)  # to the speed of the median engine
        cost_s = late_s + (seconds - late_s) * missing / (total + missing)
        return BatchTime(seconds, slowest, cost_s, speeds[slowest])

    def take_uses(self) -> dict[int, EngineUse]:
        """Return what each engine did since the last call."""
        with self._lock:
            taken, self._uses = self._uses, dict.fromkeys(self._uses, EngineUse())
        return taken

    def _on_pull(self, letter: Letter[Pull]) -> None:
        lead, pull = letter.source, letter.message
        with self._lock:
            self._waiting[lead] = pull
            self._pulls[lead], self._held[lead] = pull, pull.held
            self.measured.add(lead, pull.step_times)
            self._uses[lead] += pull.use
            if not pull.held and lead in self._ended_at:
                self._ended_at[lead] = time.monotonic()
            self._answer()

    def _answer(self) -> None:
        for lead, pull in list(self._waiting.items()) if self._tasks else ():
            count = min(self._num_free(pull), self._num_allowed(lead, pull.held), len(self._tasks))
            if count > 0:
                self._ended_at[lead] = math.inf
                self.num_taken[lead] += count
                self._held[lead] += count
                taken = self._tasks.take(lead, count)
                self._caches |= {task.cache_key: lead for task in taken if task.cache_key}
                self._mail.send(lead, NewTasks(taken))
                del self._waiting[lead]

    def _num_free(self, pull: Pull) -> int:
        """Return for how many groups of the open batch an engine has room. If it has none, it can always take one."""
        room_of_group = self._sampling.room if self._sampling is not None else 1.0
        return max(math.floor(pull.room / room_of_group + 1e-6), 0 if pull.held else 1)

    def _num_allowed(self, lead: int, num_held: int) -> int:
        """Return how many groups an engine may take now, if it has room."""
        share, num_taken = self._shares[lead], self.num_taken[lead]
        if self._stated is not None:
            return share - num_taken
        if self._num_idle[lead] >= MAX_IDLE and not num_taken:
            return max(1, share)
        # If all groups fit at once, the shares say who takes which. Otherwise faster engines may soon have room.
        num_due = share - num_taken if self._fit_at_once else 0
        return min(share - num_held, max(num_due, len(self._tasks) - self._num_reserved(lead)))

    def _num_reserved(self, lead: int) -> int:
        """Return how many of the waiting groups faster engines would finish sooner than this one.

        Let a group take d seconds at speed 1. On this engine it takes d / speed. Faster engines begin some groups at
        once, if they have free slots. They free `rate` slots in d seconds, so the n-th of the other groups begins after
        d x n / rate, and then takes d / fastest. At the start of a batch, no slot is freed before about d / 2.
        """
        speed, fastest = self._speeds[lead], max(self._speeds.values())
        if speed == fastest:
            return 0
        faster = [other for other, its_speed in self._speeds.items() if its_speed > speed]
        num_free = sum(max(0, self._slots_of(other) - self._held[other]) for other in faster)
        rate = sum(self._slots_of(other) * self._speeds[other] for other in faster)
        longer = 1 / speed - 1 / fastest  # time for a group, in d
        if not self.num_taken[lead] and longer <= 0.5:
            return num_free
        return num_free + math.ceil(rate * longer - 1e-9)

    def _slots_of(self, lead: int) -> int:
        """Return how many groups an engine samples at once in this batch."""
        share, pull = self._shares[lead], self._pulls.get(lead)
        return share if pull is None else min(share, self._num_free(pull) + pull.held)
