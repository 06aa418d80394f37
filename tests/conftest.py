"""End the runs that a failed test has left behind."""

import signal
from collections.abc import Iterator

import pytest

from tests.launcher import STARTED, members

# If pytest is a background job it ignores Ctrl-C, and programs that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def end_runs() -> Iterator[None]:
    yield
    while STARTED:
        for process in members(STARTED.pop().pid):
            process.kill()
