"""Gather the TensorBoard event files of a run from the nodes that have written them.

Only the leader writes events, and only to the disk of its node. After a restart, another node may have the leader. The
files only grow and their names are unique, so a copy is continued after its last byte.
"""

import os
import re
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rl.common.files import is_plain, join_inside
from rl.export.errors import MergeError
from rl.export.folders import NUM_LISTED_AT_ONCE, PIECE_BYTES, RemoteFolder

GATHERED = "tensorboard"  # folder of the copies, in the run's folder
PATTERN = "events.out.tfevents.*"
EVENT_LINE = re.compile(r"([0-9]{1,18}) ((?:[\w.-]+/)?events\.out\.tfevents\.[\w.-]+)", re.ASCII)
LIST = f"""
find . -maxdepth 2 -type f -name '{PATTERN}' -not -path './{GATHERED}/*' -exec stat -c '%s %n' {{}} + | sed 's, \\./, ,'
echo oneworld end
"""


class LocalEvents:
    """The event files of a run's folder on this machine."""

    def __init__(self, root: Path):
        self.root, self.name = root, str(root)

    def list(self) -> dict[str, int]:
        """Return the size of each event file by its path in the run's folder."""
        sizes = {}
        for path in [*self.root.glob(PATTERN), *self.root.glob(f"*/{PATTERN}")]:
            with suppress(OSError):
                if path.parent != self.root / GATHERED and path.is_file():
                    sizes[str(path.relative_to(self.root))] = path.stat().st_size
        return sizes

    def stream(self, file: str, begin: int, stop: threading.Event) -> Generator[bytes, None, None]:
        """Yield a file's bytes from `begin`."""
        with (self.root / file).open("rb") as opened:
            opened.seek(begin)
            while not stop.is_set() and (piece := opened.read(PIECE_BYTES)):
                yield piece


class RemoteEvents(RemoteFolder):
    """The event files of a run's folder on another node."""

    ENTER = "\ncd -- {root} || exit 3\necho oneworld begin\n"

    def list(self) -> dict[str, int]:
        lines = self._answer(LIST).decode(errors="replace").splitlines()
        found = [match for line in lines if (match := EVENT_LINE.fullmatch(line)) and is_plain(match[2])]
        return {match[2]: int(match[1]) for match in found}


EventPlace = LocalEvents | RemoteEvents


@dataclass
class EventFiles:
    """The event files of a run in all places, and why some places could not be listed."""

    holders: dict[str, tuple[EventPlace, int]]  # by file: the place that has it, and its number of bytes there
    failures: dict[str, MergeError]  # by the name of the place

    def by_place(self) -> dict[str, list[str]]:
        places: dict[str, list[str]] = {}
        for file, (place, _) in self.holders.items():
            places.setdefault(place.name, []).append(file)
        return places


def find_events(places: Sequence[EventPlace]) -> EventFiles:
    """List all places in parallel. If several have a file, they share a disk, and the first of them is taken."""
    found = EventFiles({}, {})
    with ThreadPoolExecutor(NUM_LISTED_AT_ONCE) as pool:
        listings = [(place, pool.submit(place.list)) for place in places]
    for place, listing in listings:
        try:
            for file, size in listing.result().items():
                found.holders.setdefault(file, (place, size))
        except MergeError as error:
            found.failures[place.name] = error
        except OSError as error:  # there is no ssh, or the folder cannot be read
            found.failures[place.name] = MergeError(f"{place.name}: {error.filename}: {error.strerror}")
    return found


def copy_events(found: EventFiles, target: Path, stop: threading.Event) -> None:
    """Copy what is new into `target`. If a place fails, note why in `found`, and copy from the others."""

    def copy(file: str) -> None:
        place, size = found.holders[file]
        try:
            _continue_copy(place, file, size, target, stop)
        except MergeError as error:
            found.failures[place.name] = error

    with ThreadPoolExecutor(NUM_LISTED_AT_ONCE) as pool:
        list(pool.map(copy, found.holders))


def _continue_copy(place: EventPlace, file: str, size: int, target: Path, stop: threading.Event) -> None:
    """Append what is new to the copy of a file. Another process that does the same writes the same bytes."""
    (target / file).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(join_inside(target, file), os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "wb", buffering=0):
        position = os.fstat(descriptor).st_size
        if position >= size:
            return
        with closing(place.stream(file, position, stop)) as pieces:
            for piece in pieces:
                position += os.pwrite(descriptor, piece[: size - position], position)
                if position == size:
                    return
