"""What a rank is doing now, in memory that it shares with its watchdog: written in a few microseconds, and readable
when the rank is frozen.

Every stage, engine step, micro-batch and message is a beat. A rank that waits for others says so: then silence is
theirs. A rank that does exceptional work says so too: work whose duration cannot be estimated from earlier work, such
as a compilation.
"""

import json
import mmap
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

SIZE = 16_384  # holds four texts of MAX_ITEM characters, each of which JSON may write in 12 bytes
HEAD = struct.Struct("=QQddI")  # beats, tokens, times of the beat and of the stage, bytes of text
HEAD_OFFSET = 8  # after a sequence number, which is odd while something is written
# Times that any thread may write, 0: never. When the I/O thread and a thread that writes a checkpoint last ran; when a
# debugger was opened, and when it was closed.
THREADS = struct.Struct("=dddd")
THREADS_OFFSET, TEXT_OFFSET = 64, 128
MAX_ITEM = 200  # characters
MAX_SHAPES = 64  # of a stage that count as a first use; beyond this the caller's classes are too fine
OWN = "its "  # so begins what a rank waits for that its own threads do
MAX_TRIES = 100


@dataclass(frozen=True)
class Beat:
    """Times are of the monotonic clock, which all processes of a host share."""

    beats: int
    tokens: int  # sampled so far
    at: float
    stage_at: float
    io_at: float  # when the rank's I/O thread last ran: its interpreter was not frozen then; 0: there is none yet
    background_at: float  # when a thread that writes a checkpoint last got on
    roles: str
    stage: str
    step: int
    version: int
    item: str  # what is worked on
    waits_for: str  # what it waits for, of other ranks unless it begins with OWN; empty: it works
    is_new: bool = False  # the stage was entered for something that it was never entered for before
    shape: str = ""  # class of the work's size; empty: it has none
    is_first_use: bool = False  # of that shape in this stage
    exceptional: str = ""  # work under way whose duration cannot be estimated from earlier work; empty: none
    opened_at: float = 0.0  # when somebody was last asked to debug the rank
    closed_at: float = 0.0  # when that was over

    @property
    def alive_at(self) -> float:
        return max(self.at, self.io_at, self.closed_at)

    @property
    def worked_at(self) -> float:
        """Since then it may have done nothing; what a person did in a debugger is not its silence."""
        return max(self.at, self.closed_at)

    @property
    def waits_for_itself(self) -> bool:
        return self.waits_for.startswith(OWN)

    @property
    def got_on_at(self) -> float:
        """Likewise, with what its other threads did, where it waits for that."""
        return max(self.worked_at, self.background_at) if self.waits_for_itself else self.worked_at

    @property
    def is_debugged(self) -> bool:
        return self.opened_at > self.closed_at


