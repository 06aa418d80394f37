"""torchrun's agent, seen from the watchdogs of its node, and what stands last on its console."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from rl.common.waiting import wait_until_readable

EARLY = "oneworld.early"  # file that marks a start which ended before the ranks had met
STOP_FILE = "ONEWORLD_STOP_FILE"  # set by launch/run_node.sh, which does not start torchrun again if the file exists
LAST_LINE_FILE = "ONEWORLD_LAST_LINE_FILE"  # set by launch/run_node.sh, which prints the file when torchrun has ended
TOLD_FILE = "ONEWORLD_TOLD_FILE"  # set by launch/quiet_torchrun.py; empty until the console says why the world ends
END_S = 10.0  # limit for torchrun to end after its ranks


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
        self._may_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        self._last_line = ""

    @property
    def is_gone(self) -> bool:
        return self._exit_fd >= 0 and bool(wait_until_readable([self._exit_fd], 0))

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
        _write(TOLD_FILE, "")

    def keep_last(self, line: str) -> None:
        """Keep `line`, which is being printed, the last one on this node's console."""
        self._last_line = line
        is_quiet = TOLD_FILE in os.environ
        _write(TOLD_FILE, "told")
        _write(LAST_LINE_FILE, "" if is_quiet else line + "\n")

    def wait_to_repeat(self, is_end: bool) -> str:
        """Wait until torchrun has printed its traceback, and return the line to repeat. Return "" if there is none.

        `is_end` is False if torchrun may start the ranks again.
        """
        is_kept = any(name in os.environ for name in (TOLD_FILE, LAST_LINE_FILE))
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


def _write(variable: str, text: str) -> None:
    with suppress(OSError):
        if file := os.environ.get(variable):
            Path(file).write_text(text)
