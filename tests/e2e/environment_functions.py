"""Tools, environments and a rollout function of the tests, as a user would write them.

The model of tests/environment_runs.py writes calls with single tokens, so the fake engine calls tools too.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any


def checksum(*parts: Any) -> int:
    return zlib.crc32("/".join(map(str, parts)).encode())


def pause(longest_s: float) -> float:
    """Return a time that differs in every call and every run."""
    return random.SystemRandom().random() * longest_s


class Tally:
    """A game with a checksum of all that it was told. It is in every observation and in the reward."""

    def __init__(self, longest_pause_s: float = 0.0):
        self.longest_pause_s = longest_pause_s
        self.sum = self.num_steps = 0

    def reset(self, row: dict[str, Any]) -> str:
        self.row, self.sum = row, checksum(row["prompt"])
        return f"Begin at {self.sum % 100}."

    def step(self, message: str) -> tuple[str, bool]:
        time.sleep(pause(self.longest_pause_s))
        return self._advance(message)

    def reward(self) -> dict[str, float]:
        return {"score": (self.sum % 7 + 1) / 7, "steps": self.num_steps}

    def _advance(self, *told: Any) -> tuple[str, bool]:
        self.num_steps += 1
        self.sum = checksum(self.sum, *told)
        return f"{self.num_steps}: {self.sum}", self.sum % 7 == 0


class PatientTally(Tally):
    """The same, with an asynchronous method, which shares a process with others."""

    async def step(self, message: str) -> tuple[str, bool]:  # type: ignore[override]
        await asyncio.sleep(pause(self.longest_pause_s))
        return self._advance(message)


class Account(Tally):
    """The same, with a tool. It also adds random numbers."""

    def __init__(self, longest_pause_s: float = 0.0):
        super().__init__(longest_pause_s)
        self.done = False

    def add(self, n: int) -> str:
        """Add a number.

        Args:
            n: The number.
        """
        time.sleep(pause(self.longest_pause_s))
        observation, self.done = self._advance(n, random.random())
        if self.sum % 4 == 0:
            raise ValueError(observation)
        return observation


class Held(Account):
    """The same. While there is a file with the name `hold`, a call notes this beside it, and hangs."""

    def __init__(self, longest_pause_s: float = 0.0, hold: str = ""):
        super().__init__(longest_pause_s)
        self.hold = Path(hold)

    def _advance(self, *told: Any) -> tuple[str, bool]:
        while self.hold.is_file():
            self.hold.with_suffix(".reached").touch()
            time.sleep(0.1)
        return super()._advance(*told)


class OftenEqual(Account):
    """The same. For two rows of three, all samples have the same reward."""

    def reward(self) -> dict[str, float]:
        return super().reward() if self.row["answer"][-1] in "0369" else {"score": 0.5, "steps": 0.0}


def add(n: int) -> str:
    """Add a number.

    Args:
        n: The number.
    """
    time.sleep(pause(0.01))
    return f"{n + random.randrange(1000)}"


async def look() -> str:
    """Look at the sum."""
    await asyncio.sleep(pause(0.01))
    return "42"


async def play(task: Any, generate: Any, longest_pause_s: float = 0.0, turn_tokens: int = 3) -> dict[str, float]:
    """Ask for turns of one conversation, then for one of another, until the tokens are used up."""
    ids, total = list(task.prompt), task.seed
    for number in range(3):
        said = await generate(ids, max_tokens=turn_tokens + number)
        await asyncio.sleep(pause(longest_pause_s))
        total = checksum(total, said.tokens, said.finish)
        ids += said.tokens
        if total % 2:
            ids += task.tokenizer.encode(f"{total % 10}")
    judged = await generate(task.prompt[:3], max_tokens=4)
    return {"score": checksum(total, judged.tokens, judged.finish) % 7 / 6, "turns": 4.0}


class Faulty(Tally):
    """A game in which some samples meet a fault. Which ones depends on the prompt and on what the model said alone."""

    def __init__(self, is_faulty: bool = True):
        super().__init__()
        self.is_faulty = is_faulty

    def reset(self, row: dict[str, Any]) -> str:
        text = super().reset(row)
        if self.is_faulty and self.sum % 6 == 0:
            raise LookupError(f"planted for {row['prompt']}")
        return text

    def step(self, message: str) -> tuple[str, bool]:
        observation, is_done = self._advance(message)
        lot = checksum(self.sum, "fault") % (3 * len(FAULTS))
        if self.is_faulty and lot < len(FAULTS):
            FAULTS[lot]()
        return observation, is_done


def hang() -> None:
    while True:
        time.sleep(1)


def leave() -> None:
    os._exit(3)


def print_a_gigabyte() -> None:
    for _ in range(1 << 10):
        sys.stdout.buffer.write(b"x" * (1 << 20))


def leak_a_process() -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)


def allocate() -> None:
    kept = []
    while True:
        kept.append(bytearray(1 << 28))


def raise_error() -> None:
    raise RuntimeError("planted")


FAULTS = (hang, leave, print_a_gigabyte, leak_a_process, allocate, raise_error)


class Waiting(Tally):
    """A game that never answers. It makes the file `mark` when it is asked."""

    def __init__(self, mark: str):
        super().__init__()
        self.mark = mark

    def step(self, message: str) -> tuple[str, bool]:
        Path(self.mark).touch()
        time.sleep(1000)
        return super().step(message)
