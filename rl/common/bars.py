"""Work of this process for which a person waits: what it is, and how much of it is done.

    with BARS.open("evaluation", len(prompts), "prompts") as count:
        ...
        count(1)

This module only counts. The live view of a run shows what is open on the leader (rl/report/live.py), and tools show a
bar of their own (rl/report/bars.py).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Bar(NamedTuple):
    title: str
    total: int
    unit: str  # of `total`, such as "prompts"; "B" for bytes
    done: int
    age_s: float


class Bars:
    """The work that is going on. Any thread may open a bar and count."""

    def __init__(self) -> None:
        self._open: list[_OpenBar] = []
        self._lock = threading.Lock()

    @contextmanager
    def open(
        self, title: str, total: int, unit: str, read: Callable[[], int] | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Show work of this size while the body runs. Either the body counts what is done with the function that it
        gets, or `read` returns it."""
        bar = _OpenBar(title, total, unit, read)
        with self._lock:
            self._open.append(bar)
        try:
            yield bar.count
        finally:
            with self._lock:
                self._open = [each for each in self._open if each is not bar]

    def read(self) -> list[Bar]:
        """Return the open bars, the oldest first."""
        with self._lock:
            return [bar.look() for bar in self._open]


class _OpenBar:
    def __init__(self, title: str, total: int, unit: str, read: Callable[[], int] | None):
        self._title, self._total, self._unit = title, total, unit
        self._done, self._opened_at, self._lock = 0, time.monotonic(), threading.Lock()
        self._read: Callable[[], int] = read if read is not None else lambda: self._done

    def count(self, number: int) -> None:
        with self._lock:
            self._done += number

    def look(self) -> Bar:
        age_s = time.monotonic() - self._opened_at
        return Bar(self._title, self._total, self._unit, self._read(), age_s)


BARS = Bars()  # the only ones of this process
