"""Take the lease on the run folder for all nodes, before anything is written there.

A disk may be private to a node or shared by several nodes, and no setting says which. So the first rank of every node
takes the lease on its own disk, or shares the one that another node of its world has taken there.

    every rank --NodeFolder--> rank 0 --LeaseOrder--> first rank of each node --LeaseAnswer--> rank 0

All nodes watch their disks at the same time. Then they take their leases one after the other, in an order that does not
depend on the ranks. So if two launches start on the same private disks, one of them wins. They do not both fail.
rl/watch/lease.py reads and writes the files. The watchdogs renew the lease, and release it at the end.
"""

import errno
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rl.config.schema import ConfigError
from rl.watch.lease import Lease, LeaseContender, LeaseOwner, LeaseRefused, ProcessIdentity, this_machine
from rl.world.messages import Message, waiting
from rl.world.restarts import launcher_process
from rl.world.world import HUB, World

# Errors that a restart does not fix. After others, such as a full disk, the next attempt may succeed.
PERMANENT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG)
LeaseAction = Literal["wait", "take", "renew", "observe"]


@dataclass(frozen=True)
class NodeFolder(Message):
    """Tell rank 0 where a rank runs. The launcher is the process that lives through all attempts."""

    local_rank: int
    folder: str
    launcher: ProcessIdentity
    awaited = "the other ranks to name their folders"


@dataclass(frozen=True)
class LeaseOrder(Message):
    """Tell the first rank of a node what to do: wait until the lease is free, take it, renew it, or only check it."""

    action: LeaseAction
    owner: LeaseOwner
    awaited = "the lease on the run folder"


@dataclass(frozen=True)
class LeaseAnswer(Message):
    """Tell rank 0 that an order was executed, or why the lease was refused."""

    refusal: str = ""
    token: str = ""  # of the lease that was taken; nodes that share a disk have the same
    is_creator: bool = False
    awaited = "the lease on the run folder of every node"


def take_lease(world: World, folder: Path) -> Lease | None:
    """Take the lease on the run folder on all nodes. Return this node's lease on its first rank, None on the others.

    Raise ConfigError on rank 0 if another launch works in the folder on any node. By then, only leases were written.
    """
    launcher = ProcessIdentity.of(launcher_process().pid)
    world.mail.send(HUB, NodeFolder(world.local_rank, str(folder.absolute()), launcher))
    node = NodeLease(world, folder)
    if world.rank == HUB:
        _lead(world, node)
    elif world.local_rank == 0:
        action = ""
        while action not in ("renew", "observe"):
            order = world.mail.receive(LeaseOrder).message
            world.mail.send(HUB, node.execute(order))
            action = order.action
    world.meet("lease taken")  # raises on all other ranks if rank 0 was refused
    return node.lease


class NodeLease:
    """Execute orders of rank 0 on the disk of this node."""

    def __init__(self, world: World, folder: Path):
        self.lease: Lease | None = None
        self._world, self._folder = world, folder
        self._contender: LeaseContender | None = None
        self._is_creator = False

    def execute(self, order: LeaseOrder) -> LeaseAnswer:
        try:
            with waiting(f"the lease on {self._folder}"):
                self._execute(order)
        except LeaseRefused as refusal:
            return LeaseAnswer(str(refusal))
        except OSError as error:
            if error.errno in PERMANENT:
                path, host = self._folder, socket.gethostname()
                return LeaseAnswer(f"run.dir: cannot make {path} on {host}: {error}; give a folder that can be written")
            raise
        return LeaseAnswer("", self.lease.token if self.lease is not None else "", self._is_creator)

    def _execute(self, order: LeaseOrder) -> None:
        if self._contender is None:
            say = print if self._world.rank == HUB else lambda text: None
            self._contender = LeaseContender(self._folder, order.owner, this_machine(), say)
        if order.action == "wait":
            self._contender.wait_until_free(self._world.mail.check)
            return
        if order.action == "take":
            self.lease, self._is_creator = self._contender.take(self._world.mail.check)
        assert self.lease is not None
        renews = self._is_creator if order.action == "take" else order.action == "renew"
        place = {"folder": str(self._folder), "number": self.lease.number, "token": self.lease.token}
        self._world.faults.tell_watchdog("lease", owner=asdict(order.owner), renews=renews, **place)


def _lead(world: World, own: NodeLease) -> None:
    """Let all nodes take the lease, one after the other. Called on rank 0."""
    letters = [world.mail.receive(NodeFolder) for _ in range(world.size)]
    nodes = {letter.source: letter.message for letter in letters if letter.message.local_rank == 0}
    launchers = {rank: nodes[rank].launcher for rank in sorted(nodes)}
    order = sorted(launchers, key=lambda rank: (launchers[rank].host, launchers[rank].machine, nodes[rank].folder))
    owner = LeaseOwner.of(world.id, [*launchers.values()], os.environ)

    def execute(action: LeaseAction, *ranks: int) -> dict[int, LeaseAnswer]:
        for rank in ranks:
            if rank != HUB:
                world.mail.send(rank, LeaseOrder(action, owner))
        answers = {HUB: own.execute(LeaseOrder(action, owner))} if HUB in ranks else {}
        while len(answers) < len(ranks):
            letter = world.mail.receive(LeaseAnswer)
            answers[letter.source] = letter.message
        for rank in order:
            if rank in answers and answers[rank].refusal:
                raise ConfigError(answers[rank].refusal)
        return answers

    execute("wait", *order)
    taken = {rank: execute("take", rank)[rank] for rank in order}
    # Rank 0 renews the lease for all nodes that share its disk, because its watchdog is the last to end.
    for rank in order:
        shares_disk = taken[rank].token == taken[HUB].token
        execute("renew" if rank == HUB or (taken[rank].is_creator and not shares_disk) else "observe", rank)
