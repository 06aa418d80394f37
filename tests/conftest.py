"""No test leaves a world behind, however it ends."""

from collections.abc import Iterator

import pytest

from tests.launcher import STARTED, members


@pytest.fixture(autouse=True)
def end_worlds() -> Iterator[None]:
    yield
    while STARTED:
        for process in members(STARTED.pop().pid):
            process.kill()
