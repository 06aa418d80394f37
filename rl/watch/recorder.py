"""NCCL's flight recorder: a rank's last collectives on GPUs. Its watchdog requests them when ranks are silent.

A thread of torch answers with a file. It is a pickle, and other users may be able to write to its folder, or to plant
a file under the pipe's name. So only plain containers are loaded, and only pipes are written to.
`torchfrtrace` reads the files of all ranks and shows in which collective they differ.
"""

import io
import os
import pickle
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PIPES = Path("/dev/shm")  # a run folder's file system may have no pipes; `remove_segments` cleans up here
READ_S = 2.0  # torch reads its pipe once a second
MAX_FILE_BYTES = 256 << 20


def keep_collectives(folder: Path, world: str, count: int) -> str:
    """Record the last `count` collectives, in the rank before its first process group. Variables of the user win.

    Return the path of the files, without the rank, or "" if `count` is 0.
    """
    _set(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), str(count))
    if not count:
        return ""
    # One folder per world, because torchfrtrace reads all files of a folder.
    target = folder.resolve() / "stacks" / world / "nccl_rank_"
    target.parent.mkdir(parents=True, exist_ok=True)
    _set(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(target))
    _set(("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",), str(_pipe(world, "")))
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]


def _set(names: tuple[str, ...], value: str) -> None:
    """Set the same variable under the names that newer and older versions of torch read."""
    if not any(name in os.environ for name in names):
        os.environ |= dict.fromkeys(names, value)


class Recording(threading.Thread):
    """A watchdog's request for its rank's last collectives. A thread, because the file system may be what hangs."""

    def __init__(self, world: str, rank: int, stem: str):
        """`stem` is the path of the file without the rank. It is empty if nothing is recorded."""
        super().__init__(daemon=True)
        self.path = ""  # path of the file, if a recorder listens
        self.is_pending = False  # the device has unfinished collectives, whatever the main thread does
        self._world, self._rank, self._stem = world, rank, stem

    def run(self) -> None:
        if not self._stem:
            return
        path = Path(f"{self._stem}{self._rank}")
        with suppress(OSError):
            path.unlink()  # the file of an earlier request
        if not ask_for_collectives(self._world, self._rank):
            return
        self.path = str(path)
        deadline = time.monotonic() + READ_S
        while time.monotonic() < deadline:
            with suppress(Exception):  # not written yet, or only in part; damaged pickles raise many types
                self.is_pending = has_pending(_load(path))
                return
            time.sleep(0.1)


class _PlainUnpickler(pickle.Unpickler):
    """Load dicts, lists, texts and numbers. A pickle that names a class or function could execute anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a file of the flight recorder")


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES)
    return _PlainUnpickler(io.BytesIO(data)).load()


def has_pending(trace: dict[str, Any]) -> bool:
    """Return whether another rank has not joined a collective of any group, or earlier work does not end."""
    groups = trace.get("pg_status", {}).values()
    return any(int(of["last_enqueued_collective"]) > int(of["last_completed_collective"]) for of in groups)


def ask_for_collectives(world: str, rank: int) -> bool:
    """Request the file and return whether a recorder listens. Torch writes the file within about two seconds."""
    with suppress(OSError):
        pipe = os.open(_pipe(world, f"{rank}.pipe"), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            return stat.S_ISFIFO(os.fstat(pipe).st_mode) and os.write(pipe, b"1") == 1
        finally:
            os.close(pipe)
    return False


def _pipe(world: str, end: str) -> Path:
    return PIPES / f"oneworld-{world}-nccl_{end}"
