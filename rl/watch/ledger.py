"""The ledger of a rank: how long it worked in each stage, and how long it waited, by the role that it waited for.

The heartbeats (heart.py) switch between accounts. Every moment belongs to exactly one account, so the accounts add up
to the time that has passed. A switch reads the monotonic clock and adds one number. It never waits for a device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class RankAccount:
    """The ledger of one rank for one step. `roles` are joined by commas, as in the placement."""

    rank: int
    roles: str
    seconds: dict[str, float]
    engine: dict[str, list[float]] = field(default_factory=dict)  # see rl/rollout/meter.py

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def busy_s(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name.startswith(BUSY))

    @property
    def waits(self) -> dict[str, float]:
        """Seconds of waiting by role."""
        return {name.removeprefix(WAIT): s for name, s in self.seconds.items() if name.startswith(WAIT)}


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
