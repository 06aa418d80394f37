"""The ledger of a rank: how long it worked in each stage, and how long it waited, by the role that it waited for.

The heartbeats (heart.py) switch between accounts. Every moment belongs to exactly one account, so the accounts add up
to the time that has passed. A switch reads the monotonic clock and adds one number. It never waits for a device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

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
    engine: dict[str, list[float]] = field(default_factory=dict)  # see EngineSteps

    @cached_property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @cached_property
    def busy_s(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name.startswith(BUSY))

    @cached_property
    def waits(self) -> dict[str, float]:
        """Seconds of waiting by role."""
        return {name.removeprefix(WAIT): s for name, s in self.seconds.items() if name.startswith(WAIT)}


class EngineSteps:
    """The times of an engine's steps, as sums from which a line can be fitted.

    A decode step takes a fixed time, and a time for each sequence. A step that reads prompts takes longer.
    """

    def __init__(self) -> None:
        self._decode, self._prefill = [0.0] * 5, [0.0] * 4

    def add_decode(self, num_sequences: int, seconds: float) -> None:
        terms = 1.0, num_sequences, num_sequences**2, seconds, num_sequences * seconds
        self._decode = [total + term for total, term in zip(self._decode, terms)]

    def add_prefill(self, num_sequences: int, seconds: float, num_tokens: int) -> None:
        terms = 1.0, num_sequences, seconds, num_tokens
        self._prefill = [total + term for total, term in zip(self._prefill, terms)]

    def take(self) -> dict[str, list[float]]:
        """Return the sums since the last call. `decode`: steps n, sum of sequences x, of x², of seconds t, and of xt.
        `prefill`: steps, sequences, seconds, and tokens that were read. Empty if the rank has no engine."""
        taken = {"decode": self._decode, "prefill": self._prefill}
        self._decode, self._prefill = [0.0] * 5, [0.0] * 4
        return {name: sums for name, sums in taken.items() if sums[0]}


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
