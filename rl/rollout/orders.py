"""Where a signal's order reaches all actors at the same place in the loop: while they wait for rollouts, in their
mailboxes, and never inside a collective.

    any rank --order--> gate, on the leader --obey--> every actor        while the leader collects a batch
    every actor --collected--> gate --go--> every actor: update and sync; orders wait for the next batch

With these travel the sums of a batch (rl/rewards/totals.py), which the gate adds up.
Ranks of one engine make its calls in the same order, so its lead passes both on to the others.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from rl.rewards.totals import Totals, add
from rl.world.mail import Mail, Message
from rl.world.service import Service


class Orders:
    """On the leader, in the mailbox's I/O thread. `heads` are the actors that follow no other."""

    def __init__(self, mail: Mail, num_actors: int, heads: Sequence[int]):
        self._mail, self._num_actors, self._heads = mail, num_actors, heads
        self._lock = threading.Lock()
        self._is_open = False  # the leader collects a batch, and no actor is past it
        # Batch -> actors that have all of their groups -> sums over them.
        self._collected: dict[int, dict[int, Totals]] = defaultdict(dict)
        self._waiting: list[str] = []
        mail.on("collected", self._on_collected)
        mail.on("order", self._on_order)

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            self._pass_on()

    def _on_order(self, message: Message) -> None:
        with self._lock:
            if message.meta["order"] not in self._waiting:
                self._waiting.append(message.meta["order"])
            if self._is_open:
                self._pass_on()

    def _pass_on(self) -> None:
        for order in self._waiting:
            for rank in self._heads:
                self._mail.send(rank, "obey", {"order": order})
        self._waiting.clear()

    def _on_collected(self, message: Message) -> None:
        with self._lock:
            batch = message.meta["batch"]
            self._collected[batch][message.source] = message.meta["scores"]
            if len(self._collected[batch]) == self._num_actors:  # the leader among them, so the gate is open
                by_rank = self._collected.pop(batch)
                scores = add(by_rank[rank] for rank in sorted(by_rank))
                self._is_open = False
                for rank in self._heads:
                    self._mail.send(rank, "go", {"batch": batch, "scores": scores})


class OrderService(Service):
    """On every actor; `followers` are the other ranks of the engine that it leads."""

    name = "checkpoint"
    kinds = ("obey",)

    def __init__(self, mail: Mail, followers: Sequence[int], obey: Callable[[str], None]):
        self._mail, self._followers, self._obey = mail, followers, obey

    def handle(self, message: Message) -> None:
        self.pass_on(message)
        self._obey(message.meta["order"])

    def pass_on(self, message: Message) -> None:
        for rank in self._followers:
            self._mail.send(rank, message.kind, message.meta)
