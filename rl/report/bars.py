"""A progress bar for tools, drawn by rich. In a run, the live view shows progress instead (rl/common/bars.py)."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rl.common.text import format_bytes

LONG_S = 10.0  # work that takes longer gets two lines in a log file
REFRESHES_PER_S = 5


@contextmanager
def show_bytes(title: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show how much of some work is done, on stderr. The body counts bytes, from any thread.

    On a terminal there is a bar. Elsewhere, long work prints a line when it turns out to be long, and one at its end.
    """
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=REFRESHES_PER_S) as progress:
            task = progress.add_task(title, total=num_bytes)
            yield lambda number: progress.advance(task, number)
        return
    lines = _Lines(title, num_bytes)
    yield lines.count
    lines.finish()


class _Lines:
    """At most two lines about work that takes long."""

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, total, 0
        self._started_at, self._has_begun = time.monotonic(), False
        self._lock = threading.Lock()

    def count(self, number: int) -> None:
        with self._lock:
            self._done += number
            seconds = time.monotonic() - self._started_at
            if seconds >= LONG_S and not self._has_begun:
                self._has_begun = True
                done = f"{format_bytes(self._done)} of {format_bytes(self._total)}"
                print(f"{self._title}: {done} after {seconds:.0f} s", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._has_begun:
            seconds = time.monotonic() - self._started_at
            print(f"{self._title}: {format_bytes(self._done)} in {seconds:.0f} s", file=sys.stderr, flush=True)
