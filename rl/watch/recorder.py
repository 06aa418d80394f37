"""NCCL's flight recorder: a rank's last collectives on GPUs, which its watchdog requests when ranks are silent.

A thread of torch answers, also while the main thread is in a collective. `torchfrtrace` reads the files of all ranks
and says in which collective they differ.
"""

import os
import pickle
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PIPES = Path("/dev/shm")  # a run folder may be on a file system without pipes; `remove_segments` cleans up here
READ_S = 2.0  # torch reads its pipe once a second


def keep_collectives(folder: Path, world: str, count: int) -> str:
    """Record the last `count` collectives. Call it in the rank, before the first process group on GPUs is made.

    Return the path of the files to come, without the rank, or nothing if none are wanted. Environment variables that
    the user has set win.
    """
    _set(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), str(count))
    if not count:
        return ""
    target = folder.resolve() / "stacks" / world / "nccl_rank_"  # torchfrtrace takes all files of a folder for one time
    target.parent.mkdir(parents=True, exist_ok=True)
    _set(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(target))
    _set(("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",), str(_pipe(world, "")))
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]


def _set(names: tuple[str, ...], value: str) -> None:
    """Set the names that newer and older versions of torch read."""
    if not any(name in os.environ for name in names):
        os.environ |= dict.fromkeys(names, value)


class Recording:
    """A request for a rank's last collectives, in the watchdog. A thread reads the file, because the run's folder may
    be what hangs."""

    def __init__(self, world: str, rank: int, stem: str):
        self.path = ""  # of the file, if a recorder listens
        self.is_pending = False  # the device is in a collective, wherever the main thread waits for it
        self._thread = threading.Thread(target=self._take, args=(world, rank, Path(f"{stem}{rank}")), daemon=True)
        if stem:
            self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _take(self, world: str, rank: int, path: Path) -> None:
        with suppress(OSError):
            path.unlink()  # of an earlier silence
        if not ask_for_collectives(world, rank):
            return
        self.path = str(path)
        deadline = time.monotonic() + READ_S
        while time.monotonic() < deadline:
            with suppress(OSError, EOFError, pickle.UnpicklingError):  # not written yet, or not to its end
                self.is_pending = has_pending(pickle.loads(path.read_bytes()))
                return
            time.sleep(0.1)


def has_pending(trace: dict[str, Any]) -> bool:
    """Whether the device has unfinished collectives of some group: other ranks have not joined one, or earlier work in
    the queue does not end."""
    groups = trace.get("pg_status", {}).values()
    return any(int(of["last_enqueued_collective"]) > int(of["last_completed_collective"]) for of in groups)


def ask_for_collectives(world: str, rank: int) -> bool:
    """Request the file and return whether a recorder listens. The file is there a second or two later."""
    with suppress(OSError):
        pipe = os.open(_pipe(world, f"{rank}.pipe"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(pipe, b"1") == 1
        finally:
            os.close(pipe)
    return False


def _pipe(world: str, end: str) -> Path:
    return PIPES / f"oneworld-{world}-nccl_{end}"
