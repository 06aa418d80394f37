"""Rank 0's checks of a made-up cluster of three nodes with two GPUs each."""

import time
from collections.abc import Mapping
from typing import Any, cast

import pytest

from launch.checks.cluster import ClusterCheck
from launch.checks.results import FAILED, OK, WARNING, CheckResult
from launch.checks.rpc import Coordinator, NoAnswer
from rl.config.load import load_config
from rl.config.schema import ConfigError

GB = 10**9
HOSTS = ["a", "b", "c"]
NUM_LOCAL = 2
CHECKS = ["nodes", "versions", "GPUs", "clocks", "reach", "between nodes", "port", "inside nodes", "run folder"]
CHECKS += ["host memory", "placement", "GPUs between nodes", "GPUs inside nodes"]


class FakeCoordinator:
    """Answer for all ranks. `slow` is a slow pair of ranks, `hanging` a rank that hangs in NCCL."""

    def __init__(self, slow: tuple[int, int] | None = None, hanging: int | None = None, held_by: str = ""):
        self.slow, self.hanging, self.held_by = slow, hanging, held_by
        self.rate, self.num_ranks = 2.0 * GB, 6
        self.links: set[frozenset[int]] = set()  # of GPUs, that were measured
        self.markers: dict[str, str] = {}
        self.asked: list[str] = []

    def node_of(self, rank: int) -> int:
        return rank // NUM_LOCAL

    def addresses(self) -> dict[int, str]:
        return {rank: f"10.0.0.{self.node_of(rank)}" for rank in range(6)}

    def ask(self, question: str, arguments: Mapping[int, Mapping[str, Any]], timeout_s: float = 1.0) -> dict[int, Any]:
        self.asked += [question] if arguments else []
        if question == "measure_gpus" and self.hanging is not None:
            raise NoAnswer(f"rank {self.hanging} did not answer in time (measure_gpus)")
        return {rank: getattr(self, question)(rank, **values) for rank, values in arguments.items()}

    def describe(self, rank: int) -> dict[str, Any]:
        node, local = divmod(rank, NUM_LOCAL)
        gpu = {"count": NUM_LOCAL, "name": "H100", "total": 80 * GB, "free": 79 * GB, "index": local}
        memory = {"total": 900 * GB, "available": 800 * GB}
        found: dict[str, Any] = {"config_error": "", "gpu": gpu, "host": HOSTS[node], "sink": 1000 + rank}
        about = {
            "number": 2 - node,
            "is_head": node == 2,
            "head": "c",
            "port": 29500,
            "folder": "runs",
            "commit": "abc",
        }
        about |= {"memory": memory, "gpu_users": []}
        about |= {"shared_memory": {"total": 60 * GB, "free": 60 * GB, "error": ""}}
        about |= {"versions": {"torch": "2.13", "code": "c0de", "settings": "5e7"}}
        return found | ({} if local else {"node": about})

    def read_clock(self, rank: int) -> float:
        return time.time()

    def find_unreachable(self, rank: int, places: Mapping[str, Any]) -> dict[str, str]:
        return {}

    def measure_rate(self, rank: int, address: str, port: int, seconds: float) -> float:
        return self.rate

    def hold_port(self, rank: int, port: int) -> str:
        assert (rank, port) == (4, 29500), "the first rank of the head"
        return self.held_by

    def write_marker(self, rank: int, folder: str, marker: str) -> dict[str, Any]:
        self.markers[marker] = folder
        return {"free": 500 * GB, "error": ""}

    def find_markers(self, rank: int, folder: str, markers: list[str]) -> list[str]:
        return [marker for marker in markers if marker in self.markers]

    def remove_marker(self, rank: int, folder: str, marker: str) -> None:
        self.markers.pop(marker)

    def measure_gpus(self, rank: int, size: int, store: Any, partners: list[int | None]) -> list[float | None]:
        def rate(partner: int) -> float:
            if self.slow is not None and {rank, partner} == {*self.slow}:
                return 4.0 * GB
            return (300.0 if self.node_of(partner) == self.node_of(rank) else 40.0) * GB

        self.links |= {frozenset((rank, partner)) for partner in partners if partner is not None}
        return [None if partner is None else rate(partner) for partner in partners]


