"""The rank's process, seen from its watchdog, and torchrun's agent. The process may be frozen or gone."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

EARLY = "oneworld.early"  # file that marks a start which ended before the ranks had met
CHILDREN_S = 1.0  # for children of a dead rank to exit; one of them, Python's resource tracker, removes shared memory


class RankProcess:
    """Inspect and end the process of a rank and its children."""

    def __init__(self, pid: int, leads_group: bool):
        self.pid, self.exit_fd = pid, os.pidfd_open(pid)
        self._leads_group = leads_group  # torchrun started the rank, which leads a process group with its children
        self._kill_children_at: float | None = None

    @property
    def state(self) -> str:
        """Return the kernel's letter for the state, such as T for stopped, or "" if the process is gone."""
        return self._stat()[0]

    @property
    def has_crashed(self) -> bool:
        """Return whether the process ended with an error. The agent may reap it within 0.1 s, then nothing is known."""
        stat = self._stat()
        return stat[0] == "Z" and int(stat[-1]) not in (0, signal.SIGTERM)  # SIGTERM: the agent ends ranks by it

    def _stat(self) -> list[str]:
        """Return the fields of /proc/PID/stat, beginning with the state. The last one is the exit status."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split() or [""]
        except OSError:
            return [""]

    @property
    def memory_mb(self) -> int:
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_fd, signal.SIGKILL)

    def end_children(self) -> None:
        """Terminate the children of a rank that has ended."""
        if self._signal_children(signal.SIGTERM):
            self._kill_children_at = time.monotonic() + CHILDREN_S

    @property
    def has_children_left(self) -> bool:
        return self._kill_children_at is not None

    def tick(self) -> None:
        """Kill children that take too long to end."""
        if self._kill_children_at is not None:
            is_due = time.monotonic() >= self._kill_children_at
            if not self._signal_children(signal.SIGKILL if is_due else 0) or is_due:
                self._kill_children_at = None

    def _signal_children(self, number: int) -> bool:
        """Send a signal to the children and return whether there are any. Signal 0 is not delivered."""
        try:
            if self._leads_group:
                os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return self._leads_group


def remove_segments(world: str) -> None:
    """Remove shared memory of a world's engines, which a rank leaves behind if it is killed while it builds one."""
    for segment in Path("/dev/shm").glob(f"oneworld-{world}-*") if world else ():
        with suppress(OSError):
            segment.unlink()


class Launcher:
    """Stop torchrun's agent, which would restart a rank that always fails. Count starts that ended before ranks met."""

    def __init__(self, pid: int):
        self._pid = pid  # the agent's, or 0 without torchrun
        # FOLDER/attempt_N/LOCAL_RANK/error.json, where the agent's FOLDER lives as long as the agent
        error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        self._attempt = error_file.parents[1] if len(error_file.parents) > 3 else None

    def stop(self) -> None:
        """Stop torchrun, and tell the loop in launch/run_node.sh not to start it again."""
        with suppress(OSError):
            if file := os.environ.get("ONEWORLD_STOP_FILE"):
                Path(file).touch()
        with suppress(ProcessLookupError):
            if self._pid:
                os.kill(self._pid, signal.SIGTERM)

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

    def _marks(self) -> list[Path]:
        return list(self._attempt.parent.glob(f"attempt_*/{EARLY}")) if self._attempt is not None else []
