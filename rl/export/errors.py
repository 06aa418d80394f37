"""Errors and warnings of the merge tool, and the free space that they report."""

import errno
import shutil
import sys
from pathlib import Path

from rl.common.text import format_bytes


class MergeError(RuntimeError):
    """A problem for the user to solve. The message says what was found, what is needed and what to do."""


def warn(text: str) -> None:
    print(f"merge_checkpoint: {text}", file=sys.stderr, flush=True)


def cannot_write(path: Path, error: OSError) -> MergeError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = f"free space ({format_bytes(free_bytes(path))} are left there)" if is_full else "fix that"
    return MergeError(
        f"cannot write {error.filename or path}: {error.strerror}. Finished files are kept: {remedy}, or give --output "
        "a folder on another disk, and run the same command again"
    )


def partial_path(path: Path) -> Path:
    """Return the path at which a file is written until it is complete."""
    return path.with_name(f"{path.name}.part")


def free_bytes(path: Path) -> int:
    """Return the free space of the disk that holds or will hold `path`."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(folder).free
