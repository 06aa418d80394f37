"""Load balancing between actors: some get long rollouts, and every rank of the mesh would wait for the fullest.

    costs of own groups --all_reduce--> all costs --the same rule on every rank--> new owners --mail--> moved groups

Whole groups move, so a batch holds the same rollouts with the same advantages, whichever actor trains on them.
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
    """Bring a group to its new owner; the payload is its batch."""

    batch: int
    position: int

    awaited = "moved groups"


class Balancer:
    """Runs on every actor. Owners are numbers within `actors`, the ranks of the process group in its order."""

    def __init__(self, mail: Mailbox, pg: dist.ProcessGroup, actors: Sequence[int], hidden_size: int):
        self._mail, self._pg, self._actors, self._hidden_size = mail, pg, actors, hidden_size
        self._arrived: dict[int, dict[int, Batch]] = defaultdict(dict)  # batch -> position -> group

    def balance(
        self, batch: int, groups: Mapping[int, Batch], owners: Sequence[int], mini_batches: Sequence[int]
    ) -> dict[int, Batch]:
        """Return this rank's groups after balancing, by position; `groups` are those before it.

        This is a collective: all actors call it, when no order can call one of them away. `owners` and `mini_batches`
        cover every group of the batch.
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
        """Send away the groups that others own now, then wait for those that this rank owns and does not have."""
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
