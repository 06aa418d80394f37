"""Hands out the prompts of a batch. On the actor leader, in the mailbox's I/O thread, so that engines never wait for
a busy leader.

Engines pull when they have room. An engine holds at most its even share of the batch at a time, so the first to ask
does not take all, and one that is done early takes more.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl.data.prompts import Prompt
from rl.world.mail import Mail, Message


@dataclass(frozen=True)
class Sampling:
    num_samples: int
    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    answer_of: str = ""  # the reward function that tells the final answer too; empty: none


@dataclass(frozen=True)
class Task:
    """One prompt to sample a group for; the group goes to the owner, an actor rank."""

    batch: int
    position: int
    owner: int
    prompt: Prompt
    sampling: Sampling
    version: int  # of the weights to sample from

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Task":
        return Task(**{**data, "prompt": Prompt(**data["prompt"]), "sampling": Sampling(**data["sampling"])})


class Dispatcher:
    def __init__(self, mail: Mail, num_engines: int):
        self._mail, self._num_engines = mail, num_engines
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._share = 0
        self._opened = 0  # number of the newest batch
        self._parked: dict[int, dict[str, Any]] = {}  # engine lead -> its latest pull
        mail.on("pull", self._on_pull)

    def open(self, tasks: Sequence[Task], batch: int) -> None:
        with self._lock:
            self._tasks.extend(tasks)
            self._share = -(-len(tasks) // self._num_engines)
            self._opened = batch
            self._answer()

    def _on_pull(self, message: Message) -> None:
        with self._lock:
            self._parked[message.source] = message.meta
            self._answer()

    def _answer(self) -> None:
        for lead, pull in list(self._parked.items()):
            count = min(pull["room"], self._share - pull["held"], len(self._tasks))
            if count > 0:
                taken = [asdict(self._tasks.popleft()) for _ in range(count)]
                self._mail.send(lead, "work", {"tasks": taken})
            elif not self._tasks and pull["batch"] is not None and pull["batch"] <= self._opened:
                self._mail.send(lead, "drained", {"batch": pull["batch"]})
            else:
                continue
            del self._parked[lead]
