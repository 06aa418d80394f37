"""Find and end all processes below a process, even in other sessions and process groups."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of orphans below it, so that no process leaves its tree."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, including zombies."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        if Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
            return found  # the process or one of its threads has just ended
        return [child for child, parent in _parents().items() if parent == pid]
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all processes below a process, parents before their children."""
    found = children_of(pid)
    for child in found:  # `found` grows in the loop
        found += children_of(child)
    return found


def end_tree(pid: int) -> None:
    """Kill a process and all below it. All are stopped first, so that none can make more children."""
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
    """Return the parent of every process, for kernels that do not list children."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", errors="replace") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return parents
