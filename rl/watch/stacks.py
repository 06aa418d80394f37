"""Python stacks of a rank, also of one that holds its interpreter for good: a signal makes it write them into memory
that its watchdog reads."""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from rl.watch.in_time import in_time

SIGNAL = signal.SIGUSR2
MEMORY = "stacks"  # by which tools/stacks.py finds it
ANSWER_S = 0.5  # for a rank to write them
# In paths: calls that need other ranks, or wait for a device that does.
WAITING_WORDS = (
    "torch/distributed/",
    "torch/autograd/",
    "torch/utils/checkpoint",
    "torch/cuda/",
    "rl/sync/transfer.py",
)
MAX_BYTES = 1 << 20


class Stacks:
    """Made by the rank, before its watchdog is forked."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._file = os.fdopen(os.memfd_create(MEMORY, 0), "w")
        faulthandler.register(SIGNAL, self._file, all_threads=True)

    def ask(self, is_stopped: bool) -> None:
        """The answer is there ANSWER_S later, at the beginning of the file: the rank writes where this one seeks to."""
        os.ftruncate(self._file.fileno(), 0)
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        with suppress(ProcessLookupError):
            os.kill(self._pid, SIGNAL)
            if is_stopped:  # a moment to answer
                os.kill(self._pid, signal.SIGCONT)
                time.sleep(0.05)
                os.kill(self._pid, signal.SIGSTOP)

    def take(self) -> str:
        return os.pread(self._file.fileno(), MAX_BYTES, 0).decode(errors="replace").strip("\0")


def write_stacks(stacks: str, folder: Path | None, rank: int) -> str:
    """Returns the path, if they could be written in time: a file system that hangs may be what they tell of."""
    if not stacks or folder is None:
        return ""
    path = folder / "stacks" / f"{time.strftime('%Y%m%d-%H%M%S')}.rank_{rank}.txt"

    def write() -> str:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            path.write_text(stacks)
            return str(path)
        return ""

    return in_time(write, "")


def stands_in_collective(stacks: str) -> bool:
    """Whether the main thread's innermost frames are of calls that need other ranks."""
    main = stacks.partition("Current thread")[2].splitlines()[1:6]
    return any(word in line for line in main for word in WAITING_WORDS)
