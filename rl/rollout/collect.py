"""The rollout stage: hand prompts to the engines, and collect this actor's share of the finished groups.

`start` hands a batch to the engines, `gather` waits for it, and `settle` balances it. Dynamic sampling calls `start`
and `gather` several times for one batch, and `settle` once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.data.batch import Batch
from rl.data.packing import mini_batch_of
from rl.data.prompts import Prompt
from rl.placement.roles import Placement
from rl.rewards.totals import Totals, total
from rl.rollout.balance import Balancer
from rl.rollout.dispatch import Dispatcher, Sampling, Task
from rl.rollout.orders import BatchComplete, Collected, Execute, OrderGate, OrderService
from rl.rollout.service import RolloutService, ScoredGroup
from rl.world.messages import Mailbox, Message
from rl.world.orders import Action

Results = list[dict[str, Any]]  # results of the reward functions, by sample


@dataclass(frozen=True)
class BatchStarted(Message):
    """Tell an actor how many groups a batch has, so that it can compute which of them it gets."""

    batch: int
    num_prompts: int
    is_dealt: bool  # between all actors; if False, the leader gets every group

    awaited = "a batch"


@dataclass(frozen=True)
class Gathered:
    """A sampled batch: the groups of this actor, and what it knows about the others."""

    groups: dict[int, Batch]  # of this actor, by position in the batch
    owners: list[int]  # of all groups, as indices into the actors
    scores: dict[int, Results]  # of this actor's groups, by position
    totals: Totals  # over all actors


class Rollouts:
    """Start and collect batches. Runs on every actor; only the leader has prompts. `service` is this rank's own engine,
    if it hosts one."""

    def __init__(
        self,
        mail: Mailbox,
        placement: Placement,
        num_mini_batches: int,
        service: RolloutService | None,
        execute: Callable[[Action], None],
        balancer: Balancer,
    ):
        self._mail, self._actors, self.service = mail, placement.actors, service
        self._num_mini_batches, self._balancer = num_mini_batches, balancer
        followers = service.host.followers if service is not None else ()
        self._leader, self._orders = placement.leader, OrderService(mail, followers, execute)
        self._dispatcher: Dispatcher | None = None
        self._gate: OrderGate | None = None
        if mail.rank == placement.leader:
            self._dispatcher = Dispatcher(mail, len(placement.engines))
            followers_of_any = {rank for ranks in placement.engines for rank in ranks[1:]}
            heads = [rank for rank in placement.actors if rank not in followers_of_any]
            self._gate = OrderGate(mail, len(placement.actors), heads)
        self.engine_name = "no engine yet"
        self._num_started = 0
        # batch -> position -> group
        self._arrived: dict[int, dict[int, tuple[ScoredGroup, Batch]]] = defaultdict(dict)
        self._owners: dict[int, list[int]] = {}  # batch -> position -> index of the owner in the actors

    def start(self, prompts: list[Prompt] | None, sampling: Sampling, version: int, is_dealt: bool = True) -> int:
        """Start a batch that is sampled from this version of the weights. Return the number of the batch.

        All actors call this in the same order. With `is_dealt` False, the leader gets all groups.
        """
        self._num_started += 1
        batch = self._num_started
        if self._dispatcher is not None:
            assert prompts is not None, "the leader must give the prompts"
            owners = self._deal(len(prompts), is_dealt)
            tasks = [
                Task(batch, position, self._actors[owner], prompt, sampling, version)
                for position, (owner, prompt) in enumerate(zip(owners, prompts, strict=True))
            ]
            for rank in self._actors:
                self._mail.send(rank, BatchStarted(batch, len(prompts), is_dealt))
            self._dispatcher.open(tasks, batch)
        return batch

    def gather(self, batch: int) -> Gathered:
        """Wait until every actor has all of its groups of this batch. Meanwhile, this rank's engine samples, if any."""
        if self._gate is not None:
            self._gate.open()
        if self.service is not None:
            self.service.serve_batch(batch, self._orders)
        me = self._actors.index(self._mail.rank)
        while batch not in self._owners or len(self._arrived[batch]) < self._owners[batch].count(me):
            letter = self._mail.receive(BatchStarted, ScoredGroup, Execute)
            match letter.message:
                case BatchStarted() as started:
                    self._owners[started.batch] = self._deal(started.num_prompts, started.is_dealt)
                case ScoredGroup() as group:
                    self.engine_name = group.engine
                    self._arrived[group.batch][group.position] = (group, Batch.from_bytes(letter.payload))
                case Execute() as order:
                    self._orders.execute(order)
        owners, arrived = self._owners.pop(batch), self._arrived.pop(batch, {})
        groups = {position: rollouts for position, (_, rollouts) in arrived.items()}
        scores = {position: arrived[position][0].scores for position in sorted(arrived)}
        totals = total(score for group in scores.values() for score in group)
        num_preemptions = sum(group.num_preemptions for group, _ in arrived.values())
        totals["rollout/preemptions"] = [float(num_preemptions), 0.0]
        return Gathered(groups, owners, scores, self._wait_for_actors(batch, totals))

    def settle(self, batch: int, groups: Mapping[int, Batch], owners: Sequence[int]) -> Batch:
        """Balance the groups between the actors. Return this rank's in stream order. A collective, after `gather`."""
        groups = self._balancer.balance(batch, groups, owners, self._mini_batches(len(owners)))
        return Batch.concat([groups[position] for position in sorted(groups)])

    def _wait_for_actors(self, batch: int, totals: Totals) -> Totals:
        """Send this rank's totals to the leader. Wait until all actors have their groups, and return the sum of totals.

        No order arrives after that, so none can interrupt the collectives that follow.
        """
        self._mail.send(self._leader, Collected(batch, totals))
        while True:
            message = self._mail.receive(BatchComplete, Execute).message
            if isinstance(message, BatchComplete):
                assert message.batch == batch, (message, batch)
                self._orders.pass_on(message)
                return message.totals
            if isinstance(message, Execute):
                self._orders.execute(message)

    def release_device(self) -> None:
        """Free the device memory of this rank's engine, if it hosts one, for the learner."""
        if self.service is not None:
            self.service.engine.sleep()

    def _mini_batches(self, num_prompts: int) -> list[int]:
        return [mini_batch_of(position, num_prompts, self._num_mini_batches) for position in range(num_prompts)]

    def _deal(self, num_prompts: int, is_dealt: bool) -> list[int]:
        """Return the owner of each group. Each mini-batch is dealt to all actors, so that all of them train on it."""
        if not is_dealt:
            return [self._actors.index(self._leader)] * num_prompts
        mini_batches = self._mini_batches(num_prompts)
        firsts = [-(-mini_batch * num_prompts // self._num_mini_batches) for mini_batch in mini_batches]
        return [(position - first) % len(self._actors) for position, first in enumerate(firsts)]
