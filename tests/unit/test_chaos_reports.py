"""What tests/chaos takes for a right report: each failure once, and nobody else named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.faults import ALSO_GONE, Fault
from tests.chaos.harness import Cluster

RIGHT = "oneworld: rank 5 (actor) on node2, stage update, step 3: its process ended without a report\n"
DETAILS = (
    "  3 s after that stage began\n  also gone: rank 4\n  ranks 0-3 (rollout): stage serve, silent for up to 1 s\n"
)
WRONG = "oneworld: rank 0 (rollout) on node0, stage rollout, step 3: its connection to rank 5 broke\n"
REPORT = (None, r"oneworld: rank 5 \(actor\) on node2, stage \w+, step \d+: its process ended without a report")


def make_world(*outputs: str) -> Cluster:
    nodes: Any = [SimpleNamespace(output=output) for output in outputs]
    return Cluster(nodes, Path())


def tell(world: Cluster, node: int, text: str) -> None:
    nodes: Any = world.nodes
    nodes[node].output += text


def test_a_second_block_that_names_somebody_else_is_not_missed() -> None:
    world = make_world("step 1\n", "step 1\n")

    def do(world: Cluster) -> list:
        tell(world, 0, RIGHT + DETAILS)
        return [REPORT]

    Fault("killed", do).happen(world)
    tell(world, 1, "step 2\n" + WRONG)
    with pytest.raises(AssertionError, match="its connection to rank 5 broke"):
        world.assert_reported()


@pytest.mark.parametrize("told", ["", WRONG, RIGHT + RIGHT, RIGHT + WRONG])
def test_each_failure_is_told_once(told: str) -> None:
    world = make_world(told, "")
    world.expect(REPORT)
    with pytest.raises(AssertionError, match="expected, but told was"):
        world.assert_reported()


def test_right_reports() -> None:
    """Of one fault after the other; the second is told by both sides."""
    world = make_world("", "")
    world.assert_reported()
    tell(world, 0, RIGHT + DETAILS + "step 2\n")
    world.expect((None, REPORT[1] + ALSO_GONE))
    world.assert_reported()
    world.expect((0, REPORT[1]), (1, "oneworld: rank 0 is gone: "))
    tell(world, 1, RIGHT)
    assert not world.reported((0, REPORT[1])), "by that node"
    assert world.reported((None, REPORT[1]))
    assert not world.reported((None, REPORT[1] + ALSO_GONE)), "that was of the block before"
