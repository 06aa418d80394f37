"""The rollout stage as the loop sees it: prompts in, this actor's share of the finished groups out, in stream order.

`start` hands a batch to the engines, `gather` waits for it, `settle` evens it out. They are apart so that more than one
batch can be in flight, and a batch of several rounds is evened out once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl.data.batch import Batch
from rl.data.packing import mini_batch_of
from rl.data.prompts import Prompt
from rl.placement.roles import Placement
from rl.rewards.totals import Totals, total
from rl.rollout.balance import Balancer
from rl.rollout.dispatch import Dispatcher, Sampling, Task
from rl.rollout.orders import Orders, OrderService
from rl.rollout.service import RolloutService
from rl.world.mail import Mail

Results = list[dict[str, Any]]  # of the reward functions, by sample


class _Arrived(NamedTuple):
    """A group, as its engine sent it."""

    rollouts: Batch
    scores: Results
    num_preemptions: int


@dataclass(frozen=True)
class Gathered:
    """A batch that was sampled, as one actor has it."""

    groups: dict[int, Batch]  # this actor's, by position
    owners: list[int]  # of all groups: places among the actors
    scores: dict[int, Results]  # of this actor's groups, by position
    totals: Totals  # of all actors


class Rollouts:
    """On every actor rank; the leader alone gives prompts. `service` is this rank's own engine, if it hosts one."""

    def __init__(
        self,
        mail: Mail,
        placement: Placement,
        num_mini_batches: int,
        service: RolloutService | None,
        obey: Callable[[str], None],
        balancer: Balancer,
    ):
        self._mail, self._actors, self._service = mail, placement.actors, service
        self._num_mini_batches, self._balancer = num_mini_batches, balancer
        followers = service.followers if service is not None else ()
        self._leader, self._orders = placement.leader, OrderService(mail, followers, obey)
        self._dispatcher: Dispatcher | None = None
        self._orders_gate: Orders | None = None
        if mail.rank == placement.leader:
            self._dispatcher = Dispatcher(mail, len(placement.engines))
            followers_of_any = {rank for ranks in placement.engines for rank in ranks[1:]}
            heads = [rank for rank in placement.actors if rank not in followers_of_any]
            self._orders_gate = Orders(mail, len(placement.actors), heads)
        self.engine_name = "no engine yet"
        self._started = 0
        self._arrived: dict[int, dict[int, _Arrived]] = defaultdict(dict)  # batch -> position -> group
        self._owners: dict[int, list[int]] = {}  # batch -> position -> place among the actors of who gets the group

    def start(self, prompts: list[Prompt] | None, sampling: Sampling, version: int, is_dealt: bool = True) -> int:
        """Called by all actors in the same order; returns the number of the batch, which is sampled from this version.
        What is not dealt out to the actors goes to the leader."""
        self._started += 1
        if self._dispatcher is not None:
            assert prompts is not None, "the leader gives the prompts"
            owners = self._deal(len(prompts), is_dealt)
            tasks = [
                Task(self._started, position, self._actors[owner], prompt, sampling, version)
                for position, (owner, prompt) in enumerate(zip(owners, prompts, strict=True))
            ]
            for rank in self._actors:
                about = {"batch": self._started, "num_prompts": len(prompts), "is_dealt": is_dealt}
                self._mail.send(rank, "batch", about)
            self._dispatcher.open(tasks, self._started)
        return self._started

    def gather(self, batch: int) -> Gathered:
        """Waits until every actor has all groups of this batch that it owns; meanwhile this rank's engine, if any,
        samples."""
        if self._orders_gate is not None:
            self._orders_gate.open()
        if self._service is not None:
            self._service.serve_batch(batch, self._orders)
        me = self._actors.index(self._mail.rank)
        while batch not in self._owners or len(self._arrived[batch]) < self._owners[batch].count(me):
            message = self._mail.receive("batch", "group", "obey")
            assert message is not None
            if message.kind == "obey":
                self._orders.handle(message)
            elif message.kind == "batch":
                self._owners[message.meta["batch"]] = self._deal(message.meta["num_prompts"], message.meta["is_dealt"])
            else:
                self.engine_name = message.meta["engine"]
                rollouts, meta = Batch.from_bytes(message.payload), message.meta
                group = _Arrived(rollouts, meta["scores"], meta["num_preemptions"])
                self._arrived[meta["batch"]][meta["position"]] = group
        owners, arrived = self._owners.pop(batch), self._arrived.pop(batch, {})
        groups = {position: group.rollouts for position, group in arrived.items()}
        scores = {position: arrived[position].scores for position in sorted(arrived)}
        totals = total(score for group in scores.values() for score in group)
        totals["rollout/preemptions"] = [float(sum(group.num_preemptions for group in arrived.values())), 0.0]
        return Gathered(groups, owners, scores, self._pass_gate(batch, totals))

    def settle(self, batch: int, groups: Mapping[int, Batch], owners: Sequence[int]) -> Batch:
        """The actors even out what they hold, and put it into stream order. A collective, after `gather`."""
        groups = self._balancer.balance(batch, groups, owners, self._mini_batches(len(owners)))
        return Batch.concat([groups[position] for position in sorted(groups)])

    def _pass_gate(self, batch: int, scores: Totals) -> Totals:
        """Past here come collectives; no order may call an actor away from them. Brings this rank's sums, returns those
        of all."""
        self._mail.send(self._leader, "collected", {"batch": batch, "scores": scores})
        while True:
            message = self._mail.receive("go", "obey")
            assert message is not None
            if message.kind == "go":
                assert message.meta["batch"] == batch, (message.meta, batch)
                self._orders.pass_on(message)
                return message.meta["scores"]
            self._orders.handle(message)

    @property
    def hosts_engine(self) -> bool:
        return self._service is not None

    def release_device(self) -> None:
        """The engine of this rank gives the device's memory to its learner."""
        if self._service is not None:
            self._service.engine.sleep()

    def _mini_batches(self, num_prompts: int) -> list[int]:
        return [mini_batch_of(position, num_prompts, self._num_mini_batches) for position in range(num_prompts)]

    def _deal(self, num_prompts: int, is_dealt: bool) -> list[int]:
        """Whom engines send the groups to: each mini-batch is dealt out to all actors, so that none idles during an
        optimizer step; or all go to the leader."""
        if not is_dealt:
            return [self._actors.index(self._leader)] * num_prompts
        mini_batches = self._mini_batches(num_prompts)
        firsts = [-(-mini_batch * num_prompts // self._num_mini_batches) for mini_batch in mini_batches]
        return [(position - first) % len(self._actors) for position, first in enumerate(firsts)]
