"""Bring the ledgers of all ranks to the leader, as messages at the beginning of each weight sync.

All ranks take part in a sync, so their windows begin and end at nearly the same moment. A rank sends its ledger before
it reports that it has joined the sync. So the leader has all of them when the sync is over, and never waits for one.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rl.watch.heart import HEART
from rl.watch.ledger import StepAccount
from rl.world.messages import Letter, Mailbox, Message
from rl.world.progress import Progress


@dataclass(frozen=True)
class LedgerOfStep(Message):
    """Tell the leader what a rank did from one sync to the next one, which publishes `version`."""

    version: int
    roles: str
    seconds: dict[str, float]  # by account; see rl/watch/ledger.py
    engine: dict[str, list[float]]  # see rl/rollout/meter.py


class Accounts:
    """Send this rank's ledger, and collect those of all ranks on the leader."""

    def __init__(self, mail: Mailbox, progress: Progress):
        self._mail, self._progress = mail, progress
        self.take_engine_costs: Callable[[], dict[str, list[float]]] = dict  # the lead of an engine sets it
        self._found: dict[int, StepAccount] = {}  # by version
        self._lock = threading.Lock()
        mail.on(LedgerOfStep, self._on_ledger)  # in the I/O thread

    def close_window(self, leader: int, version: int) -> None:
        """Send what this rank did since the last call. Called when the sync of `version` begins."""
        ledger = LedgerOfStep(version, self._progress.roles, HEART.ledger.take(), self.take_engine_costs())
        self._mail.send(leader, ledger)

    def take(self, version: int) -> StepAccount:
        """Return what all ranks did in the window that ended when the sync of `version` began."""
        with self._lock:
            taken = self._found.get(version, StepAccount())
            self._found = {other: found for other, found in self._found.items() if other > version}
        return taken

    def _on_ledger(self, letter: Letter[LedgerOfStep]) -> None:
        ledger = letter.message
        with self._lock:
            window = self._found.setdefault(ledger.version, StepAccount())
            window.add(letter.source, ledger.roles, ledger.seconds, ledger.engine)
