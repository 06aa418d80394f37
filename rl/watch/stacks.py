"""Python stacks of a rank, also of one whose interpreter is frozen: a signal makes it write them into memory that its
watchdog reads."""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from rl.common.files import run_within_wait

SIGNAL = signal.SIGUSR2
MEMORY = "stacks"  # name by which tools/stacks.py finds it
ANSWER_S = 0.5  # for a rank to write them
# Parts of paths that belong to calls which need other ranks, or wait for a device that does.
WAITING_WORDS = (
    "torch/distributed/",
    "torch/autograd/",
    "torch/utils/checkpoint",
    "torch/cuda/",
    "rl/sync/transfer.py",
)
MAX_BYTES = 1 << 20


class Stacks:
    """Memory for a rank's stacks. The rank makes it before its watchdog is forked."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._file = os.fdopen(os.memfd_create(MEMORY, 0), "w")
        faulthandler.register(SIGNAL, self._file, all_threads=True)

    def ask(self, is_stopped: bool) -> None:
        """Ask the rank to write its stacks, which `take` returns ANSWER_S later. The rank writes where this process
        seeks to, which is the beginning of the file."""
        os.ftruncate(self._file.fileno(), 0)
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)
        with suppress(ProcessLookupError):
            os.kill(self._pid, SIGNAL)
            if is_stopped:  # let it run for a moment to answer
                os.kill(self._pid, signal.SIGCONT)
                time.sleep(0.05)
                os.kill(self._pid, signal.SIGSTOP)

    def take(self) -> str:
        return os.pread(self._file.fileno(), MAX_BYTES, 0).decode(errors="replace").strip("\0")


def write_stacks(stacks: str, folder: Path | None, rank: int) -> str:
    """Write stacks to the run's folder and return the path. Return nothing if that takes too long: the file system may
    be what hangs."""
    if not stacks or folder is None:
        return ""
    path = folder / "stacks" / f"{time.strftime('%Y%m%d-%H%M%S')}.rank_{rank}.txt"

    def write() -> str:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            path.write_text(stacks)
            return str(path)
        return ""

    return run_within_wait(write, "")


def stands_in_collective(stacks: str) -> bool:
    """Whether the main thread's innermost frames belong to calls that need other ranks."""
    main = stacks.partition("Current thread")[2].splitlines()[1:6]
    return any(word in line for line in main for word in WAITING_WORDS)
