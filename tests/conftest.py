"""End the runs that a failed test has left behind, and let programs that tests start keep their bytecode."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# Hundreds of processes import this repository. Compiling it takes each of them half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from tests.launcher import STARTED, members  # noqa: E402

# If pytest is a background job it ignores Ctrl-C, and programs that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def end_runs() -> Iterator[None]:
    yield
    while STARTED:
        for process in members(STARTED.pop().pid):
            process.kill()