class Heart:
    """Written by the rank's main thread, but for the times of other threads, and for compilations: backward passes may
    begin those in a thread of autograd."""

    def __init__(self) -> None:
        self._roles, self._stage, self._step, self._version = "no role yet", "start", 0, 0
        self._item = self._waits_for = ""
        self._entry = ("start", "")
        self._left: set[tuple[str, str]] = set()
        self._shape, self._is_first_use = "", False
        self._shapes: dict[str, set[str]] = {}  # that were used so far, by stage
        self._exceptional: list[str] = []  # the innermost last
        self._lock = threading.RLock()
        self._sequence = self._beats = self._tokens = 0
        self._stage_at = time.monotonic()
        self.renew()

    def renew(self) -> None:
        """In memory that is shared with children from now on, and with nobody else."""
        self._memory = mmap.mmap(-1, SIZE)
        self._numbers = memoryview(self._memory).cast("Q")
        self._write()

    def beat(self, item: str = "", tokens: int = 0, shape: str = "") -> None:
        """`shape` is one of a few classes of size: the first use of each in a stage, until the next beat, may take
        longer than other work did."""
        with self._lock:
            self._item = item[:MAX_ITEM]
            self._tokens += tokens
            self._use(shape)
            self._write()

    def _use(self, shape: str) -> None:
        used = self._shapes.setdefault(self._stage, set())
        self._is_first_use = bool(shape) and shape not in used and len(used) < MAX_SHAPES
        self._shape = shape[:MAX_ITEM]
        if self._is_first_use:
            used.add(shape)

    def forget_shapes(self) -> None:
        """Count the next use of each shape in this stage as the first: what does the work is new."""
        self._shapes.pop(self._stage, None)

    @contextmanager
    def exceptional(self, what: str) -> Iterator[None]:
        """Mark work whose duration cannot be estimated from earlier work of the stage, such as a compilation. Its limit
        is the cap, and later work is not expected to take as long. It may nest."""
        self.begin_exceptional(what)
        try:
            yield
        finally:
            self.end_exceptional(what)

    def begin_exceptional(self, what: str) -> None:
        """Begin what `exceptional` marks, where a callback begins it and another one ends it."""
        with self._lock:
            self._exceptional.append(what[:MAX_ITEM])
            self._write()

    def end_exceptional(self, what: str) -> None:
        """End it. Without a beginning nothing happens: a callback may be registered while a compilation is under
        way."""
        with self._lock, suppress(ValueError):
            self._exceptional.remove(what[:MAX_ITEM])
            self._write()

    def enter(self, stage: str, item: str = "") -> None:
        """`item` is one of a few: the first of each in a stage may take longer than others did."""
        with self._lock:
            if stage != self._stage:
                self._stage, self._stage_at = stage, time.monotonic()
            self._left.add(self._entry)
            self._entry, self._item = (stage, item), item
            self._use("")
            self._write()

    def describe(self, roles: str | None = None, step: int | None = None, version: int | None = None) -> None:
        with self._lock:
            self._roles = self._roles if roles is None else roles
            self._step = self._step if step is None else step
            self._version = self._version if version is None else version
            self._write()

    def wait(self, what: str) -> None:
        """From here on for others; an empty text ends it."""
        with self._lock:
            self._waits_for = what[:MAX_ITEM]
            self._write()

    def touch_io(self) -> None:
        self._touch(0)

    def touch_background(self) -> None:
        self._touch(1)

    def open_debugger(self) -> None:
        self._touch(2)

    def close_debugger(self) -> None:
        self._touch(3)

    def _touch(self, thread: int) -> None:
        (bits,) = struct.unpack("=Q", struct.pack("=d", time.monotonic()))
        self._numbers[THREADS_OFFSET // 8 + thread] = bits  # at once: `pack_into` would clear it first

    def _write(self) -> None:
        is_new = self._entry not in self._left
        fields = [self._roles, self._stage, self._step, self._version, self._item, self._waits_for, is_new]
        fields += [self._shape, self._is_first_use, self._exceptional[-1] if self._exceptional else ""]
        text, now = json.dumps(fields).encode(), time.monotonic()
        self._beats += 1
        self._numbers[0] = self._sequence + 1
        HEAD.pack_into(self._memory, HEAD_OFFSET, self._beats, self._tokens, now, self._stage_at, len(text))
        self._memory[TEXT_OFFSET : TEXT_OFFSET + len(text)] = text
        self._sequence += 2
        self._numbers[0] = self._sequence

    def read(self) -> Beat | None:
        """On the watchdog's side; None while the rank is writing, or was frozen in the middle of that."""
        for _ in range(MAX_TRIES):
            sequence = self._numbers[0]
            beats, tokens, at, stage_at, size = HEAD.unpack_from(self._memory, HEAD_OFFSET)
            text = bytes(self._memory[TEXT_OFFSET : TEXT_OFFSET + size])
            io_at, background_at, *debugger = THREADS.unpack_from(self._memory, THREADS_OFFSET)
            if sequence % 2 == 0 and self._numbers[0] == sequence:
                with suppress(ValueError):  # torn all the same
                    return Beat(beats, tokens, at, stage_at, io_at, background_at, *json.loads(text), *debugger)
        return None


def size_class(count: int, least: int = 1) -> int:
    """Return the power of two that `count` is at most, and at least `least`; 0 for 0. A few such classes stand for all
    sizes that a shape can have."""
    return 1 << (max(count, least) - 1).bit_length() if count else 0


HEART = Heart()  # of this process
