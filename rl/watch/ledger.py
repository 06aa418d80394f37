"""The ledger of a rank: how long it worked in each stage, and how long it waited, by the role that it waited for.

The heartbeats (heart.py) switch between accounts. Every moment belongs to exactly one account, so the accounts add up
to the time that has passed. A switch reads the monotonic clock and adds one number. It never waits for a device.
"""

import sys
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
    """What the ranks of one role did in a step: sums over these ranks, by account."""

    def __init__(self) -> None:
        self.num_ranks = 0
        self.first_rank = sys.maxsize
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.shares: defaultdict[str, float] = defaultdict(float)  # of each rank's time

    def mean_seconds(self) -> dict[str, float]:
        return {name: self.seconds[name] / self.num_ranks for name in sorted(self.seconds)}

    def mean_waits(self) -> dict[str, float]:
        """Return the shares of the time in which ranks wait, by what they wait for."""
        waits = sorted(name for name in self.shares if name.startswith(WAIT))
        return {name.removeprefix(WAIT): self.shares[name] / self.num_ranks for name in waits}


class StepAccount:
    """What all ranks did in a step. The sums are formed as ledgers arrive, in the I/O thread, so that the loop has
    little to do with them, however many ranks there are."""

    def __init__(self) -> None:
        self.ranks: list[RankAccount] = []  # in the order of arrival
        self.engine: dict[str, list[float]] = {}  # sums over the steps of all engines; see rl/rollout/meter.py
        self._roles: defaultdict[str, RoleAccount] = defaultdict(RoleAccount)

    @property
    def roles(self) -> dict[str, RoleAccount]:
        """The sums by role, in the order of their first ranks. Ranks with several roles are a role of their own."""
        return dict(sorted(self._roles.items(), key=lambda item: item[1].first_rank))

    def add(self, rank: int, roles: str, seconds: Mapping[str, float], engine: Mapping[str, Sequence[float]]) -> None:
        """Add the ledger of a rank, and the sums over its engine's steps. `roles` are joined by commas."""
        wall_s, busy_s = sum(seconds.values()), 0.0
        if wall_s > 0:  # otherwise the rank has just been started
            role = self._roles[roles.replace(",", "_")]
            role.num_ranks, role.first_rank = role.num_ranks + 1, min(rank, role.first_rank)
            sums, shares = role.seconds, role.shares
            for name, value in seconds.items():
                sums[name] += value
                shares[name] += value / wall_s
                if name.startswith(BUSY):
                    busy_s += value
        self.ranks.append(RankAccount(busy_s, rank, seconds))
        for name, terms in engine.items():
            before = self.engine.get(name, [0.0] * len(terms))
            self.engine[name] = [total + term for total, term in zip(before, terms, strict=True)]


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
