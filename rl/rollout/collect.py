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
from rl.rollout.orders import BatchComplete, Collected, OrderGate, OrderService
from rl.rollout.service import RolloutService, ScoredGroup
from rl.world.messages import Letter, Message
from rl.world.orders import Action
from rl.world.service import Service, serve
from rl.world.world import World

Results = list[dict[str, Any]]  # results of the reward functions, by sample


@dataclass(frozen=True)
class BatchStarted(Message):
    """Tell an actor the owner of each group of a batch, as an index into the actors."""

    batch: int
    owners: list[int]
    awaited = "a batch"


@dataclass(frozen=True)
class Gathered:
    """A sampled batch: the groups of this actor, and what it knows about the others."""

    groups: dict[int, Batch]  # of this actor, by position in the batch
    owners: list[int]  # of all groups, as indices into the actors
    scores: dict[int, Results]  # of this actor's groups, by position
    totals: Totals  # over all actors


class Rollouts(Service):
    """Start and collect batches. Runs on every actor; only the leader has prompts. `service` is this rank's own engine,
    if it hosts one. It samples while this rank waits for groups."""

    name = "rollout"
    kinds = (BatchStarted, ScoredGroup, BatchComplete)

    def __init__(
        self,
        world: World,
        placement: Placement,
        num_mini_batches: int,
        service: RolloutService | None,
        execute: Callable[[Action], None],
        balancer: Balancer,
    ):
        self._world, self._mail, self._actors, self.service = world, world.mail, placement.actors, service
        self._num_mini_batches, self._balancer = num_mini_batches, balancer
        followers = service.host.followers if service is not None else ()
        self._leader, self._orders = placement.leader, OrderService(world.mail, followers, execute)
        self._services = [self, self._orders] if service is None else [self, self._orders, service]
        self._dispatcher: Dispatcher | None = None
        self._gate: OrderGate | None = None
        if world.rank == placement.leader:
            self._dispatcher = Dispatcher(world.mail, len(placement.engines))
            followers_of_any = {rank for ranks in placement.engines for rank in ranks[1:]}
            heads = [rank for rank in placement.actors if rank not in followers_of_any]
            self._gate = OrderGate(world.mail, len(placement.actors), heads)
        self.engine_name = "no engine yet"
        self._num_started = 0
        # All of these are by batch.
        self._owners: dict[int, list[int]] = {}
        self._arrived: dict[int, dict[int, tuple[ScoredGroup, Batch]]] = defaultdict(dict)  # then by position
        self._totals: dict[int, Totals] = {}  # over all actors

    def start(self, prompts: list[Prompt] | None, sampling: Sampling, version: int, is_dealt: bool = True) -> int:
        """Start a batch that is sampled from this version of the weights. Return the number of the batch.

        All actors call this in the same order. With `is_dealt` False, the leader gets all groups.
        """
        self._num_started += 1
        batch = self._num_started
        if self._dispatcher is not None:
            assert prompts is not None, "the leader must give the prompts"
            leader = self._actors.index(self._leader)
            owners = self._deal(len(prompts)) if is_dealt else [leader] * len(prompts)
            tasks = [
                Task(batch, position, self._actors[owner], prompt, sampling, version)
                for position, (owner, prompt) in enumerate(zip(owners, prompts, strict=True))
            ]
            for rank in self._actors:
                self._mail.send(rank, BatchStarted(batch, owners))
            self._dispatcher.open(tasks)
        return batch

    def gather(self, batch: int) -> Gathered:
        """Wait until every actor has all of its groups of this batch. Meanwhile, this rank's engine samples, if any.

        No order arrives after that, so none can interrupt the collectives that follow.
        """
        if self._gate is not None:
            self._gate.open()
        me = self._actors.index(self._mail.rank)
        serve(
            self._world,
            self._services,
            until=lambda: batch in self._owners and len(self._arrived[batch]) == self._owners[batch].count(me),
        )
        owners, arrived = self._owners.pop(batch), self._arrived.pop(batch)
        groups = {position: rollouts for position, (_, rollouts) in arrived.items()}
        scores = {position: arrived[position][0].scores for position in sorted(arrived)}
        totals = total(score for group in scores.values() for score in group)
        num_preemptions = sum(group.num_preemptions for group, _ in arrived.values())
        totals["rollout/preemptions"] = [float(num_preemptions), 0.0]
        self._mail.send(self._leader, Collected(batch, totals))
        serve(self._world, self._services, until=lambda: batch in self._totals)
        return Gathered(groups, owners, scores, self._totals.pop(batch))

    def handle(self, letter: Letter[Any]) -> None:
        match letter.message:
            case BatchStarted(batch, owners):
                self._owners[batch] = owners
            case ScoredGroup() as group:
                self.engine_name = group.engine
                self._arrived[group.batch][group.position] = (group, Batch.from_bytes(letter.payload))
            case BatchComplete(batch, totals):
                self._orders.pass_on(letter.message)
                self._totals[batch] = totals

    def settle(self, batch: int, groups: Mapping[int, Batch], owners: Sequence[int]) -> Batch:
        """Balance the groups between the actors. Return this rank's in stream order. A collective, after `gather`."""
        groups = self._balancer.balance(batch, groups, owners, self._mini_batches(len(owners)))
        return Batch.concat([groups[position] for position in sorted(groups)])

    def _mini_batches(self, num_prompts: int) -> list[int]:
        return [mini_batch_of(position, num_prompts, self._num_mini_batches) for position in range(num_prompts)]

    def _deal(self, num_prompts: int) -> list[int]:
        """Return the owner of each group. Each mini-batch is dealt to all actors, so that all of them train on it."""
        mini_batches = self._mini_batches(num_prompts)
        firsts = [-(-mini_batch * num_prompts // self._num_mini_batches) for mini_batch in mini_batches]
        return [(position - first) % len(self._actors) for position, first in enumerate(firsts)]
