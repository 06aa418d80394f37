"""The ledger of a rank: how long it worked in each stage, and how long it waited, by the role that it waited for.

The heartbeats (heart.py) switch between accounts. Every moment belongs to exactly one account, so the accounts add up
to the time that has passed. A switch reads the monotonic clock and adds one number. It never waits for a device.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

BUSY, WAIT = "busy/", "wait/"  # prefixes of accounts: busy/STAGE and wait/ROLE
# What a rank can wait for besides the roles of docs/placement.md.
SYNC = "sync"  # other ranks in a weight sync
NETWORK = "network"  # another rank that does not read its messages yet
DISK = "disk"  # files of checkpoints, on any node
OTHER = "other"


class Awaited(str):
    """What a rank waits for, in words, and the role that it waits for."""

    role: str

    def __new__(cls, text: str, role: str) -> "Awaited":
        awaited = super().__new__(cls, text)
        awaited.role = role
        return awaited


def role_of(awaited: str) -> str:
    """Return the role that a rank waits for, or OTHER if the text does not say."""
    return awaited.role if isinstance(awaited, Awaited) else OTHER


class RankAccount(NamedTuple):
    """What one rank did in a step."""

    busy_s: float  # the first field, so that accounts are sorted by it
    rank: int
    seconds: Mapping[str, float]  # by account


class RoleAccount:
    """What the ranks of one role did in a step."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        # By account, of all ranks that have it. Appending to a list costs less than adding to a sum.
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.shares: defaultdict[str, list[float]] = defaultdict(list)  # of a rank's time

    def mean_seconds(self) -> dict[str, float]:
        """Return the mean over the ranks, by account."""
        return {name: sum(self.seconds[name]) / len(self.ranks) for name in sorted(self.seconds)}

    def mean_waits(self) -> dict[str, float]:
        """Return the mean share of the time in which ranks wait, by what they wait for."""
        waits = sorted(name for name in self.shares if name.startswith(WAIT))
        return {name.removeprefix(WAIT): sum(self.shares[name]) / len(self.ranks) for name in waits}


class StepAccount:
    """What all ranks did in a step. Ledgers are taken apart as they arrive, in the I/O thread, so that the loop has
    little to do with them, however many ranks there are."""

    def __init__(self) -> None:
        self.ranks: list[RankAccount] = []  # in the order of arrival
        self._roles: defaultdict[str, RoleAccount] = defaultdict(RoleAccount)
        self._engines: defaultdict[str, list[Sequence[float]]] = defaultdict(list)

    @property
    def roles(self) -> dict[str, RoleAccount]:
        """The accounts by role, in the order of their first ranks. Ranks with several roles are a role of their own."""
        return dict(sorted(self._roles.items(), key=lambda item: min(item[1].ranks)))

    @property
    def engine(self) -> dict[str, list[float]]:
        """The sums over the steps of all engines. See rl/rollout/meter.py."""
        return {name: [sum(column) for column in zip(*terms)] for name, terms in sorted(self._engines.items())}

    def add(self, rank: int, roles: str, seconds: Mapping[str, float], engine: Mapping[str, Sequence[float]]) -> None:
        """Add the ledger of a rank, and the sums over its engine's steps. `roles` are joined by commas."""
        wall_s, busy_s = sum(seconds.values()), 0.0
        if wall_s > 0:  # otherwise the rank has just been started
            role = self._roles[roles.replace(",", "_")]
            role.ranks.append(rank)
            for name, value in seconds.items():
                role.seconds[name].append(value)
                role.shares[name].append(value / wall_s)
                if name.startswith(BUSY):
                    busy_s += value
        self.ranks.append(RankAccount(busy_s, rank, seconds))
        for name, terms in engine.items():
            self._engines[name].append(terms)


class Ledger:
    """The accounts of a rank. Only its main thread uses them."""

    def __init__(self, account: str, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._account, self._since = account, clock()

    def switch(self, account: str) -> None:
        """Book the time from now on to this account."""
        now = self._clock()
        self._seconds[self._account] = self._seconds.get(self._account, 0.0) + now - self._since
        self._account, self._since = account, now

    def take(self) -> dict[str, float]:
        """Return the seconds of each account since the last call."""
        self.switch(self._account)
        taken, self._seconds = self._seconds, {}
        return taken
