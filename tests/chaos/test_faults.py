"""Faults of a running cluster: the culprit is named in time, and training goes on with the same data."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.harness import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_training_goes_on(fault: Fault, undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    with running(tmp_path, loop=fault.needs_loop) as world:
        world.wait_for_step(2)
        fault.happen(world)
        if fault.mend is not None:
            fault.mend(world)
        world.finish_well(undisturbed)
