"""Tell the webhook how a run ended, if that is up to this watchdog: that of rank 0 or, if the board is lost, a deputy.

The end of a world is not always that of its run. So it waits, in a thread, to see whether the ranks are started again.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from rl.common.handshake import Address, Refusals
from rl.watch.deputies import Deputy
from rl.watch.launcher import Launcher
from rl.watch.monitor import RankMonitor
from rl.watch.told import VERDICT_S
from rl.watch.webhook import Ending, Status, Webhook


class EndOfWorld(NamedTuple):
    step: int
    line: str  # why it ended
    is_final: bool = False  # no attempt follows
    is_told: bool = False  # a signal ended it


class Teller:
    def __init__(self, launcher: Launcher, monitor: RankMonitor):
        self.rewards: tuple[float, float] | None = None  # of the run so far: means of the first and of the last steps
        self._launcher, self._monitor, self._webhook = launcher, monitor, Webhook()
        self._thread: threading.Thread | None = None
        self._deputy: Deputy | None = None  # only in the watchdog of another node's first rank
        self._lost_board_at = 0.0

    @property
    def world(self) -> str:
        """An id of this start of the world."""
        return f"{self._run}-{self._monitor.world}"

    @property
    def _run(self) -> str:
        return self._monitor.folder.name if self._monitor.folder is not None else ""

    def become_deputy(self, rank: int, host: str, key: bytes, refusals: Refusals) -> Address | None:
        """Return the address of a new deputy, or None without a webhook or a port."""
        if self._webhook.is_set:
            with suppress(OSError):
                self._deputy = Deputy(rank, host, key, refusals)
                return self._deputy.address
        return None

    def meet(self, deputies: Mapping[int, Address]) -> None:
        """Take note of the addresses of all deputies, by rank."""
        if self._deputy is not None:
            self._deputy.others = dict(deputies)

    def finish(self, step: int) -> None:
        """Tell that the run has done all of its steps."""
        self._send("finished", step, "")

    def end(self, end: EndOfWorld) -> None:
        """Tell about the end of a world that the board has decided."""
        if self._webhook.is_set:
            self._start(lambda: True, end)

    def lose_board(self, end: EndOfWorld) -> None:
        """Tell about the end of a world whose board is lost, if this is the first deputy."""
        self._lost_board_at = time.monotonic()
        if self._deputy is not None:
            self._start(self._deputy.is_first, end)

    def join(self) -> None:
        """Wait until everything is told."""
        if self._thread is not None:
            self._thread.join()
        self._webhook.join()

    def stay(self) -> None:
        """Wait until the other deputies have seen that this one is alive."""
        if self._deputy is not None and self._lost_board_at:
            self._deputy.stay(self._lost_board_at)

    def _start(self, is_chosen: Callable[[], bool], end: EndOfWorld) -> None:
        def run() -> None:
            if is_chosen():
                self._tell_unless_restarted(end)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _tell_unless_restarted(self, end: EndOfWorld) -> None:
        if end.is_told:  # torchrun ends after the signal, or starts the ranks again
            if end.is_final or self._launcher.wait_until_ending(VERDICT_S):
                self._send("stopped", end.step, end.line)
        elif end.is_final or not self._launcher.restarts_ranks:
            self._send("failed", end.step, end.line)
        elif self._launcher.has_loop:
            self._launcher.leave_message(self.world)
        elif self._launcher.fails_to_restart():
            self._send("failed", end.step, end.line)

    def _send(self, status: Status, step: int, reason: str) -> None:
        first, last = self.rewards or (None, None)
        duration_s = round(time.time() - self._launcher.launched_at, 1)
        reason = reason.removeprefix("oneworld: ")
        self._webhook.start(Ending(self._run, status, step, duration_s, reason, first, last, self.world))
