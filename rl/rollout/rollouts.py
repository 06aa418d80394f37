"""The rollout stage as the loop sees it: prompts in, this actor's share of the finished groups out, in stream order.

`start` hands a batch to the engines, `collect` waits for it. They are apart so that more than one batch can be in
flight.
"""

from collections import defaultdict
from collections.abc import Callable

from rl.data.batch import Batch
from rl.data.packing import mini_batch_of
from rl.data.prompts import Prompt
from rl.mail import Mail
from rl.placement import Placement
from rl.rewards.totals import Totals, metrics, total
from rl.rollout.dispatch import Dispatcher, Sampling, Task
from rl.rollout.evening import Evener
from rl.rollout.gate import Gate, OrderService
from rl.rollout.service import RolloutService


class Rollouts:
    """On every actor rank; the leader alone gives prompts. `service` is this rank's own engine, if it hosts one."""

    def __init__(
        self,
        mail: Mail,
        placement: Placement,
        num_mini_batches: int,
        service: RolloutService | None,
        obey: Callable[[str], None],
        evener: Evener,
    ):
        self._mail, self._actors, self._service = mail, placement.actors, service
        self._num_mini_batches, self._evener = num_mini_batches, evener
        followers = service.followers if service is not None else ()
        self._leader, self._orders = placement.leader, OrderService(mail, followers, obey)
        self._dispatcher: Dispatcher | None = None
        self._gate: Gate | None = None
        if mail.rank == placement.leader:
            self._dispatcher = Dispatcher(mail, len(placement.engines))
            followers_of_any = {rank for ranks in placement.engines for rank in ranks[1:]}
            heads = [rank for rank in placement.actors if rank not in followers_of_any]
            self._gate = Gate(mail, len(placement.actors), heads)
        self.engine_name = "no engine yet"
        self._started = 0
        self.reward_metrics: dict[str, float] = {}  # of the batch that was collected last, the same on all actors
        self._arrived: dict[int, dict[int, Batch]] = defaultdict(dict)  # batch -> position -> group
        self._scores: dict[int, dict[int, list[dict]]] = defaultdict(dict)  # batch -> position -> results by sample
        self._owners: dict[int, list[int]] = {}  # batch -> position -> place among the actors of who gets the group

    def start(self, prompts: list[Prompt] | None, sampling: Sampling, version: int) -> int:
        """Called by all actors in the same order; returns the number of the batch, which is sampled from this
        version."""
        self._started += 1
        if self._dispatcher is not None:
            assert prompts is not None, "the leader gives the prompts"
            owners = self._deal(len(prompts))
            tasks = [
                Task(self._started, position, self._actors[owner], prompt, sampling, version)
                for position, (owner, prompt) in enumerate(zip(owners, prompts, strict=True))
            ]
            for rank in self._actors:
                self._mail.send(rank, "batch", {"batch": self._started, "num_prompts": len(prompts)})
            self._dispatcher.open(tasks, self._started)
        return self._started

    def collect(self, batch: int) -> Batch:
        """Waits until every actor has all groups of this batch that it owns; meanwhile this rank's engine, if any,
        samples. Then the actors even out what they hold."""
        if self._gate is not None:
            self._gate.open()
        if self._service is not None:
            self._service.serve_batch(batch, self._orders)
        me = self._actors.index(self._mail.rank)
        while batch not in self._owners or len(self._arrived[batch]) < self._owners[batch].count(me):
            message = self._mail.receive("batch", "group", "obey")
            assert message is not None
            if message.kind == "obey":
                self._orders.handle(message)
            elif message.kind == "batch":
                self._owners[message.meta["batch"]] = self._deal(message.meta["num_prompts"])
            else:
                self.engine_name = message.meta["engine"]
                self._arrived[message.meta["batch"]][message.meta["position"]] = Batch.from_bytes(message.payload)
                self._scores[message.meta["batch"]][message.meta["position"]] = message.meta["scores"]
        owners, groups, scores = self._owners.pop(batch), self._arrived.pop(batch, {}), self._scores.pop(batch, {})
        self._pass_gate(batch, total(score for position in sorted(scores) for score in scores[position]))
        groups = self._evener.even_out(batch, groups, owners, self._mini_batches(len(owners)))
        return Batch.concat([groups[position] for position in sorted(groups)])

    def _pass_gate(self, batch: int, scores: Totals) -> None:
        """Past here come collectives; no order may call an actor away from them."""
        self._mail.send(self._leader, "collected", {"batch": batch, "scores": scores})
        while True:
            message = self._mail.receive("go", "obey")
            assert message is not None
            if message.kind == "go":
                assert message.meta["batch"] == batch, (message.meta, batch)
                self._orders.pass_on(message)
                self.reward_metrics = metrics(message.meta["scores"])
                return
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

    def _deal(self, num_prompts: int) -> list[int]:
        """Whom engines send the groups to: each mini-batch is dealt out to all actors, so that none idles during an
        optimizer step."""
        mini_batches = self._mini_batches(num_prompts)
        firsts = [-(-mini_batch * num_prompts // self._num_mini_batches) for mini_batch in mini_batches]
        return [(position - first) % len(self._actors) for position, first in enumerate(firsts)]
