"""No test leaves a world behind, however it ends."""

import signal
from collections.abc import Iterator

import pytest

from tests.launcher import STARTED, members

# A shell's background jobs ignore Ctrl-C, and so would all that they start: programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def end_worlds() -> Iterator[None]:
    yield
    while STARTED:
        for process in members(STARTED.pop().pid):
            process.kill()
