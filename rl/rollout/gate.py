"""Where a signal's order reaches all actors at the same place in the loop: while they wait for rollouts, in their
mailboxes, and never inside a collective.

    any rank --order--> gate, on the leader --obey--> every actor        until the gate has said go
    every actor --collected--> gate --go--> every actor: update and sync; orders wait for the next batch
"""

import threading
from collections.abc import Callable, Sequence

from rl.mail import Mail, Message
from rl.serve import Service


class Gate:
    """On the leader, in the mailbox's I/O thread."""

    def __init__(self, mail: Mail, actors: Sequence[int]):
        self._mail, self._actors = mail, actors
        self._lock = threading.Lock()
        self._batch: int | None = None  # that actors are collecting; None: they are past the gate
        self._collected = 0
        self._waiting: list[str] = []
        mail.on("collected", self._on_collected)
        mail.on("order", self._on_order)

    def open(self, batch: int) -> None:
        with self._lock:
            self._batch, self._collected = batch, 0
            self._pass_on()

    def _on_order(self, message: Message) -> None:
        with self._lock:
            if message.meta["order"] not in self._waiting:
                self._waiting.append(message.meta["order"])
            if self._batch is not None:
                self._pass_on()

    def _pass_on(self) -> None:
        for order in self._waiting:
            for rank in self._actors:
                self._mail.send(rank, "obey", {"order": order})
        self._waiting.clear()

    def _on_collected(self, message: Message) -> None:
        with self._lock:
            assert message.meta["batch"] == self._batch, (message.meta, self._batch)
            self._collected += 1
            if self._collected == len(self._actors):
                for rank in self._actors:
                    self._mail.send(rank, "go", {"batch": self._batch})
                self._batch = None


class OrderService(Service):
    """On every actor."""

    name = "checkpoint"
    kinds = ("obey",)

    def __init__(self, obey: Callable[[str], None]):
        self._obey = obey

    def handle(self, message: Message) -> None:
        self._obey(message.meta["order"])
