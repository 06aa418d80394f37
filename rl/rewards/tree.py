"""The processes below a process, and their end, whatever sessions and groups they have put themselves into."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """What loses its parent below this process becomes its child, so nothing leaves the tree."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The dead that nobody has waited for among them."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
            return found  # the process, or one of its threads, has ended meanwhile
        return [child for child, parent in _parents().items() if parent == pid]
    return found


def descendants_of(pid: int) -> list[int]:
    """Parents before their children."""
    found = children_of(pid)
    for child in found:  # grows meanwhile
        found += children_of(child)
    return found


def end_tree(pid: int) -> None:
    """Stops all before it kills any: what is stopped makes no more children."""
    stopped: set[int] = set()
    new = [pid]
    while new:
        for process in new:
            _signal(process, signal.SIGSTOP)
        stopped.update(new)
        new = [process for process in descendants_of(pid) if process not in stopped]
    for process in stopped:
        _signal(process, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _parents() -> dict[int, int]:
    """By process, for kernels that do not list children."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", errors="replace") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return parents
