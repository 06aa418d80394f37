"""Heartbeats: what a rank is doing now, in memory that it shares with its watchdog.

Writing a heartbeat takes a few microseconds. A rank writes one for every stage, engine step, micro-batch and message.
It also announces when it waits for others, so that their silence is not blamed on it, and when it begins exceptional
work. The duration of exceptional work, such as a compilation, cannot be estimated from earlier work.
"""

import json
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from rl.watch.ledger import BUSY, SYNC, WAIT, Ledger, role_of

SIZE = 16_384  # bytes; holds four texts of MAX_ITEM characters, each of which JSON may write in 12 bytes
# The memory begins with a sequence number, which is odd while a heartbeat is written, and the length of its text. The
# times follow (the last fields of Heartbeat; any thread may write all but the first two), and then the text.
TIMES_OFFSET, TEXT_OFFSET = 16, 64
MAX_ITEM = 200  # characters
MAX_SHAPES = 64  # maximum number of shapes in a stage whose first use is allowed more time
OWN = "its "  # prefix of `waits_for` if the rank waits for its own threads
MAX_TRIES = 100


@dataclass
class Activity:
    """What a rank is doing."""

    roles: str = "no role yet"
    stage: str = "start"
    step: int = 0
    version: int = 0
    item: str = ""  # what the rank works on
    waits_for: str = ""  # empty while the rank works; begins with OWN if it waits for its own threads
    exceptional: str = ""  # work whose duration cannot be estimated from earlier work; empty if there is none
    num_steps: int = 0  # steps of the whole run; 0 on ranks that do not train

    @property
    def waits_for_itself(self) -> bool:
        return self.waits_for.startswith(OWN)

    @property
    def waits_for_others(self) -> bool:
        return bool(self.waits_for) and not self.waits_for_itself


@dataclass(frozen=True)
class Heartbeat:
    """Times are those of the monotonic clock, which all processes of a host share. 0 means never."""

    activity: Activity
    count: int  # heartbeats so far
    tokens: int  # sampled so far
    is_new: bool  # the stage was never entered for this item before
    shape: str  # class of the work's size; empty if it has none
    is_first_use: bool  # the shape was not used in this stage before
    at: float  # when the heartbeat was written
    stage_at: float  # when the stage began
    io_at: float = 0.0  # when the I/O thread last ran: the interpreter was not frozen then
    background_at: float = 0.0  # when a thread that writes a checkpoint last made progress
    debugger_opened_at: float = 0.0
    debugger_closed_at: float = 0.0

    @property
    def progress_at(self) -> float:
        """Return when the rank last made progress. If it waits for its own threads, their progress counts too."""
        background_at = self.background_at if self.activity.waits_for_itself else 0.0
        return max(self.at, self.debugger_closed_at, background_at)

    @property
    def is_in_debugger(self) -> bool:
        return self.debugger_opened_at > self.debugger_closed_at


