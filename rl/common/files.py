"""Write files that others may read meanwhile, and access file systems that may hang."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

WAIT_S = 1.0  # limit of `run_within_wait`
T = TypeVar("T")


def write_atomically(path: Path, data: bytes | str, fsync: bool = False) -> None:
    """Replace a file, so that a reader sees the old or the new one. `fsync` makes it survive a crash of the machine."""
    part = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.part")  # two processes may write the file
    try:
        with part.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def run_within_wait(work: Callable[[], T], default: T) -> T:
    """Return what `work` returns, or `default` after WAIT_S seconds, for watchdogs when a file system hangs."""
    results = [default]

    def run() -> None:
        results[0] = work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return results[0]
