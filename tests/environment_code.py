"""Tools, environments and rollout functions that work, and some that hang, crash, leak or flood, for tests."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests import reward_attacks

OPENED = open(__file__)  # noqa: SIM115 (a file that tools may use)


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


def fault(name: str) -> Any:
    """Do what tests/reward_attacks.py calls so, or what this file does."""
    return (globals().get(name) or getattr(reward_attacks, name))()


def do_wrong(name: str) -> Any:
    """Do the same under another name."""
    return fault(name)


def returns_a_set() -> Any:
    return {1}


def returns_two_megabytes() -> str:
    return "x" * (2 << 20)


def returns_deep_lists() -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


def tells_a_secret() -> None:
    raise ValueError(f"the key is {os.environ['OPENAI_API_KEY']}")


def pid() -> int:
    """Return the id of this process."""
    return os.getpid()


def dice() -> list[float]:
    """Draw numbers."""
    return [random.random(), float(np.random.random())]


def open_files() -> list[str]:
    """Return what files of this process are open, and whether the module's own can be read."""
    OPENED.seek(0)
    assert OPENED.readline()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link).partition(":")[0] for link in links if os.path.islink(link))


class Counter:
    """Count what it gets. Its random numbers are part of the state."""

    def __init__(self, start: int = 0, folder: str = ""):
        self.total, self.random, self.folder, self.done = start, 0.0, folder, False
        self.kept: Any = None

    def reset(self, row: dict[str, Any]) -> Any:
        self.total += row.get("start", 0)
        self.random = random.random()
        return row.get("reset")

    def add(self, number: int) -> str:
        """Add to the total.

        :param number: what to add
        """
        self.total += number
        self.random += random.random()
        self.done = self.total >= 100
        return f"{self.total} {self.random}"

    def where(self) -> int:
        """Return the id of its process."""
        return os.getpid()

    def fault(self, name: str) -> Any:
        """Do something wrong."""
        return fault(name)

    def add_and_raise(self, number: int) -> None:
        """Add to the total, then fail."""
        self.total += number
        raise ValueError("no")

    def hold(self, gigabytes: float) -> str:
        """Allocate memory."""
        self.kept = [self.kept, np.zeros(int(gigabytes * (1 << 30)), dtype=np.uint8)]
        return "held"

    def start(self) -> int:
        """Start a process that lives as long as this instance."""
        self.kept = subprocess.Popen(["sleep", "1000"])
        return self.kept.pid

    def is_running(self) -> bool:
        """Return whether that process is alive."""
        return self.kept.poll() is None

    def step(self, message: str) -> tuple[Any, bool]:
        self.total += len(message)
        return None if message == "nothing" else self.total, self.total > 100

    def reward(self) -> Any:
        return {"total": self.total, "half": self.total / 2} if self.total % 2 else self.total

    def close(self) -> None:
        if self.folder:
            (Path(self.folder) / f"closed_{self.total}").touch()


class SlowReset:
    """Hang when it is rebuilt: a second process has another file to see."""

    def __init__(self, file: str):
        self.file = Path(file)

    def reset(self, row: dict[str, Any]) -> None:
        if row.get("once") and self.file.exists():
            time.sleep(1000)
        self.file.touch()

    def go(self, fault: str = "") -> str:
        """Do something."""
        return globals()["fault"](fault) if fault else "went"


async def async_nap(seconds: float) -> str:
    """Sleep without keeping others waiting."""
    await asyncio.sleep(seconds)
    return "slept"


async def num_tasks() -> int:
    """Return how many tasks the event loop has."""
    return len(asyncio.all_tasks())


async def stubborn_nap(seconds: float) -> str:
    """Sleep, and ignore cancellation."""
    for _ in range(2):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            continue
    return "slept"


async def async_fault(name: str, seconds: float = 0.05) -> Any:
    """Do something wrong in a task of its own, after a while."""
    await asyncio.sleep(seconds)
    return await asyncio.create_task(_do(name))


async def _do(name: str) -> Any:
    return fault(name)


async def block(seconds: float) -> str:
    """Keep all others waiting."""
    time.sleep(seconds)
    return "blocked"


async def exit_by_thread() -> None:
    """End the process while the event loop waits."""
    threading.Timer(0.1, os._exit, [5]).start()
    await asyncio.sleep(1000)


async def spawn(count: int) -> None:
    """Start many processes, and wait."""
    for _ in range(count):
        subprocess.Popen(["sleep", "1000"])
        await asyncio.sleep(0)
    await asyncio.sleep(1000)


def leave_loop() -> None:
    sys.exit(1)


class AsyncCounter:
    """Count, with methods of both kinds."""

    def __init__(self) -> None:
        self.total = 0

    async def reset(self, row: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        self.total = row["start"]

    async def add(self, number: int, seconds: float = 0.0) -> int:
        """Add to the total after a while."""
        await asyncio.sleep(seconds)
        self.total += number
        return self.total

    def subtract(self, number: int) -> int:
        """Subtract from the total."""
        self.total -= number
        return self.total

    async def fault(self, name: str) -> Any:
        """Do something wrong."""
        return fault(name)

    def reward(self) -> float:
        return self.total


async def rollout(task: Any, generate: Any, rounds: int = 2) -> dict[str, float]:
    """Ask for several turns at once, then for more. `row` may say what goes wrong in the middle."""
    first = await asyncio.gather(*[generate([number, task.seed], temperature=0.5) for number in (1, 1, 2)])
    ids = task.prompt
    for _ in range(rounds):
        ids = ids + (await generate(ids)).tokens
        await asyncio.sleep(task.row.get("pause", 0.0))
    if "fault" in task.row:
        fault(task.row["fault"])
    return {"score": float(sum(ids)), "first": float(sum(len(each.tokens) for each in first)), "chat": float(task.chat)}


async def moody_rollout(task: Any, generate: Any) -> float:
    """Ask for something else in every process, one by one or at once."""
    requests = [[1], [os.getpid()]]
    if task.row.get("at_once"):
        await asyncio.gather(*map(generate, requests))
    else:
        for ids in requests:
            await generate(ids)
    await asyncio.sleep(task.row.get("pause", 0.0))
    if "fault" in task.row:
        fault(task.row["fault"])
    return 1.0
