"""Seconds that this process has spent on parts of its work, for the metrics of the next step.

The stages of the loop are timed in rl/world/progress.py. This module is for what runs inside of a stage, or before the
world exists: imports, compilations, parts of the engine's build.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Durations:
    """Add up seconds by name. Any thread may add."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the body, even if it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken


DURATIONS = Durations()  # the only one of this process
