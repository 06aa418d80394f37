"""The rank's process, seen from its watchdog. The process may be frozen or gone."""

import fcntl
import os
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

from rl.common.processes import read_stat

PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # from linux/pidfd.h; since Linux 6.15
PIDFD_INFO = struct.Struct("=QQ11Ii")  # begins with what is known, ends with the exit status
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
    def exit_code(self) -> int | None:
        """Return the exit code of an ended process, or minus the signal that killed it. Return None if not known.

        The kernel shows it until the agent collects it, which may be at once. Linux 6.15 and newer show it later too.
        """
        stat = self._stat()
        status = int(stat[-1]) if stat[0] == "Z" else _collected_status(self.exit_fd)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _stat(self) -> list[str]:
        """Return the fields of /proc/PID/stat from the state on. The last one is the exit status."""
        try:
            return read_stat(self.pid) or [""]
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


def _collected_status(exit_fd: int) -> int | None:
    """Return the exit status of a process that its parent has collected, or None if the kernel does not tell."""
    with suppress(OSError):
        answer = fcntl.ioctl(exit_fd, PIDFD_GET_INFO, PIDFD_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
        known, *_, status = PIDFD_INFO.unpack(answer)
        return status if known & PIDFD_INFO_EXIT else None
    return None


def remove_segments(world: str) -> None:
    """Remove shared memory of a world's engines, which a rank leaves behind if it is killed while it builds one."""
    for segment in Path("/dev/shm").glob(f"oneworld-{world}-*") if world else ():
        with suppress(OSError):
            segment.unlink()
