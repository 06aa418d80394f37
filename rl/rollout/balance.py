"""Balance groups between actors, since all actors wait for the one with the most work."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl.data.batch import Batch
from rl.data.packing import balance_owners, units_of
from rl.watch.heart import HEART
from rl.watch.ledger import Awaited
from rl.world.messages import Mailbox, Message

Groups = dict[int, Batch]  # the groups of one actor, by position in the batch


@dataclass(frozen=True)
class MovedGroup(Message):
    """Deliver a group to its new owner. The payload is the group as a Batch."""

    exchange: int
    position: int
    awaited = Awaited("groups from the other actors", "actor")


class Balancer:
    """Move groups between actors. All of them call its methods in the same order.

    Only whole groups move, so the advantages do not depend on which actor trains on a group. `actors` are the ranks of
    `pg`, and an owner is an index into them.
    """

    def __init__(self, mail: Mailbox, pg: dist.ProcessGroup, actors: Sequence[int], hidden_size: int):
        self._mail, self._pg, self._actors, self._hidden_size = mail, pg, actors, hidden_size
        self._num_exchanges = 0
        self._arrived: dict[int, Groups] = defaultdict(dict)  # by exchange

    def cost(self, group: Batch) -> float:
        """Return an estimate of the work to train on a group."""
        return sum(unit.cost for unit in units_of(group, math.inf, self._hidden_size))

    def balance(self, groups: Groups, owners: Sequence[int], mini_batches: Sequence[int]) -> Groups:
        """Move groups between the actors, and return this rank's groups by position.

        This is a collective, and no order may interrupt it. `owners` and `mini_batches` cover all groups of the batch.
        """
        if len(self._actors) == 1 or not owners:
            return groups
        costs = torch.zeros(len(owners), dtype=torch.float64)
        for position, group in groups.items():
            costs[position] = self.cost(group)
        with HEART.in_collective("actor"):
            dist.all_reduce(costs, group=self._pg)  # only the owner of a group adds a cost, so the sum is exact
        new_owners = balance_owners(costs.tolist(), owners, len(self._actors), mini_batches)
        return self.exchange(groups, owners, new_owners)

    def exchange(self, groups: Groups, owners: Sequence[int], new_owners: Sequence[int]) -> Groups:
        """Send groups to their new owners, then wait for the groups that this rank now owns."""
        self._num_exchanges += 1
        number, me = self._num_exchanges, self._actors.index(self._mail.rank)
        kept = dict(groups)
        for position in sorted(groups):
            if new_owners[position] != me:
                new_owner = self._actors[new_owners[position]]
                self._mail.send(new_owner, MovedGroup(number, position), payload=kept.pop(position).to_bytes())
        num_moved = sum(old != me == new for old, new in zip(owners, new_owners, strict=True))
        while len(self._arrived[number]) < num_moved:
            letter = self._mail.receive(MovedGroup)
            self._arrived[letter.message.exchange][letter.message.position] = Batch.from_bytes(letter.payload)
        return kept | self._arrived.pop(number)
