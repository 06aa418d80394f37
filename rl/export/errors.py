"""The error of the merge tool, which reaches a person as one message."""

import errno
import shutil
from pathlib import Path

from rl.watch.text import format_bytes


class MergeError(RuntimeError):
    """What a person must mend; the message says what was found, what is needed and what to do."""


def cannot_write(path: Path, error: OSError) -> MergeError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    mend = f"free space ({format_bytes(free_bytes(path))} are left there)" if is_full else "mend that"
    return MergeError(
        f"cannot write {error.filename or path}: {error.strerror}. What is complete stays: {mend}, or give --output a "
        "folder on another disk, and start again"
    )


def part_of(path: Path) -> Path:
    """Where a file is written until all of it is there."""
    return path.with_name(f"{path.name}.part")


def free_bytes(path: Path) -> int:
    """On the disk that holds it, or will."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(folder).free
