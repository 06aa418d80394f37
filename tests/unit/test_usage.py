"""The memory of ranks and nodes, and the use of GPUs, as metrics."""

import pytest

from rl.placement.nodes import Nodes
from rl.watch.usage import ResourceUse, measurements

NODES = Nodes((2, 1)).numbers
GB = 2**20 / 1e9  # of one MiB


def test_metrics_are_the_highest_memory_and_the_mean_utilization_of_each_rank() -> None:
    use = ResourceUse()
    assert use.take(NODES) == {}
    use.add(measurements({0: {"pid": 1}, 1: {"gpu_memory_mb": 1000, "gpu_utilization": 100}, 2: {"gpu_memory_mb": 5}}))
    use.add([[1, -1, 3000, 50], [1, -1, 2000, 0]])
    assert use.take(NODES) == {
        "gpu/memory_gb/rank_1": 3000 * GB,
        "gpu/utilization/rank_1": 50.0,
        "gpu/memory_gb/rank_2": 5 * GB,
    }
    assert use.take(NODES) == {}


def test_the_memory_of_a_node_is_that_of_its_ranks() -> None:
    use = ResourceUse()
    use.add(measurements({0: {"memory_mb": 100}, 1: {"memory_mb": 20}, 2: {"memory_mb": 7}}))
    use.add(measurements({0: {"memory_mb": 90}, 1: {"memory_mb": 30}}))
    assert use.take(NODES) == pytest.approx({"host/memory_gb/node_0": 130 * GB, "host/memory_gb/node_1": 7 * GB})
    use.add(measurements({1: {"memory_mb": 50}}))  # a short step, in which only one watchdog had time to measure
    assert use.take(NODES) == pytest.approx({"host/memory_gb/node_0": 150 * GB, "host/memory_gb/node_1": 7 * GB})


def test_many_ranks_and_nodes_have_three_metrics_each() -> None:
    use = ResourceUse()
    use.add([[rank, 8, 1000 + rank, rank % 100] for rank in range(130)])
    metrics = use.take([rank // 2 for rank in range(130)])
    assert metrics == pytest.approx(
        {
            **{"gpu/memory_gb/rank_min": 1000 * GB, "gpu/memory_gb/rank_median": 1064.5 * GB},
            **{"gpu/memory_gb/rank_max": 1129 * GB, "gpu/utilization/rank_min": 0, "gpu/utilization/rank_max": 99},
            **{"gpu/utilization/rank_median": 34.5},  # 0 to 29 twice, 30 to 99 once
            **{f"host/memory_gb/node_{name}": 16 * GB for name in ("min", "median", "max")},
        }
    )
