"""torchrun's agent, seen from the watchdogs of its node, and what stands last on its console."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from rl.common.processes import start_time
from rl.common.waiting import wait_until_readable
from rl.watch.told import VARIABLE as TOLD_FILE
from rl.watch.told import Level, Told, read_told, remove_told, tell

EARLY = "oneworld.early"  # file that marks a start which ended before the ranks had met
STOP_FILE = "ONEWORLD_STOP_FILE"  # set by launch/run_node.sh, which does not start torchrun again if the file exists
LAST_LINE_FILE = "ONEWORLD_LAST_LINE_FILE"  # set by launch/run_node.sh, which prints the file when torchrun has ended
WORLD_FILE = "ONEWORLD_WORLD_FILE"  # set by launch/run_node.sh: the id of the last world, and whether to tell its end
END_S = 10.0  # limit for torchrun to end after its ranks
POLL_S = 0.05


class Launcher:
    """Stop torchrun's agent, which would restart a rank that always fails. Keep our last line last on its console.

    Only one watchdog of a node does so. Also count the starts of this node that ended before the ranks had met.
    """

    def __init__(self, pid: int):
        self._pid = pid  # the agent's, or 0 without torchrun
        self._exit_fd = os.pidfd_open(pid) if pid else -1
        # FOLDER/attempt_N/LOCAL_RANK/error.json, where the agent's FOLDER lives as long as the agent
        error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        self._attempt = error_file.parents[1] if len(error_file.parents) > 3 else None
        self._restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._told_file = os.environ.get(TOLD_FILE, "")
        self._may_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        self._last_line = ""
        self._ranks = frozenset[str]()  # process ids of this attempt's ranks on this node, once they have met
        self.launched_at = launch_time(pid)  # by time.time(), before all attempts of this launch

    @property
    def is_gone(self) -> bool:
        return self._exit_fd >= 0 and bool(wait_until_readable([self._exit_fd], 0))

    @property
    def restarts_ranks(self) -> bool:
        """Whether somebody starts the ranks again after a failure that is not final."""
        return self.has_loop or (self._may_restart and not self.is_gone)

    @property
    def has_loop(self) -> bool:
        """Whether launch/run_node.sh starts torchrun again."""
        return bool(os.environ.get(STOP_FILE))

    def begin_world(self, world: str) -> None:
        """Note that the ranks have met in a world with this id."""
        self._ranks = self._read_ranks()
        _write(WORLD_FILE, world)

    def leave_message(self, world: str) -> None:
        """Let launch/run_node.sh tell the webhook, if it gives up before the ranks meet again."""
        _write(WORLD_FILE, f"{world} tell")

    def fails_to_restart(self) -> bool:
        """Wait until torchrun starts the ranks again or ends. Return whether it ends, for example because another node
        does not come back. Return False at once if the ranks have never met."""
        if not self._ranks:
            return False
        while not self.is_gone:
            if self._read_ranks() - self._ranks:
                return False
            wait_until_readable([self._exit_fd], 4 * POLL_S)
        return True

    def _read_ranks(self) -> frozenset[str]:
        """Return the process ids of torchrun's children."""
        with suppress(OSError):
            files = Path(f"/proc/{self._pid}/task").glob("*/children")
            return frozenset(pid for file in files for pid in file.read_text().split())
        return frozenset()

    def stop(self) -> None:
        """Stop torchrun, and tell the loop in launch/run_node.sh not to start it again."""
        _write(STOP_FILE, "")
        self._may_restart = False
        with suppress(ProcessLookupError):
            if self._pid:
                os.kill(self._pid, signal.SIGTERM)

    # The last line. torchrun prints a traceback when a rank fails or when it is stopped. In our .venv,
    # launch/quiet_torchrun.py leaves it out once the console says why the world ends. Elsewhere, our line is repeated.

    def begin(self) -> None:
        """Let launch/quiet_torchrun.py wait for what the ranks of this attempt say when they end."""
        self._tell(Level.NOTHING)

    def keep_last(self, line: str, is_final: bool) -> None:
        """Keep `line`, which is being printed, the last one on this node's console.

        `is_final` is False if torchrun may start the ranks again. If it cannot, its own error is not left out.
        """
        self._last_line = "" if self.is_gone else line  # nothing follows the line if torchrun has ended
        self._tell(Level.FINAL if is_final or not self._may_restart else Level.MAY_RESTART)
        _write(LAST_LINE_FILE, "" if self._told_file else line + "\n")

    def wait_until_ending(self, timeout_s: float) -> bool:
        """Wait until torchrun ends, and return whether it does. Otherwise it restarts the ranks of this node."""
        deadline = time.monotonic() + timeout_s
        while not (self.is_gone or self._is_asked):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self) -> None:
        """Remove the file of a torchrun that could not remove it, because it was killed."""
        if self._told_file and self.is_gone:
            remove_told(self._told_file)

    @property
    def _is_asked(self) -> bool:
        told = read_told(self._told_file) if self._told_file else None
        return told is not None and told.level == Level.ASKED

    def _tell(self, level: Level) -> None:
        if self._told_file:
            tell(self._told_file, Told(self._restart_count, level))

    def wait_to_repeat(self, is_end: bool) -> str:
        """Wait until torchrun has printed its traceback, and return the line to repeat. Return "" if there is none.

        `is_end` is False if torchrun may start the ranks again.
        """
        is_kept = self._told_file or LAST_LINE_FILE in os.environ
        if is_kept or not self._pid or not self._last_line or (self._may_restart and not is_end):
            return ""
        return self._last_line if wait_until_readable([self._exit_fd], END_S) else ""

    # Starts that ended before the ranks had met

    def forget_early_deaths(self) -> None:
        for mark in self._marks():
            with suppress(OSError):
                mark.unlink()

    def count_early_death(self) -> int:
        """Return how many starts in a row of this node ended early, or 0 if another rank has counted this one."""
        with suppress(OSError):
            if self._pid and self._attempt is not None:
                (self._attempt / EARLY).touch(exist_ok=False)
                return len(self._marks())
        return 0

    @property
    def has_early_death(self) -> bool:
        return self._attempt is not None and (self._attempt / EARLY).exists()

    def _marks(self) -> list[Path]:
        return list(self._attempt.parent.glob(f"attempt_*/{EARLY}")) if self._attempt is not None else []


def launch_time(agent: int) -> float:
    """Return when launch/run_node.sh or else torchrun's agent was started. Without torchrun, return the present."""
    for pid in (int(os.environ.get("ONEWORLD_LAUNCHER", 0)), agent):
        with suppress(OSError):
            if pid:
                return start_time(pid)
    return time.time()


def _write(variable: str, text: str) -> None:
    with suppress(OSError):
        if file := os.environ.get(variable):
            Path(file).write_text(text)