class UnevenCoordinator(FakeCoordinator):
    """Two nodes: ranks 0-3 on the first one, ranks 4-5 on the second."""

    def node_of(self, rank: int) -> int:
        return rank // 4

    def describe(self, rank: int) -> dict[str, Any]:
        found = super().describe(2 * (rank // 4))
        node = found.pop("node") | {"is_head": rank == 0, "head": "a", "number": rank // 4}
        gpu = found["gpu"] | {"count": 2 if rank > 3 else 4, "index": rank % 4}
        found |= {"gpu": gpu, "host": HOSTS[rank // 4], "sink": 1000 + rank}
        return found | ({"node": node} if rank in (0, 4) else {})

    def hold_port(self, rank: int, port: int) -> str:
        assert (rank, port) == (0, 29500)
        return ""


def check(
    coordinator: FakeCoordinator, *settings: str, trains: bool = True
) -> tuple[dict[str, CheckResult], ClusterCheck]:
    config = load_config(overrides=[*settings])
    cluster = ClusterCheck(cast(Coordinator, coordinator), config, saves=trains, trains=trains)
    return {result.name: result for result in cluster.run()}, cluster


def test_a_healthy_cluster() -> None:
    coordinator = FakeCoordinator()
    rows, cluster = check(coordinator)
    assert {name: row.state for name, row in rows.items()} == dict.fromkeys(CHECKS, OK), rows
    assert rows["GPUs"].text == "2 x H100 on every node, free"
    assert rows["port"].text == "29500 of node 0 (c) is free, and all nodes reach it"
    assert rows["run folder"].text.startswith("shared by all nodes, 500.00 GB free")
    assert rows["GPUs between nodes"].text == "40.00 GB/s to 40.00 GB/s, 12 links"  # 3 pairs, 2 GPUs, both ways
    assert rows["GPUs inside nodes"].text == "300.00 GB/s to 300.00 GB/s, 6 links"
    assert not coordinator.markers and cluster.all_alive


def test_nodes_may_have_different_numbers_of_ranks() -> None:
    """4 and 2 ranks: 2 links between GPUs of the nodes, 6 + 1 inside them, each measured in both directions."""
    coordinator = UnevenCoordinator()
    rows, cluster = check(coordinator)
    assert {name: row.state for name, row in rows.items()} == dict.fromkeys(CHECKS, OK), rows
    assert rows["nodes"].text == "2 nodes with 4 and 2 ranks"
    assert rows["GPUs"].text == "4 and 2 x H100 on the nodes, free"
    assert rows["placement"].text.startswith("6 ranks on 2 nodes (4 and 2 ranks)")
    inside = {frozenset((a, b)) for ranks in (range(4), range(4, 6)) for a in ranks for b in ranks if a < b}
    assert coordinator.links == inside | {frozenset((0, 4)), frozenset((1, 5))}
    assert cluster.num_nodes == 2


def test_evaluating_alone_needs_less_than_training() -> None:
    """The shipped model of 307,840 parameters on 6 ranks: 16 bytes of each, or 4."""
    (training,), (evaluating,) = (
        check(FakeCoordinator(), trains=trains)[0]["placement"].details for trains in (True, False)
    )
    assert "each 820.91 kB policy" in training and "each 205.23 kB policy" in evaluating
    assert "checkpoint" not in check(FakeCoordinator(), trains=False)[0]["run folder"].text


def test_every_copy_of_a_checkpoint_takes_room_on_private_disks() -> None:
    """The shipped model of 307,840 parameters in float32: 12 bytes of each on a shared disk, 24 on private ones."""
    coordinator = FakeCoordinator()
    texts = [check(coordinator, "checkpoint.copies=2")[0]["run folder"].text]
    coordinator.find_markers = lambda rank, folder, markers: [markers[rank // NUM_LOCAL]]  # type: ignore[method-assign]
    texts.append(check(coordinator, "checkpoint.copies=2")[0]["run folder"].text)
    assert texts[0] == "shared by all nodes, 500.00 GB free, a checkpoint takes 3.69 MB"
    assert texts[1] == "private to each node, 500.00 GB free, a checkpoint takes 7.39 MB"


def test_a_slow_pair_of_gpus_is_named_by_rank() -> None:
    rows, _ = check(FakeCoordinator(slow=(1, 3)))
    assert [name for name, row in rows.items() if row.state != OK] == ["GPUs between nodes"]
    row = rows["GPUs between nodes"]
    assert row.state == FAILED
    assert row.text.startswith("rank 1 (a) and rank 3 (b): 4.00 GB/s, where 40.00 GB/s is usual; look at")


def test_a_slow_network_is_only_a_warning() -> None:
    coordinator = FakeCoordinator()
    coordinator.rate = 0.05 * GB
    rows, _ = check(coordinator)
    assert {name: row.state for name, row in rows.items() if row.state != OK} == {"between nodes": WARNING}
    assert rows["between nodes"].text.startswith("all links are slow: 0.05 GB/s to 0.05 GB/s; ")


def test_gpus_that_hang_leave_the_results_of_the_other_checks() -> None:
    coordinator = FakeCoordinator(hanging=3)
    rows, cluster = check(coordinator)
    assert list(rows) == [*CHECKS[:-2], "GPUs over NCCL"] and coordinator.asked[-1] == "measure_gpus"
    assert rows["GPUs over NCCL"].text.startswith("rank 3 did not answer in time (measure_gpus)")
    assert not cluster.all_alive


def test_markers_are_removed_even_if_a_rank_fails() -> None:
    """The second node fails, and then does not remove its own marker either."""
    coordinator = FakeCoordinator()
    remove = coordinator.remove_marker

    def fail(rank: int, **values: Any) -> Any:
        if rank == 2:
            raise NoAnswer("rank 2 on b ended (find_markers)")
        return []

    def remove_marker(rank: int, folder: str, marker: str) -> None:
        fail(rank)
        remove(rank, folder, marker)

    coordinator.find_markers, coordinator.remove_marker = fail, remove_marker  # type: ignore[method-assign]
    with pytest.raises(NoAnswer, match="rank 2 on b ended"):
        check(coordinator)
    assert [marker[-1] for marker in coordinator.markers] == ["1"]


def test_other_nodes_do_not_try_a_port_that_is_held() -> None:
    coordinator = FakeCoordinator(held_by="process 7 (x)")
    rows, _ = check(coordinator)
    assert rows["port"].state == FAILED and "node 0 (c) is held by process 7 (x)" in rows["port"].text
    assert coordinator.asked.count("find_unreachable") == 1


def test_shared_gpus_are_not_measured() -> None:
    coordinator = FakeCoordinator()
    rows, _ = check(coordinator, "debug.share_gpu=true")
    assert "measure_gpus" not in coordinator.asked and list(rows) == CHECKS[:-2]


def test_settings_that_one_node_refuses_end_the_checks() -> None:
    coordinator = FakeCoordinator()
    coordinator.describe = lambda rank: {"config_error": "no file", "host": "b"}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="b: no file"):
        check(coordinator)
