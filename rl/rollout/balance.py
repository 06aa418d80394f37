"""Load balancing between actors. Without it, all of them would wait for the one with the longest rollouts.

    costs of own groups --all_reduce--> all costs --the same rule on every rank--> new owners --mail--> moved groups

Only whole groups move, so the advantages do not depend on which actor trains on a group.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl.data.batch import Batch
from rl.data.packing import balance_owners, estimate_costs
from rl.world.messages import Mailbox, Message


@dataclass(frozen=True)
class MovedGroup(Message):
    """Deliver a group to its new owner. The payload is the group as a Batch."""

    batch: int
    position: int
    awaited = "moved groups"


class Balancer:
    """Balance groups between actors. Runs on every actor. An owner is an index into `actors`, the ranks of `pg`."""

    def __init__(self, mail: Mailbox, pg: dist.ProcessGroup, actors: Sequence[int], hidden_size: int):
        self._mail, self._pg, self._actors, self._hidden_size = mail, pg, actors, hidden_size
        self._arrived: dict[int, dict[int, Batch]] = defaultdict(dict)  # batch -> position -> group

    def balance(
        self, batch: int, groups: Mapping[int, Batch], owners: Sequence[int], mini_batches: Sequence[int]
    ) -> dict[int, Batch]:
        """Move groups between the actors, and return this rank's groups by position. `groups` are its current ones.

        This is a collective: all actors must call it, at a time when no order can interrupt them. `owners` and
        `mini_batches` have one entry for each group of the whole batch.
        """
        if len(self._actors) == 1 or not owners:
            return dict(groups)
        costs = torch.zeros(len(owners), dtype=torch.float64)
        for position, group in groups.items():
            costs[position] = sum(estimate_costs(group.lengths.tolist(), self._hidden_size))
        dist.all_reduce(costs, group=self._pg)  # each cost is added to zeros, so all ranks get the same bits
        new_owners = balance_owners(costs.tolist(), owners, len(self._actors), mini_batches)
        return self.exchange(batch, groups, owners, new_owners)

    def exchange(
        self, batch: int, groups: Mapping[int, Batch], owners: Sequence[int], new_owners: Sequence[int]
    ) -> dict[int, Batch]:
        """Send groups to their new owners, then wait for the groups that this rank now owns."""
        me = self._actors.index(self._mail.rank)
        kept = dict(groups)
        for position in sorted(groups):
            if new_owners[position] != me:
                new_owner = self._actors[new_owners[position]]
                self._mail.send(new_owner, MovedGroup(batch, position), payload=kept.pop(position).to_bytes())
        num_moved = sum(old != me == new for old, new in zip(owners, new_owners, strict=True))
        while len(self._arrived[batch]) < num_moved:
            letter = self._mail.receive(MovedGroup)
            self._arrived[letter.message.batch][letter.message.position] = Batch.from_bytes(letter.payload)
        return kept | self._arrived.pop(batch)