class Heart:
    """Write a rank's heartbeats. Other threads call the `touch_` methods, and may begin or end compilations."""

    def __init__(self) -> None:
        self._activity = Activity()
        self._entry = ("start", "")
        self._left: set[tuple[str, str]] = set()  # pairs of stage and item that were entered and left before
        self._shape, self._is_first_use = "", False
        self._shapes: dict[str, set[str]] = {}  # used so far, by stage
        self._exceptional: list[str] = []  # nested, the innermost last
        self._lock = threading.RLock()
        self._count = self._tokens = 0
        self._stage_at = time.monotonic()
        self.ledger, self._awaited_role = Ledger(BUSY + self._activity.stage), ""  # empty while the rank works
        self.renew()

    def renew(self) -> None:
        """Move to new memory, shared only with processes that are forked from now on."""
        self._memory = mmap.mmap(-1, SIZE)
        self._numbers = memoryview(self._memory)[:TIMES_OFFSET].cast("Q")
        self._times = memoryview(self._memory)[TIMES_OFFSET:TEXT_OFFSET].cast("d")
        self._write()

    def beat(self, item: str = "", tokens: int = 0, shape: str = "") -> None:
        """Announce work on `item`. `shape` is one of a few size classes, whose first use in a stage may take longer."""
        with self._lock:
            self._activity.item = item[:MAX_ITEM]
            self._tokens += tokens
            self._use(shape)
            self._write()

    def _use(self, shape: str) -> None:
        used = self._shapes.setdefault(self._activity.stage, set())
        self._is_first_use = bool(shape) and shape not in used and len(used) < MAX_SHAPES
        self._shape = shape[:MAX_ITEM]
        if self._is_first_use:
            used.add(shape)

    def forget_shapes(self) -> None:
        """Count the next use of each shape in this stage as the first, for example after an engine was rebuilt."""
        self._shapes.pop(self._activity.stage, None)

    @contextmanager
    def exceptional(self, what: str) -> Iterator[None]:
        """Mark work such as a compilation: its limit is the cap, and nothing is learnt from it. Calls may nest."""
        self.begin_exceptional(what)
        try:
            yield
        finally:
            self.end_exceptional(what)

    def begin_exceptional(self, what: str) -> None:
        with self._lock:
            self._exceptional.append(what[:MAX_ITEM])
            self._write()

    def end_exceptional(self, what: str) -> None:
        """End exceptional work. Ignore an end without a begin: callbacks may be registered during a compilation."""
        with self._lock, suppress(ValueError):
            self._exceptional.remove(what[:MAX_ITEM])
            self._write()

    def enter(self, stage: str, item: str = "") -> None:
        """Enter a stage. `item` is one of a few values. The first visit for each may take longer than others."""
        with self._lock:
            if stage != self._activity.stage:
                self._activity.stage, self._stage_at = stage, time.monotonic()
            self._left.add(self._entry)
            self._entry, self._activity.item = (stage, item), item
            self._book()
            self._use("")
            self._write()

    def describe(self, **values: Any) -> None:
        """Set `roles`, `step`, `version` or `num_steps`."""
        with self._lock:
            self._activity = replace(self._activity, **values)
            self._write()

    def wait(self, what: str) -> None:
        """Announce that the rank waits for `what` from now on. An empty text ends the wait. The ledger counts the wait
        for the role of an `Awaited` text."""
        with self._lock:
            self._activity.waits_for = str(what[:MAX_ITEM])
            self._awaited_role = role_of(what) if what else ""
            self._book()
            self._write()

    @contextmanager
    def in_collective(self, role: str) -> Iterator[None]:
        """Count a collective of the ranks of a role as waiting for the others. The watchdog is not told: it finds out
        from stacks which rank is missing in a collective."""
        outer, self._awaited_role = self._awaited_role, role
        self._book()
        try:
            yield
        finally:
            self._awaited_role = outer
            self._book()

    def _book(self) -> None:
        """Switch the ledger to what the rank does now. Whoever waits in a weight sync waits for the sync."""
        stage, role = self._activity.stage, self._awaited_role
        waits_for = SYNC if role and stage == "sync" else role
        self.ledger.switch(WAIT + waits_for if role else BUSY + stage)

    def touch_io(self) -> None:
        self._times[2] = time.monotonic()

    def touch_background(self) -> None:
        self._times[3] = time.monotonic()

    def open_debugger(self) -> None:
        self._times[4] = time.monotonic()

    def close_debugger(self) -> None:
        self._times[5] = time.monotonic()

    def _write(self) -> None:
        self._count += 1
        self._activity.exceptional = self._exceptional[-1] if self._exceptional else ""
        novelty = self._entry not in self._left, self._shape, self._is_first_use
        text = json.dumps([[*vars(self._activity).values()], self._count, self._tokens, *novelty]).encode()
        self._numbers[0] = 2 * self._count - 1  # not `+= 1`: a KeyboardInterrupt in here would leave it odd for good
        self._numbers[1] = len(text)
        self._times[0], self._times[1] = time.monotonic(), self._stage_at
        self._memory[TEXT_OFFSET : TEXT_OFFSET + len(text)] = text
        self._numbers[0] = 2 * self._count

    def read(self) -> Heartbeat | None:
        """Return the newest heartbeat, or None if the rank is writing one or froze while it did."""
        for _ in range(MAX_TRIES):
            sequence, size = self._numbers
            text, times = self._memory[TEXT_OFFSET : TEXT_OFFSET + size], self._times.tolist()
            if sequence % 2 == 0 and self._numbers[0] == sequence:
                with suppress(ValueError):  # the text may be torn nevertheless
                    activity, *values = json.loads(text)
                    return Heartbeat(Activity(*activity), *values, *times)
        return None


def size_class(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `count` and `least`, or 0 if `count` is 0."""
    return 1 << (max(count, least) - 1).bit_length() if count else 0


HEART = Heart()  # the only one of this process
