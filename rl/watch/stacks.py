"""Python stacks of a rank, even if it is frozen: a signal makes it write them to memory that its watchdog reads."""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from rl.common.files import run_within_wait

SIGNAL = signal.SIGUSR2
MEMORY = "stacks"  # name of the memory file; tools/stacks.py looks for it
ANSWER_S = 0.5  # for a rank to write its stacks
AWAKE_S = 0.05  # limit for a stopped rank to write them
QUIET_S = 0.002  # once it has written nothing for so long, it has written all
# Paths of calls that need other ranks, or that wait for a device that may need them.
WAITING = (
    "torch/distributed/",
    "torch/autograd/",
    "torch/utils/checkpoint",
    "torch/cuda/",
    "rl/sync/transfer.py",
)
MAX_BYTES = 1 << 20


class Stacks:
    """Memory for a rank's stacks. The rank creates it before it forks its watchdog."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._file = os.fdopen(os.memfd_create(MEMORY, 0), "w")
        faulthandler.register(SIGNAL, self._file, all_threads=True)

    def ask(self, is_stopped: bool) -> None:
        """Ask the rank to write its stacks. `take` returns them ANSWER_S later."""
        os.ftruncate(self._file.fileno(), 0)
        os.lseek(self._file.fileno(), 0, os.SEEK_SET)  # both processes share the position
        with suppress(ProcessLookupError):
            os.kill(self._pid, SIGNAL)
            if is_stopped:
                wake_to_write(self._pid, self._file.fileno())

    def take(self) -> str:
        return os.pread(self._file.fileno(), MAX_BYTES, 0).decode(errors="replace").strip("\0")


def wake_to_write(pid: int, file: int) -> None:
    """Let a stopped process write the stacks that it was asked for to the file, and stop it again at once: while it is
    awake, it goes on with its step."""
    deadline, empty = time.monotonic() + AWAKE_S, os.fstat(file).st_size
    size = empty
    os.kill(pid, signal.SIGCONT)
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        last, size = size, os.fstat(file).st_size
        if size == last != empty:
            break
    os.kill(pid, signal.SIGSTOP)


def write_stacks(stacks: str, folder: Path | None, rank: int) -> str:
    """Write stacks to the run's folder and return the path, or "" if that fails. The file system may be what hangs."""
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
    """Return whether the innermost frames of the main thread belong to a call that needs other ranks."""
    main = stacks.partition("Current thread")[2].splitlines()[1:6]
    return any(word in line for line in main for word in WAITING)
