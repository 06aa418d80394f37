"""Hand out the prompts of a round to the engines. Runs on the leader.

The dispatcher runs in the mailbox's I/O thread, so that engines never wait for a busy leader. Engines pull when they
have room. At any time, an engine holds at most an equal share of the batch. So the first engine to ask does not take
everything, and an engine that finishes early gets more.
"""

import math
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rl.data.prompts import Prompt, sample_seed
from rl.world.messages import Letter, Mailbox, Message


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


@dataclass(frozen=True)
class Pull(Message):
    """Ask the leader for tasks. Sent by the lead of an engine."""

    room: int  # number of groups that the engine can take
    held: int  # number of groups that the engine is sampling


@dataclass(frozen=True)
class NewTasks(Message):
    """Give tasks to the lead of an engine."""

    tasks: list[Task]


@dataclass(frozen=True)
class BatchTime:
    """How long the engines took for a batch, and which of them was the last to end."""

    seconds: float
    slowest: int  # lead of the engine
    cost_s: float  # from the median end of the other engines to the end of the slowest; 0 without others
    trained_s: float = 0.0  # in which the leader trained on parts of the batch, with actor.overlap


class Dispatcher:
    def __init__(self, mail: Mailbox, num_engines: int):
        self._mail, self._num_engines = mail, num_engines
        self._lock = threading.Lock()
        self._opened_at = 0.0
        self._ended_at: dict[int, float] = {}  # engine lead -> when it had sampled its tasks; infinite until then
        self._tasks: deque[Task] = deque()
        self._share = 0
        self._waiting: dict[int, Pull] = {}  # engine lead -> latest pull
        mail.on(Pull, self._on_pull)

    def open(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            self._opened_at, self._ended_at = time.monotonic(), {}
            self._tasks.extend(self._mix(tasks))
            self._share = -(-len(tasks) // self._num_engines)
            self._answer()

    def time_batch(self) -> BatchTime | None:
        """Return how long the last batch took, all of whose groups have arrived. Return None if a later one is open,
        and no engine has taken a task of it yet."""
        with self._lock:
            now = time.monotonic()  # the end of an engine whose last pull has not arrived yet
            ended_at = {lead: min(ended, now) for lead, ended in self._ended_at.items()}
        if not ended_at:
            return None
        slowest = max(ended_at, key=ended_at.__getitem__)
        last = ended_at.pop(slowest)
        cost_s = last - statistics.median(ended_at.values()) if ended_at else 0.0
        return BatchTime(last - self._opened_at, slowest, cost_s)

    def _mix(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Order the tasks so that consecutive ones have carried groups of all ages, and new ones. Otherwise one engine
        would read the longest responses again, while another only starts new ones."""
        if not any(task.is_carried for task in tasks):
            return tasks
        return [task for first in range(self._num_engines) for task in tasks[first :: self._num_engines]]

    def _on_pull(self, letter: Letter[Pull]) -> None:
        with self._lock:
            self._waiting[letter.source] = letter.message
            if not letter.message.held and letter.source in self._ended_at:
                self._ended_at[letter.source] = time.monotonic()
            self._answer()

    def _answer(self) -> None:
        for lead, pull in list(self._waiting.items()):
            count = min(pull.room, self._share - pull.held, len(self._tasks))
            if count > 0:
                self._ended_at[lead] = math.inf
                self._mail.send(lead, NewTasks([self._tasks.popleft() for _ in range(count)]))
                del self._waiting[lead]
