"""Replace files atomically, check names that come from others, and limit the time of access to files."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

WAIT_S = 1.0  # time limit of `run_within_wait`
MAX_NAME, MAX_PART_BYTES = 1024, 255  # characters of a relative path, bytes of each of its parts
T = TypeVar("T")


class UnsafeName(ValueError):
    """A name that leads out of its folder, or that a terminal or log would not show as it is."""


def is_plain(name: str) -> bool:
    """Return whether a relative path has no `.`, `..`, empty or very long parts and only printable characters."""
    parts = name.split("/")
    if not name.isprintable() or not {"", ".", ".."}.isdisjoint(parts) or len(name) > MAX_NAME:
        return False
    return all(len(part.encode()) <= MAX_PART_BYTES for part in parts)  # cannot fail: surrogates are not printable


def check_name(name: str) -> str:
    """Return `name`. Raise UnsafeName unless it is plain. Call this for every name from another node or a file."""
    if not is_plain(name):
        raise UnsafeName(f"{name[:MAX_PART_BYTES]!a} is not a plain relative path, such as hf/config.json")
    return name


def join_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder. Raise UnsafeName if its name is not plain or a symlink leads outside."""
    path, base = folder / check_name(name), folder.resolve()
    try:
        is_inside = base in path.resolve().parents
    except RuntimeError:  # Python before 3.13 raises it for a loop of symlinks
        is_inside = False
    if not is_inside:
        raise UnsafeName(f"{path} leads outside of {base} through a symlink; replace the symlink with its target")
    return path


def write_atomically(path: Path, data: bytes | str | Iterator[str], fsync: bool = False, mode: int = 0o666) -> None:
    """Replace a file, so that a reader sees the old or the new one. `fsync` makes it survive a crash of the machine.
    An iterator yields the content piece by piece, and may read the old file."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")  # a name that other users cannot prepare
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            for piece in data if isinstance(data, Iterator) else [data]:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def run_within_wait(work: Callable[[], T], default: T) -> T:
    """Return the result of `work`, or `default` after WAIT_S seconds. Watchdogs must not hang with a file system."""
    results = [default]

    def run() -> None:
        results[0] = work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return results[0]
