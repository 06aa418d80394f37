"""events.jsonl: what happened to a run besides its steps, such as starts, checkpoints, warnings and faults.

The leader writes most events. The end of a world that fails is written by a watchdog, because no rank may be left.
The file is bounded: an event has one line of at most MAX_TEXT characters, and the leader drops old events when the file
exceeds MAX_BYTES.
"""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rl.common.credentials import hide_credentials
from rl.common.files import write_atomically

EVENTS = "events.jsonl"  # in the run's folder, of all starts of the run
Kind = Literal["start", "resume", "checkpoint", "evaluation", "warning", "fault", "stop", "end"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FREQUENT: tuple[Kind, ...] = ("checkpoint", "evaluation", "warning")  # dropped first
MAX_TEXT = 500
MAX_BYTES = 1_000_000
_LOCK = threading.Lock()  # checkpoints are committed in another thread


class Event(NamedTuple):
    at: float  # seconds since 1970
    step: int
    kind: Kind
    text: str
    world: str = ""  # of a start or resume: the id of the world


def write_event(run_dir: Path, kind: Kind, step: int, text: str, world: str = "") -> None:
    """Add a line. Called on the leader."""
    path = run_dir / EVENTS
    with _LOCK:
        _append(path, kind, step, text, world)
        if path.stat().st_size > MAX_BYTES:
            kept = drop_old(read_events(run_dir), MAX_BYTES // 2)
            write_atomically(path, "".join(_to_line(event) for event in kept))


def write_end_of_world(run_dir: Path, world: str, kind: Kind, step: int, text: str) -> None:
    """Add how a world ended. Do nothing if the newest start in the file is not one of this world: an evaluation alone
    or a dry run is no part of the run's story."""
    starts = [event.world for event in read_events(run_dir) if event.kind in ("start", "resume")]
    if starts and starts[-1] == world:
        with suppress(OSError):  # the disk may be full
            _append(run_dir / EVENTS, kind, step, text)


def read_events(run_dir: Path) -> list[Event]:
    """Return the events of a run, in the order in which they were written. Lines that are no events are skipped."""
    path, events = run_dir / EVENTS, []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError, TypeError):  # a kill has cut the line off, or another program wrote it
            event = Event(**json.loads(line))
            if event.kind in KINDS:
                events.append(event)
    return events


def drop_old(events: list[Event], max_bytes: int) -> list[Event]:
    """Return events whose lines have at most `max_bytes`. The oldest frequent events are dropped first, then the
    oldest others. The very first event stays."""
    excess = sum(len(_to_line(event)) for event in events) - max_bytes
    later = range(1, len(events))
    order = [n for n in later if events[n].kind in FREQUENT] + [n for n in later if events[n].kind not in FREQUENT]
    dropped = set()
    for number in order:
        if excess <= 0:
            break
        dropped.add(number)
        excess -= len(_to_line(events[number]))
    return [event for number, event in enumerate(events) if number not in dropped]


def _append(path: Path, kind: Kind, step: int, text: str, world: str = "") -> None:
    line = hide_credentials(text).partition("\n")[0]
    line = line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 4] + " ..."
    with path.open("a") as file:
        file.write(_to_line(Event(round(time.time(), 3), step, kind, line, world)))


def _to_line(event: Event) -> str:
    row: dict[str, Any] = event._asdict()
    if not event.world:
        del row["world"]
    return json.dumps(row) + "\n"
