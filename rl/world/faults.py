"""Report this rank's errors to the other ranks, and end this rank when another one fails.

A rank that fails tells its watchdog (rl/watch). The watchdog tells the board, which runs in the watchdog of rank 0.
The board also receives reports of dead and silent ranks. It prints one report and tells every watchdog to end its rank.
A watchdog kills a rank that does not exit by itself, so a stuck collective cannot keep the world alive.

torchrun restarts workers after any failure. So the watchdog of each node's first rank stops the torchrun agent after a
fatal error (bad settings, Ctrl-C, a health rule, the same error at the same step twice). `FATAL` in the run's folder
says why.
"""

import bdb
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from rl.common.credentials import hide_credentials
from rl.common.json_channel import JsonChannel
from rl.common.notices import NOTICES
from rl.common.waiting import wait_until_readable
from rl.config.schema import ConfigError
from rl.watch.activities import RoleActivity
from rl.watch.reports import Cause, Report, ServiceUnavailable, UnhealthyRun
from rl.watch.usage import ResourceUse
from rl.world.debugger import Debugger
from rl.world.messages import Mailbox, PeerLost
from rl.world.progress import Progress

EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED = 0, 1, 130, 143
VERDICT_TIMEOUT_S = 5.0
WATCHDOG_TIMEOUT_S = 10.0  # for the watchdog to open the board's port
MAX_TEXT = 32_768  # characters of an error and of its trace
INTERRUPTS = (KeyboardInterrupt, bdb.BdbQuit)  # `q` in a debugger raises the second


class Aborted(Exception):
    """Another rank failed. The board has printed its report."""


class Stopped(Exception):
    """A signal stopped the run after everything that can be saved was saved. The message says what was saved."""


class FaultReporter:
    """Report this rank's errors to its watchdog, and end this rank when the watchdog says so."""

    def __init__(self, progress: Progress, mail: Mailbox, watchdog: JsonChannel, debugger: Debugger):
        self.has_post_mortem = False  # opens a debugger at every error of this rank, before the error is reported
        self.ignores_lost_connections = False  # turns True when this rank has done its work
        self._progress, self._mail, self._watchdog, self._debugger = progress, mail, watchdog, debugger
        self.usage = ResourceUse()  # of all ranks, on the leader
        self.activities: list[RoleActivity] = []  # of all ranks, on a leader with a live view
        self._verdict = threading.Event()  # set when the world is ending
        self.is_over = self._verdict.is_set
        self._stops_launcher = False
        self._lock = threading.Lock()

    def listen(self) -> None:
        self._mail.on_lost(self._on_lost)
        self._mail.watch(self._watchdog.connection, self._on_watchdog)

    def fail(self, error: BaseException) -> int:
        """Report an exception of this rank, wait for the verdict, and return the exit code."""
        with suppress(OSError):
            NOTICES.summarize()
        if not isinstance(error, Aborted):
            report = self._describe(error)
            if self.has_post_mortem and report.cause == "error":
                self._debugger.post_mortem(error)
            self._report(report)
        self._verdict.wait(VERDICT_TIMEOUT_S)
        if self._stops_launcher:
            time.sleep(1.0)  # for the watchdog to stop the torchrun agent, which would restart the dead worker
        if isinstance(error, Stopped):
            return EXIT_STOPPED
        return EXIT_INTERRUPTED if isinstance(error, INTERRUPTS) else EXIT_FAILED

    def fail_in_background(self, error: BaseException, stage: str, step: int) -> None:
        """Report an error of a background thread, which ends the world. The main thread runs until it is ended."""
        if not isinstance(error, Aborted):
            self._report(replace(self._describe(error), stage=stage, step=step))

    def end_world(self, cause: Cause, text: str) -> None:
        """End the world for a reason other than an exception. `cause` is one of CAUSES in rl/watch/reports.py."""
        self._report(self._progress.report(cause, text))

    def announce_interrupt(self) -> None:
        """Tell the watchdog about a Ctrl-C, which then is reported as the cause of any error that follows."""
        self.tell_watchdog("interrupting", **asdict(self._describe(KeyboardInterrupt())))

    def tell_watchdog(self, kind: str, **values: Any) -> None:
        with self._lock:
            self._watchdog.send(kind, **values)
            self._watchdog.flush_within(1.0)

    def host_board(self, address: str, key: str, size: int) -> int:
        """Let this rank's watchdog open the board. Return the board's port."""
        self.tell_watchdog("host", address=address, key=key, size=size)
        while wait_until_readable([self._watchdog.connection], WATCHDOG_TIMEOUT_S):
            for message in self._watchdog.receive():
                assert message["kind"] == "hosted", message
                return message["port"]
            if not self._watchdog.is_open:
                break
        raise RuntimeError(
            f"the watchdog of rank {self._progress.rank} has ended, or did not open a port within "
            f"{WATCHDOG_TIMEOUT_S:g} s; look for its error in the log of this rank, then start the run again"
        )

    def _describe(self, error: BaseException) -> Report:
        text, trace = str(error), ""
        cause: Cause
        if isinstance(error, INTERRUPTS):
            cause = "interrupt"
        elif isinstance(error, Stopped):
            cause = "stopped"
        elif isinstance(error, ConfigError | UnhealthyRun):
            cause = "fatal"
        elif isinstance(error, ServiceUnavailable):
            cause = "unavailable"
        else:
            cause = "connection" if _is_connection_error(error) else "error"
            text = f"{type(error).__name__}: {error}"
            trace = hide_credentials("".join(traceback.format_exception(error)))[-MAX_TEXT:]
        return self._progress.report(cause, hide_credentials(text)[:MAX_TEXT], trace, failed=True)

    def _report(self, report: Report) -> None:
        if not self._verdict.is_set():
            self.tell_watchdog("report", **asdict(report))

    def _on_watchdog(self, source: socket.socket) -> None:
        """Handle messages of the watchdog. Called in the I/O thread."""
        for message in self._watchdog.receive():
            if message["kind"] == "usage":
                self.usage.add(message["rows"])
                continue
            if message["kind"] == "activities":
                self.activities = [RoleActivity(*row) for row in message["rows"]]
                continue
            assert message["kind"] == "abort", message
            self._stops_launcher = message["stop"]
            self._verdict.set()
            self._mail.fail(Aborted("another rank failed"))
        if not self._watchdog.is_open:
            rank, roles = self._progress.rank, self._progress.roles
            with suppress(OSError):
                print(f"oneworld: rank {rank} ({roles}) ends because its watchdog has ended", file=sys.stderr)
            exit_now(EXIT_FAILED)

    def _on_lost(self, rank: int) -> None:
        """Report a lost connection. If the peer's process ended, its own watchdog reports that too."""
        if not self.ignores_lost_connections:
            self.end_world("connection", f"its connection to rank {rank} broke")


def _is_connection_error(error: BaseException) -> bool:
    """Return whether this error may be a consequence of another rank's failure."""
    if isinstance(error, PeerLost | dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    words = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def exit_now(code: int) -> None:
    """End the process without waiting for threads, collectives or destructors that may be stuck."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk may be full
            stream.flush()
    os._exit(code)
