"""The metrics of an undisturbed run with the same settings, computed once for all tests."""

from typing import Any

import pytest

from tests.chaos.harness import running


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with running(tmp_path_factory.mktemp("undisturbed")) as world:
        assert world.finish() == [0, 0, 0, 0], world.output()[-6000:]
        return world.metrics()
