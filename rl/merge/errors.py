"""The error of the merge tool, which reaches a person as one message."""

import shutil
from pathlib import Path

from rl.merge.sizes import size_text


class MergeError(RuntimeError):
    """What a person must mend; the message says what was found, what is needed and what to do."""


def cannot_write(path: Path, error: OSError) -> MergeError:
    return MergeError(
        f"cannot write {error.filename or path}: {error.strerror} ({size_text(free_bytes(path))} left there). What "
        "is complete stays: free space, or give --output a folder on another disk, and start the same command again"
    )


def free_bytes(path: Path) -> int:
    """On the disk that holds it, or will."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(folder).free
