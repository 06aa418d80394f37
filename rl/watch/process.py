"""The rank's process as its watchdog sees it from outside: it may be frozen or gone."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

CHILDREN_S = 1.0  # for children of a dead rank to end by themselves; Python's tracker then removes shared memory


class RankProcess:
    def __init__(self, pid: int, leads_group: bool):
        """`leads_group` says that torchrun started it: it and its children are a process group of their own."""
        self.pid, self.exit_fd = pid, os.pidfd_open(pid)
        self._leads_group = leads_group
        self._kill_children_at: float | None = None

    @property
    def state(self) -> str:
        """Return the kernel's letter, such as T for stopped; empty if the process is gone."""
        return self._stat()[0]

    @property
    def has_crashed(self) -> bool:
        """Whether it has ended badly, and not by the SIGTERM with which an agent ends ranks when another one failed or
        a node joined. This is visible until the agent reaps the process, which it tries ten times a second."""
        stat = self._stat()
        return stat[0] == "Z" and int(stat[-1]) not in (0, signal.SIGTERM)

    def _stat(self) -> list[str]:
        """Return the fields from the state on; the last is the exit status."""
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
        """Whether children that were terminated have not ended yet."""
        return self._kill_children_at is not None

    def tick(self) -> None:
        """Kill children that take too long to end."""
        if self._kill_children_at is not None:
            is_due = time.monotonic() >= self._kill_children_at
            if not self._signal_children(signal.SIGKILL if is_due else 0) or is_due:
                self._kill_children_at = None

    def _signal_children(self, number: int) -> bool:
        """Signal the children and return whether there are any. Signal 0 only asks."""
        try:
            if self._leads_group:
                os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return self._leads_group


def remove_segments(world: str) -> None:
    """Remove shared memory of a world's engines. A rank that is killed while it builds an engine leaves some."""
    for segment in Path("/dev/shm").glob(f"oneworld-{world}-*") if world else ():
        with suppress(OSError):
            segment.unlink()
