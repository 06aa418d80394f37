"""How a rank's process ended, in words, and whether the machine had run out of memory."""

import math
import signal
import time
from contextlib import suppress
from pathlib import Path

RECENT_S = 30.0  # a large process takes seconds to end after the kernel has killed it
MEANINGS = {
    signal.SIGHUP: "its terminal was closed; tools/jobs.py runs a job without one",
    signal.SIGSEGV: "native code accessed memory that is not its own",
    signal.SIGBUS: "memory could not be provided, for example because /dev/shm or a disk is full",
    signal.SIGABRT: "native code gave up, with a message in the rank's log",
    signal.SIGILL: "native code needs an instruction that this processor does not have",
    signal.SIGFPE: "an invalid calculation in native code",
}


class OutOfMemoryKills:
    """Count the processes that the kernel killed for lack of memory, in this process's cgroup or on this machine."""

    def __init__(self, root: Path = Path("/")):
        self._file = _counter_file(root)
        self._count = self._read()
        self._changed_at = -math.inf

    def look(self) -> None:
        if (count := self._read()) != self._count:
            self._count, self._changed_at = count, time.monotonic()

    @property
    def is_recent(self) -> bool:
        """Return whether the kernel has killed a process in the last RECENT_S seconds."""
        self.look()
        return time.monotonic() - self._changed_at < RECENT_S

    def _read(self) -> int:
        with suppress(OSError, ValueError):
            pairs = (line.split() for line in self._file.read_text().splitlines())
            return next((int(words[1]) for words in pairs if words[0] == "oom_kill"), 0)
        return 0


def _counter_file(root: Path) -> Path:
    """Return the file of the cgroup (version 2 or 1), as seen in a container or outside, or else of the machine."""
    groups = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                folder, name = (groups, "memory.events") if number == "0" else (groups / "memory", "memory.oom_control")
                for file in (folder / path.lstrip("/") / name, folder / name):
                    if file.exists():
                        return file
    return root / "proc/vmstat"


def describe_end(exit_code: int | None, is_out_of_memory: bool, is_launcher_gone: bool) -> str:
    """Describe the end of a rank's process that has reported nothing. `exit_code` is that of `RankProcess`."""
    if is_launcher_gone:
        return "its process ended with torchrun on its node, which was killed or crashed"
    if exit_code is None:
        return "its process ended without a report"
    if exit_code >= 0:
        return f"its process exited with code {exit_code} and reported no error"
    number = -exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = signal.strsignal(number) or "unknown"
    text = f"its process was killed by signal {number} ({name})"
    if number == signal.SIGKILL:
        return text + (
            " because the machine or its memory limit was exhausted; use less memory, or raise the limit of the cgroup"
            if is_out_of_memory
            else ", perhaps because the machine ran out of memory (look at dmesg)"
        )
    return text + (f": {MEANINGS[signal.Signals(number)]}" if number in MEANINGS else "")
