"""File work of watchdogs: a folder that hangs must not keep them from deciding, telling and ending ranks."""

import threading
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 1.0
T = TypeVar("T")


def in_time(work: Callable[[], T], otherwise: T) -> T:
    """What it returns, if it does so in WAIT_S. It goes on in its thread after that."""
    results = [otherwise]

    def run() -> None:
        results[0] = work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return results[0]
