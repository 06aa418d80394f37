"""What the ranks of a node have said on its console, in a file for torchrun's process (launch/quiet_torchrun.py).

The file has an attempt and a level. Only a higher level, or a later attempt, replaces what is there. So a slow rank
cannot erase what a faster one has told, and a late watchdog of an earlier attempt does not speak for the present one.
"""

import fcntl
import os
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

VARIABLE = "ONEWORLD_TOLD_FILE"
VERDICT_S = 6.0  # limit for a watchdog to say what failed after its rank has ended


class Level(IntEnum):
    """How much the console says about the end of the ranks."""

    NOTHING = 0
    ASKED = 1  # nothing, and torchrun is ending
    MAY_RESTART = 2  # why they ended, and torchrun may start them again
    FINAL = 3  # why they ended for good


class Told(NamedTuple):
    attempt: int
    level: Level


def read_told(path: str) -> Told | None:
    """Return what the file says, or None if there is no file yet, or not the whole of it."""
    with suppress(OSError), open(path) as file:
        return _parse(file.read())
    return None


def tell(path: str, told: Told) -> None:
    """Write to the file, unless it says more or belongs to a later attempt."""
    with suppress(OSError), open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        present = _parse(file.read())
        if present is None or told > present:
            file.truncate(0)
            file.write(f"{told.attempt} {told.level:d}")


def remove_told(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _parse(text: str) -> Told | None:
    with suppress(ValueError):
        attempt, level = text.split()
        return Told(int(attempt), Level(int(level)))
    return None
