"""Let the actors train on parts of a batch that the engines still sample (actor.overlap).

A forward pass is a collective of the actors, and no rank may wait for engines inside a collective. So the leader
decides when all actors train on the next part (parts.py), and which actor on which of its groups:

    engine --GroupProgress--> OverlapGate, on the leader --TrainPart--> every actor
    actor --GroupWhole------> OverlapGate

The last part is left for the stage `update`, since FSDP must know which backward pass is the last one.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rl.data.batch import Batch
from rl.data.packing import balance_owners
from rl.learner.overlap import OverlappedUpdate
from rl.rollout.balance import Balancer
from rl.rollout.orders import OrderGate
from rl.rollout.parts import Parts
from rl.rollout.service import GroupProgress
from rl.world.messages import Letter, Mailbox, Message
from rl.world.service import Service


@dataclass(frozen=True)
class GroupWhole(Message):
    """Tell the leader that a group has arrived at its owner."""

    batch: int
    position: int
    length: int  # of its longest response
    cost: float  # of training on it


@dataclass(frozen=True)
class TrainPart(Message):
    """Tell an actor to train on the next part of a batch. Owners are indices into the list of actors."""

    batch: int
    positions: list[int]
    owners: list[int]
    new_owners: list[int]
    is_early: bool  # the engines still sample other groups


class OverlapGate:
    """Let the actors train on a part when all of its groups are there. Runs on the leader, in the mailbox's I/O thread.

    `orders` sends the messages, because all actors must receive parts and orders in the same order: both are
    collectives. An actor reports its last group before it tells that it has collected the batch. So no part follows the
    end of a batch.
    """

    def __init__(self, mail: Mailbox, num_actors: int, orders: OrderGate):
        self._num_actors, self._orders = num_actors, orders
        self._lock = threading.Lock()
        self.open(0, [], 0, 1)
        mail.on(GroupProgress, self._on_progress)
        mail.on(GroupWhole, self._on_group)

    def open(self, batch: int, owners: Sequence[int], max_length: int, num_at_once: int) -> None:
        """Begin a batch to train on. For the lengths, see `Parts`."""
        with self._lock:
            self._batch, self._owners, self._costs = batch, owners, [0.0] * len(owners)
            self._parts = Parts(len(owners), self._num_actors, max_length, num_at_once)

    def _on_progress(self, letter: Letter[GroupProgress]) -> None:
        with self._lock:
            if letter.message.batch == self._batch:
                self._parts.follow(letter.message.positions, letter.message.lengths)
                self._pass_on()

    def _on_group(self, letter: Letter[GroupWhole]) -> None:
        message = letter.message
        with self._lock:
            assert message.batch == self._batch, message
            self._costs[message.position] = message.cost
            self._parts.add(message.position, message.length)
            self._pass_on()

    def _pass_on(self) -> None:
        while (positions := self._parts.take_next()) is not None:
            owners = [self._owners[position] for position in positions]
            costs = [self._costs[position] for position in positions]
            new_owners = balance_owners(costs, owners, self._num_actors, [0] * len(positions))
            self._orders.tell(TrainPart(self._batch, positions, owners, new_owners, not self._parts.is_whole))


class OverlapService(Service):
    """Take the groups of a training batch on an actor, and train on its parts when the gate says so."""

    name = "update"
    kinds = (TrainPart,)

    def __init__(self, mail: Mailbox, leader: int, balancer: Balancer, update: OverlappedUpdate, num_at_once: int):
        self.update, self.num_at_once = update, num_at_once  # see `Parts`
        self._mail, self._leader, self._balancer = mail, leader, balancer
        self._batch = 0
        self._in_parts: set[int] = set()  # positions of all actors' groups in the parts so far
        self.trained_s = 0.0  # in this batch

    def open(self, batch: int, version: int) -> None:
        """Begin a batch to train on. Groups of other batches are ignored."""
        self._batch, self._in_parts, self.trained_s = batch, set(), 0.0
        self.update.open(version)

    def add(self, batch: int, position: int, group: Batch) -> None:
        if batch != self._batch:
            return
        self.update.add(position, group)
        length = int(group.conversation_lengths.max())
        self._mail.send(self._leader, GroupWhole(batch, position, length, self._balancer.cost(group)))

    def handle(self, letter: Letter[TrainPart]) -> None:
        part, started = letter.message, time.perf_counter()
        assert part.batch == self._batch, part
        self._in_parts.update(part.positions)
        own = self.update.take(part.positions)
        groups = self._balancer.exchange(own, part.owners, part.new_owners)
        self.update.train([groups[place] for place in sorted(groups)], part.is_early)
        self.trained_s += time.perf_counter() - started

    def settle(self, owners: Sequence[int]) -> Batch:
        """Balance the last part, and return this actor's groups of all parts, without scores. This is a collective.
        `owners` are the owners of all groups of the batch."""
        left = [position for position in range(len(owners)) if position not in self._in_parts]
        own = self.update.take(left)
        groups = self._balancer.balance(own, [owners[position] for position in left], [0] * len(left))
        return self.update.add_last([groups[place] for place in sorted(groups)])
