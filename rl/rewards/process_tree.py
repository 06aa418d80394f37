"""Find and end all processes below a process, even in other sessions and process groups."""

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

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
        with suppress(psutil.NoSuchProcess):  # this kernel does not list children
            found = [child.pid for child in psutil.Process(pid).children()]
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
        _signal(new, signal.SIGSTOP)
        stopped.update(new)
        new = [process for process in descendants_of(pid) if process not in stopped]
    _signal(stopped, signal.SIGKILL)


def name_signal(number: int) -> str:
    names = {int(known): known.name for known in signal.Signals}  # most real-time signals have no name
    return names.get(number, f"signal {number}")


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
