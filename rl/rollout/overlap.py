"""Decide when the actors train on the next part of a batch that the engines still sample (actor.overlap).

A forward pass is a collective of the actors, and no rank may wait for engines inside a collective. So the actors train
on a part only when each of them has it, or has no further groups:

    actor --PartsReady--> OverlapGate, on the leader --TrainPart--> every actor     while the leader collects a batch

The last part is left for the stage `update`, since FSDP must know which backward pass is the last one.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rl.data.batch import Batch
from rl.learner.overlap import OverlappedUpdate, Readiness
from rl.rollout.orders import OrderGate
from rl.world.messages import Letter, Mailbox, Message
from rl.world.service import Service


@dataclass(frozen=True)
class PartsReady(Message):
    """Tell the leader how many parts of a batch an actor could train on by now."""

    batch: int
    num_parts: int
    is_done: bool


@dataclass(frozen=True)
class TrainPart(Message):
    """Tell an actor to train on the next part of a batch."""

    batch: int
    number: int


class OverlapGate:
    """Let the actors train on a part when all of them have it. Runs on the leader, in the mailbox's I/O thread.

    `orders` sends the messages, because all actors must receive parts and orders in the same order: both are
    collectives. An actor reports its last parts before it tells that it has collected the batch. So no part follows the
    end of a batch.
    """

    def __init__(self, mail: Mailbox, num_actors: int, orders: OrderGate):
        self._num_actors, self._orders = num_actors, orders
        self._lock = threading.Lock()
        self._batch = 0  # the newest
        self._ready: dict[int, Readiness] = {}  # by actor
        self._num_told = 0  # parts of this batch
        mail.on(PartsReady, self._on_ready)

    def _on_ready(self, letter: Letter[PartsReady]) -> None:
        with self._lock:
            message = letter.message
            if message.batch > self._batch:
                self._batch, self._ready, self._num_told = message.batch, {}, 0
            self._ready[letter.source] = Readiness(message.num_parts, message.is_done)
            while self._can_train(self._num_told):
                self._orders.tell(TrainPart(self._batch, self._num_told))
                self._num_told += 1

    def _can_train(self, number: int) -> bool:
        """Return whether every actor is ready for this part, and some actor has another one after it."""
        actors = self._ready.values()
        if len(actors) < self._num_actors:
            return False
        is_ready = all(number < actor.num_parts or actor.is_done for actor in actors)
        return is_ready and any(number + 1 < actor.num_parts + (not actor.is_done) for actor in actors)


class OverlapService(Service):
    """Follow the groups of a training batch on an actor, and train on its parts when the gate says so."""

    name = "update"
    kinds = (TrainPart,)

    def __init__(self, mail: Mailbox, leader: int, update: OverlappedUpdate):
        self.update = update
        self._mail, self._leader = mail, leader
        self._batch = 0
        self._reported: Readiness | None = None
        self.trained_s = 0.0  # in this batch

    def open(self, batch: int, version: int) -> None:
        """Begin a batch to train on. Groups of other batches are ignored."""
        self._batch, self._reported, self.trained_s = batch, None, 0.0
        self.update.open(version)

    def expect(self, batch: int, positions: Sequence[int]) -> None:
        if batch == self._batch:
            self.update.expect(positions)
            self._report()

    def add(self, batch: int, position: int, group: Batch) -> None:
        if batch == self._batch:
            self.update.add(position, group)
            self._report()

    def handle(self, letter: Letter[TrainPart]) -> None:
        assert (letter.message.batch, letter.message.number) == (self._batch, self.update.num_trained), letter.message
        started = time.perf_counter()
        self.update.train_next()
        self.trained_s += time.perf_counter() - started

    def _report(self) -> None:
        if (now := self.update.readiness) != self._reported:
            self._reported = now
            self._mail.send(self._leader, PartsReady(self._batch, now.num_parts, now.is_done))
