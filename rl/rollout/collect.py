"""The rollout stage: hand prompts to the engines, and collect this actor's share of the groups.

`start` hands prompts to the engines, and `gather` waits for their groups. One or several such rounds bring the groups
of an update, which `settle` balances between the actors. A group that is not finished returns to its owner too. In a
later round, the engine that gets its prompt fetches it from there (carried.py).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl.common.bars import BARS
from rl.data.batch import Batch
from rl.data.packing import mini_batch_of
from rl.data.prompts import Prompt
from rl.data.trajectories import Trajectory
from rl.data.trajectory_files import GroupKey
from rl.placement.roles import Placement
from rl.rewards.totals import total
from rl.rollout.archive import ArchiveDispatcher
from rl.rollout.balance import Balancer, Groups
from rl.rollout.carried import CarriedGroups
from rl.rollout.dispatch import BatchTime, Dispatcher, Sampling, Task
from rl.rollout.failures import CallsFailed, FailureLog
from rl.rollout.orders import Collected, OrderGate, OrderService
from rl.rollout.overlap import OverlapGate, OverlapService
from rl.rollout.service import RolloutService, ScoredGroup
from rl.rollout.use import EngineUse
from rl.watch.ledger import Awaited
from rl.world.messages import Letter, Message
from rl.world.orders import Action
from rl.world.service import Service, serve
from rl.world.world import World

Results = list[dict[str, Any] | None]  # results of the reward functions, by sample; None: not scored yet


@dataclass(frozen=True)
class Carried:
    """The unfinished groups that a batch continues. Their positions come before those of new prompts."""

    owners: list[int]  # of the groups of all actors; indices into the actors
    groups: Groups  # of this actor
    results: dict[int, Results] = field(default_factory=dict)  # of these groups, by position


@dataclass(frozen=True)
class BatchStarted(Message):
    """Tell an actor which actor owns each group of a batch. Owners are indices into the list of actors."""

    batch: int
    owners: list[int]


@dataclass(frozen=True)
class Gathered:
    """A sampled batch: the groups of this actor, and the owners of all groups."""

    groups: Groups
    owners: list[int]  # indices into the actors
    scores: dict[int, Results]  # of this actor's groups, by position; what this batch has scored
    num_preemptions: int  # of this actor's groups
    num_kept_tokens: int  # see ScoredGroup
    scored: frozenset[str] = frozenset()  # names of the scores of all actors' groups, such as reward/NAME/PART
    missing: frozenset[int] = frozenset()  # positions of this actor's groups that are in no file, in the phase update
    num_read_tokens: int = 0
    num_cached_tokens: int = 0


class Rollouts(Service):
    """Start and collect batches on an actor. While it waits for groups, its own engine samples, if it has one."""

    name = "rollout"
    kinds = (BatchStarted, ScoredGroup)

    def __init__(
        self,
        world: World,
        placement: Placement,
        num_mini_batches: int,
        service: RolloutService | None,
        execute: Callable[[Action], None],
        balancer: Balancer,
        all_failed: type[Exception] | None = None,  # raised if no sample can be scored; see FailureLog
        overlap: OverlapService | None = None,  # trains on groups while others are sampled
    ):
        self._world, self._mail, self._actors, self.service = world, world.mail, placement.actors, service
        self._num_mini_batches, self._balancer = num_mini_batches, balancer
        # In the phase rollout, the other ranks of the leader's engine are not actors, and execute no orders.
        followers = [rank for rank in service.host.followers if rank in placement.actors] if service is not None else []
        self._leader, self._orders = placement.leader, OrderService(world.mail, followers, execute)
        self._overlap = overlap
        others = [other for other in (service, overlap) if other is not None]
        self._services: list[Service] = [self, self._orders, *others]
        self._dispatcher: Dispatcher | ArchiveDispatcher | None = None
        self._gate: OrderGate | None = None
        self._overlap_gate: OverlapGate | None = None
        self._failures: FailureLog | None = None
        if world.rank == placement.leader:
            self._failures = FailureLog(world.mail, all_failed)
            world.at_end(self._failures.summarize)
            leads = [ranks[0] for ranks in placement.engines]
            self._dispatcher = Dispatcher(world.mail, leads, placement.engine_shares)
            followers_of_any = {rank for ranks in placement.engines for rank in ranks[1:]}
            heads = [rank for rank in placement.actors if rank not in followers_of_any]
            self._gate = OrderGate(world.mail, len(placement.actors), heads)
            if overlap is not None:
                self._overlap_gate = OverlapGate(world.mail, len(placement.actors), self._gate)
        self._awaited = ""
        self.engine_name = ""  # until the first group arrives
        self._times: list[BatchTime] = []
        self._uses: dict[int, EngineUse] = {}  # by the lead of an engine
        self._num_started = 0
        self._num_expected = 0  # samples that the last batch has started; only on the leader
        self._training: set[int] = set()  # batches to train on; the others evaluate
        self._owners: dict[int, list[int]] = {}  # by batch
        self._carried = CarriedGroups(world)
        # By batch and position. A group without a batch is missing.
        self._arrived: dict[int, dict[int, tuple[ScoredGroup, Batch | None]]] = defaultdict(dict)

    def use_archive(self, groups: Mapping[GroupKey, Trajectory], samples: Callable[[int], bool]) -> ArchiveDispatcher:
        """Take groups from files where they exist. Engines sample the numbers that `samples` accepts of the others.
        Called on the leader, before the first batch."""
        assert isinstance(self._dispatcher, Dispatcher)
        self._dispatcher = ArchiveDispatcher(self._mail, self._dispatcher, groups, samples)
        return self._dispatcher

    def start(
        self,
        prompts: list[Prompt] | None,
        sampling: Sampling,
        version: int,
        carried: Carried | None = None,
        is_dealt: bool = True,
    ) -> int:
        """Start a batch and return its number. All actors call this in the same order; only the leader has prompts.

        The groups are dealt to all actors, which train on them. If `is_dealt` is False, the leader gets all of them,
        for an evaluation. The first prompts are those of the carried groups, which keep their owners.
        """
        self._num_started += 1
        batch = self._num_started
        if is_dealt:
            self._training.add(batch)
            if self._overlap is not None:
                self._overlap.open(batch, version)
        carried = carried or Carried([], {})
        self._carried.offer(batch, carried.groups, carried.results)
        if self._dispatcher is not None:
            assert prompts is not None, "the leader must give the prompts"
            num_carried = len(carried.owners)
            num_new = len(prompts) - num_carried
            self._num_expected = num_new * sampling.num_samples
            owners = carried.owners + (self._deal(num_new) if is_dealt else [0] * num_new)  # the leader is actor 0
            overlap = self._overlap if is_dealt else None
            tasks = [
                Task(
                    batch,
                    position,
                    self._actors[owner],
                    prompt,
                    sampling,
                    version,
                    position < num_carried,
                    overlap is not None,
                )
                for position, (owner, prompt) in enumerate(zip(owners, prompts, strict=True))
            ]
            if overlap is not None:
                assert self._overlap_gate is not None
                self._overlap_gate.open(batch, owners, sampling.max_new_tokens, overlap.num_at_once)
            for rank in self._actors:
                self._mail.send(rank, BatchStarted(batch, owners))
            self._dispatcher.open(tasks)
        return batch

    def gather(self, batch: int) -> Gathered:
        """Wait until every actor has all of its groups of this batch. Meanwhile, this rank's engine samples, if any.

        No order arrives between this call and the next one, so none can interrupt the collectives in between. The
        leader raises `all_failed` if the first batch shows that the reward functions always fail.
        """
        if self._gate is not None:
            self._gate.open()
        self._awaited = Awaited(f"rank {self._leader} to start a batch", "actor")
        serve(self._world, self._services, until=lambda: batch in self._owners)
        owners = self._owners.pop(batch)
        num_own = owners.count(self._actors.index(self._mail.rank))  # not in `until`, which runs at every engine step
        self._awaited = Awaited("groups from the engines", "rollout")
        title = "rollout" if batch in self._training else "evaluation"
        with BARS.open(title, num_own, "prompts", lambda: len(self._arrived.get(batch, ()))):
            serve(self._world, self._services, until=lambda: len(self._arrived[batch]) == num_own)
        arrived = self._arrived.pop(batch)
        groups = {position: rollouts for position, (_, rollouts) in arrived.items() if rollouts is not None}
        scores = {position: arrived[position][0].scores for position in sorted(groups)}
        totals = total(score for group in scores.values() for score in group if score is not None)
        self._mail.send(self._leader, Collected(batch, totals))
        # Leave out `self`, which has all of its groups: then reports show only the actors that still wait for groups.
        serve(self._world, self._services[1:], until=lambda: batch in self._orders.totals)
        totals, is_training = self._orders.totals.pop(batch), batch in self._training
        self._training.discard(batch)
        if self._failures is not None:
            self._failures.check(totals, self._world.step, is_training, self._num_expected)
        messages = [group for group, _ in arrived.values()]
        took = self._dispatcher.time_batch() if self._dispatcher is not None and is_training else None
        if took is not None:
            trained_s = self._overlap.trained_s if self._overlap is not None else 0.0
            self._times.append(replace(took, trained_s=trained_s))
        uses = self._dispatcher.take_uses() if self._dispatcher is not None else {}
        for lead, use in uses.items() if is_training else ():
            self._uses[lead] = self._uses[lead] + use if lead in self._uses else use
        missing = frozenset(arrived.keys() - groups.keys())
        return Gathered(
            groups,
            owners,
            scores,
            num_preemptions=sum(group.num_preemptions for group in messages),
            num_kept_tokens=sum(group.num_kept_tokens for group in messages),
            num_read_tokens=sum(group.num_read_tokens for group in messages),
            num_cached_tokens=sum(group.num_cached_tokens for group in messages),
            scored=frozenset(totals),
            missing=missing,
        )

    def take_times(self) -> list[BatchTime]:
        """Return how long the engines took for each batch to train on since the last call. Only the leader knows."""
        taken, self._times = self._times, []
        return taken

    def take_uses(self) -> dict[int, EngineUse]:
        """Return what each engine did since the last call, by its lead, without evaluations. Only the leader knows."""
        taken, self._uses = self._uses, {}
        return taken

    @property
    def awaited(self) -> str:
        if self.service is not None and self.service.is_scoring:
            return self.service.awaited
        return self._awaited

    def handle(self, letter: Letter[Any]) -> None:
        match letter.message:
            case BatchStarted(batch, owners):
                self._owners[batch] = owners
            case ScoredGroup() as group:
                self.engine_name = group.engine
                if group.failures:
                    self._mail.send(self._leader, CallsFailed(group.failures))
                rollouts = Batch.from_bytes(letter.payload) if letter.payload else None
                self._arrived[group.batch][group.position] = (group, rollouts)
                if self._overlap is not None and rollouts is not None:
                    self._overlap.add(group.batch, group.position, rollouts)

    def settle(self, groups: Groups, owners: Sequence[int]) -> Batch:
        """Balance the groups of an update between actors, and return this rank's groups. This is a collective."""
        if self._overlap is not None:
            return self._overlap.settle(owners)
        balanced = self._balancer.balance(groups, owners, self._mini_batches(len(owners)))
        return Batch.concat([balanced[position] for position in sorted(balanced)])

    def _mini_batches(self, num_prompts: int) -> list[int]:
        return [mini_batch_of(position, num_prompts, self._num_mini_batches) for position in range(num_prompts)]

    def _deal(self, num_prompts: int) -> list[int]:
        """Return the owner of each group. Each mini-batch is dealt to the actors in turn, so that all train on it."""
        mini_batches = self._mini_batches(num_prompts)
        firsts = [-(-mini_batch * num_prompts // self._num_mini_batches) for mini_batch in mini_batches]
        return [(position - first) % len(self._actors) for position, first in enumerate(firsts)]
