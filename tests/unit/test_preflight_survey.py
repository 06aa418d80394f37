"""What rank 0 asks of a made-up cluster of three nodes with two GPUs each, and what it makes of the answers."""

import time
from collections.abc import Mapping
from typing import Any, cast

import pytest

from launch.checks.control import Hub, Unanswered
from launch.checks.survey import Survey
from launch.checks.table import FAILED, OK, WARNING, Row
from rl.config.load import load_config
from rl.config.schema import ConfigError

GB = 10**9
HOSTS = ["a", "b", "c"]
NUM_LOCAL = 2
CHECKS = ["nodes", "versions", "GPUs", "clocks", "reach", "between nodes", "port", "inside nodes", "run folder"]
CHECKS += ["host memory", "placement", "GPUs between nodes", "GPUs inside nodes"]


class FakeHub:
    """Answers for all ranks; `slow`: pairs of ranks, or the rank that does not come back from NCCL."""

    def __init__(self, slow: tuple[int, int] | None = None, hanging: int | None = None, held_by: str = ""):
        self.slow, self.hanging, self.held_by = slow, hanging, held_by
        self.rate = 2.0 * GB
        self.marks: dict[str, str] = {}
        self.asked: list[str] = []

    def addresses(self) -> dict[int, str]:
        return {rank: f"10.0.0.{rank // NUM_LOCAL}" for rank in range(6)}

    def ask(self, call: str, arguments: Mapping[int, Mapping[str, Any]], timeout_s: float) -> dict[int, Any]:
        self.asked.append(call)
        if call == "measure_gpus" and self.hanging is not None:
            raise Unanswered(f"rank {self.hanging} did not answer in time (measure_gpus)")
        return {rank: getattr(self, call)(rank, **values) for rank, values in arguments.items()}

    def describe(self, rank: int) -> dict[str, Any]:
        node, local = divmod(rank, NUM_LOCAL)
        gpu = {"count": NUM_LOCAL, "name": "H100", "total": 80 * GB, "free": 79 * GB, "index": local}
        memory = {"total": 900 * GB, "available": 800 * GB}
        about = {"gpu": gpu, "host": HOSTS[node], "sink": 1000 + rank, "number": 2 - node, "is_head": node == 2}
        about |= {"head": "c", "port": 29500, "folder": "runs", "settings": "5e7", "code": "c0de", "commit": "abc"}
        about |= {"memory": memory, "gpu_users": []}
        about |= {"shared_memory": {"total": 60 * GB, "free": 60 * GB, "error": ""}}
        return about | ({} if local else {"versions": {"torch": "2.13"}})

    def clock(self, rank: int) -> float:
        return time.time()

    def unreachable(self, rank: int, places: Mapping[str, Any]) -> dict[str, str]:
        return {}

    def send(self, rank: int, address: str, port: int, seconds: float) -> dict[str, float]:
        return {"rate": self.rate}

    def hold_port(self, rank: int, port: int) -> str:
        assert (rank, port) == (4, 29500), "the first rank of the head"
        return self.held_by

    def free_port(self, rank: int) -> None:
        pass

    def mark(self, rank: int, folder: str, mark: str) -> dict[str, Any]:
        self.marks[mark] = folder
        return {"free": 500 * GB, "error": ""}

    def seen(self, rank: int, folder: str, marks: list[str]) -> list[str]:
        return [mark for mark in marks if mark in self.marks]

    def unmark(self, rank: int, folder: str, mark: str) -> None:
        self.marks.pop(mark)

    def measure_gpus(self, rank: int, size: int, store: Any, partners: list[int | None]) -> list[float | None]:
        def rate(partner: int) -> float:
            if self.slow is not None and {rank, partner} == {*self.slow}:
                return 4.0 * GB
            return (300.0 if partner // NUM_LOCAL == rank // NUM_LOCAL else 40.0) * GB

        return [None if partner is None else rate(partner) for partner in partners]


def survey(hub: FakeHub, *settings: str, trains: bool = True) -> tuple[dict[str, Row], Survey]:
    asked = Survey(cast(Hub, hub), 6, NUM_LOCAL, load_config(overrides=[*settings]), saves=trains, trains=trains)
    return {row.name: row for row in asked.rows()}, asked


def test_a_healthy_cluster() -> None:
    hub = FakeHub()
    rows, asked = survey(hub)
    assert {name: row.state for name, row in rows.items()} == dict.fromkeys(CHECKS, OK), rows
    assert rows["GPUs"].result == "2 x H100 on every node, free"
    assert rows["port"].result == "29500 of node 0 (c) is free, and all nodes reach it"
    assert rows["run folder"].result.startswith("shared by all nodes, 500.00 GB free")
    assert rows["GPUs between nodes"].result == "40.00 GB/s to 40.00 GB/s, 12 links"  # 3 pairs, 2 GPUs, both ways
    assert rows["GPUs inside nodes"].result == "300.00 GB/s to 300.00 GB/s, 6 links"
    assert not hub.marks and asked.is_whole


def test_evaluating_alone_needs_less_than_training() -> None:
    """The shipped model of 307,840 parameters on 6 ranks: 16 bytes of each, or 4."""
    (training,), (evaluating,) = (survey(FakeHub(), trains=trains)[0]["placement"].details for trains in (True, False))
    assert "each 820.91 kB learner" in training and "each 205.23 kB learner" in evaluating
    assert "checkpoint" not in survey(FakeHub(), trains=False)[0]["run folder"].result


def test_a_slow_pair_of_gpus_is_named_by_rank() -> None:
    rows, _ = survey(FakeHub(slow=(1, 3)))
    assert [name for name, row in rows.items() if row.state != OK] == ["GPUs between nodes"]
    row = rows["GPUs between nodes"]
    assert row.state == FAILED
    assert row.result.startswith("rank 1 (a) and rank 3 (b): 4.00 GB/s, where 40.00 GB/s is usual; look at")


def test_a_slow_network_is_told_and_ends_nothing() -> None:
    hub = FakeHub()
    hub.rate = 0.05 * GB
    rows, _ = survey(hub)
    assert {name: row.state for name, row in rows.items() if row.state != OK} == {"between nodes": WARNING}
    assert rows["between nodes"].result.startswith("all links are slow: 0.05 GB/s to 0.05 GB/s; ")


def test_gpus_that_hang_come_last_and_leave_the_other_rows() -> None:
    hub = FakeHub(hanging=3)
    rows, asked = survey(hub)
    assert list(rows) == [*CHECKS[:-2], "GPUs over NCCL"] and hub.asked[-1] == "measure_gpus"
    assert rows["GPUs over NCCL"].result.startswith("rank 3 did not answer in time (measure_gpus)")
    assert not asked.is_whole


def test_marks_are_removed_also_when_a_rank_fails() -> None:
    """The second node, which then does not remove its own either."""
    hub = FakeHub()
    remove = hub.unmark

    def fail(rank: int, **values: Any) -> Any:
        if rank == 2:
            raise Unanswered("rank 2 on b ended (seen)")
        return []

    def unmark(rank: int, folder: str, mark: str) -> None:
        fail(rank)
        remove(rank, folder, mark)

    hub.seen, hub.unmark = fail, unmark  # type: ignore[method-assign]
    with pytest.raises(Unanswered, match="rank 2 on b ended"):
        survey(hub)
    assert [mark[-1] for mark in hub.marks] == ["1"]


def test_a_held_port_is_not_knocked_at() -> None:
    hub = FakeHub(held_by="process 7 (x)")
    rows, _ = survey(hub)
    assert rows["port"].state == FAILED and "node 0 (c) is held by process 7 (x)" in rows["port"].result
    assert hub.asked.count("unreachable") == 1


def test_shared_gpus_are_not_measured_and_settings_that_one_node_refuses_end_it() -> None:
    hub = FakeHub()
    rows, _ = survey(hub, "debug.share_gpu=true")
    assert "measure_gpus" not in hub.asked and list(rows) == CHECKS[:-2]
    hub.describe = lambda rank: {"config_error": "no file", "host": "b"}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="b: no file"):
        survey(hub)


def test_nodes_with_unequal_numbers_of_ranks_are_refused() -> None:
    """1, 2 and 3 ranks on three nodes are 6 too."""
    hub = FakeHub()
    plain = hub.describe
    leads = {0: 0, 1: 2, 3: 4}
    hub.describe = lambda rank: plain(leads.get(rank, 1))  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="got 6 ranks, 2 of them on the node of rank 0; all nodes need equally many"):
        survey(hub)
