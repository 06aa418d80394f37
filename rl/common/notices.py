"""Warnings of this process: each is shown once, and its repetitions are counted.

    NOTICES.warn("reward/timeouts is above 10 %")

The first time, the warning is printed at once. Repetitions are printed when there are 10, 100, 1000 and so on of them,
and at the end of the run. Where a live view shows the last warning and its count, they are printed only at the end.
"""

import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

MAX_KINDS = 1000  # that are remembered; the one that was repeated least recently is forgotten


class Notice(NamedTuple):
    text: str
    times: int


class Notices:
    """Print warnings, by default to stdout. Any thread may warn."""

    def __init__(self, say: Callable[[str], None] | None = None):
        self._say = say or _print
        self._counts: dict[str, Notice] = {}  # by kind, the newest last
        self._num_shown: dict[str, int] = {}  # how often each kind was repeated when it was last printed
        self._lock = threading.Lock()
        self.is_in_view = False  # whether a live view shows `last`

    def warn(self, text: str, kind: str = "") -> None:
        """Show a warning. Warnings of one `kind` count as repetitions, though their texts may differ in numbers."""
        kind = kind or text
        with self._lock:
            before = self._counts.pop(kind, None)
            notice = self._counts[kind] = Notice(text, before.times + 1 if before is not None else 1)
            if len(self._counts) > MAX_KINDS:
                oldest = next(iter(self._counts))
                del self._counts[oldest]
                self._num_shown.pop(oldest, None)
            is_power = str(notice.times).strip("0") == "1"
            is_shown = before is None or (is_power and not self.is_in_view)
            if is_shown:
                self._num_shown[kind] = notice.times
        if is_shown:
            self._say(_describe(notice))

    @property
    def last(self) -> Notice | None:
        """Return the newest warning and how often it was given, or None."""
        with self._lock:
            return next(reversed(self._counts.values()), None)

    def summarize(self) -> None:
        """Print the counts of all warnings that were repeated since they were printed. Called at the end of a run."""
        with self._lock:
            repeated = [notice for kind, notice in self._counts.items() if notice.times > self._num_shown.get(kind, 0)]
            self._num_shown = {kind: notice.times for kind, notice in self._counts.items()}
        for notice in repeated:
            self._say(_describe(notice))


def _describe(notice: Notice) -> str:
    return f"oneworld: {notice.text}" if notice.times == 1 else f"oneworld: {notice.times} times: {notice.text}"


def _print(text: str) -> None:
    print(text, file=sys.stdout, flush=True)


NOTICES = Notices()  # the only one of this process
