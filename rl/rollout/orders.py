"""Deliver orders to all actors at the same place in the loop: while they wait for rollouts, never in a collective.

    any rank --Order--> OrderGate, on the leader --Execute--> every actor     while the leader collects a batch
    every actor --Collected--> OrderGate --BatchComplete--> every actor       update and sync; orders wait

`Collected` and `BatchComplete` also carry the totals of a batch (rl/rewards/totals.py), which the gate adds up. All
ranks of an engine must call it in the same order. So its lead forwards `Execute` and `BatchComplete` to its followers.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.rewards.totals import Totals, add
from rl.watch.ledger import Awaited
from rl.world.messages import Letter, Mailbox, Message
from rl.world.orders import Action, Order
from rl.world.service import Service


@dataclass(frozen=True)
class Execute(Message):
    """Tell an actor to execute an order now."""

    action: Action


@dataclass(frozen=True)
class Collected(Message):
    """Tell the leader that an actor has all of its groups of a batch, and the totals over them."""

    batch: int
    totals: Totals


@dataclass(frozen=True)
class BatchComplete(Message):
    """Tell an actor that all actors have collected the batch, and the totals over all of them."""

    batch: int
    totals: Totals


class OrderGate:
    """Forward orders while the leader collects a batch. At other times, hold them back until the next batch.

    The gate runs on the leader, in the mailbox's I/O thread. `heads` are the actors that are not followers of a lead.
    """

    def __init__(self, mail: Mailbox, num_actors: int, heads: Sequence[int]):
        self._mail, self._num_actors, self._heads = mail, num_actors, heads
        self._lock = threading.Lock()
        self._is_open = False  # the leader collects a batch, and no actor has continued yet
        self._collected: dict[int, dict[int, Totals]] = defaultdict(dict)  # batch -> actor -> totals
        self._waiting: list[Action] = []
        mail.on(Collected, self._on_collected)
        mail.on(Order, self._on_order)

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            self._pass_on()

    def tell(self, message: Message) -> None:
        """Send a message to the actors. All of them receive it at the same place among the orders."""
        with self._lock:
            for rank in self._heads:
                self._mail.send(rank, message)

    def _on_order(self, letter: Letter[Order]) -> None:
        with self._lock:
            if letter.message.action not in self._waiting:
                self._waiting.append(letter.message.action)
            if self._is_open:
                self._pass_on()

    def _pass_on(self) -> None:
        for action in self._waiting:
            for rank in self._heads:
                self._mail.send(rank, Execute(action))
        self._waiting.clear()

    def _on_collected(self, letter: Letter[Collected]) -> None:
        with self._lock:
            batch = letter.message.batch
            self._collected[batch][letter.source] = letter.message.totals
            if len(self._collected[batch]) == self._num_actors:  # the leader is one of them, so the gate is open
                totals = add(part for _, part in sorted(self._collected.pop(batch).items()))
                self._is_open = False
                for rank in self._heads:
                    self._mail.send(rank, BatchComplete(batch, totals))


class OrderService(Service):
    """Execute orders on an actor. `followers` are the other ranks of the engine that this actor leads."""

    name = "checkpoint"
    kinds = (Execute, BatchComplete)

    def __init__(self, mail: Mailbox, followers: Sequence[int], execute: Callable[[Action], None]):
        self.totals: dict[int, Totals] = {}  # of complete batches
        self._mail, self._followers, self._execute = mail, followers, execute

    @property
    def awaited(self) -> str:
        return Awaited("the other actors' groups", "rollout")  # which the engines have not delivered yet

    def handle(self, letter: Letter[Any]) -> None:
        for rank in self._followers:
            self._mail.send(rank, letter.message)
        match letter.message:
            case Execute(action):
                self._execute(action)
            case BatchComplete(batch, totals):
                self.totals[batch] = totals
