"""The times of benchmarks/traffic.py, and its table in docs/performance.md."""

import sys

import pytest
import torch

from benchmarks import traffic
from benchmarks.traffic import CASES, Case, Collective, Links, StepModel, UpdateTraffic
from rl.model.shards import TensorInfo
from rl.placement.nodes import Nodes
from tests.launcher import ROOT

LINKS = Links(nvlink=100.0, network=10.0, latency=0.5)
TWO_NODES = Nodes.of(2, 4)
TENSORS = [
    TensorInfo("model.embed_tokens.weight", (10, 3), "bfloat16", True),
    TensorInfo("model.layers.0.mlp.weight", (8, 2), "bfloat16", True),
    TensorInfo("model.layers.1.mlp.weight", (5, 2), "bfloat16", True),
]


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all_gather", (0, 1, 2, 3), 0.5 + 750 / 100),  # on one node: what the other three hold
        ("all_reduce", (0, 1, 2, 3), 0.5 + 2 * 750 / 100),
        ("broadcast", (0, 1), 0.5 + 1000 / 100),
        ("all_gather", tuple(range(8)), 0.5 + 500 / 40),  # the other node's half, over four cards
        ("broadcast", (0, 4, 5, 6, 7), 0.5 + 1000 / 10),  # only one card of the first node
        ("all_reduce", (0, 4), 0.5 + 2 * 500 / 10),
        ("all_gather", (3,), 0.0),
    ],
)
def test_a_collective_takes_its_slowest_link(kind: traffic.Kind, ranks: tuple[int, ...], seconds: float) -> None:
    assert Collective(kind, ranks, 1000).seconds(TWO_NODES, LINKS) == pytest.approx(seconds)


def update_of(case: Case) -> UpdateTraffic:
    return UpdateTraffic.of(TENSORS, case.plan(), weight_bytes=2, gradient_bytes=4)


def test_shards_are_padded_to_equal_rows() -> None:
    update = update_of(CASES[0])  # 8 shards: 2, 1 and 1 rows each
    sizes = [(one.kind, one.num_bytes) for one in update.collectives(1)]
    assert sizes[:5] == [("all_gather", size * 2) for size in (16 * 3, 8 * 2, 8 * 2, 8 * 2, 8 * 2)]
    assert sizes[5:] == [("reduce_scatter", size * 4) for size in (16 * 3, 8 * 2, 8 * 2)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_computation_hides_communication(case: Case) -> None:
    update, nodes = update_of(case), case.plan().nodes
    wire = sum(one.seconds(nodes, LINKS) for one in update.collectives(3))
    exposed = [update.exposed_seconds(3, compute_s, nodes, LINKS) for compute_s in (0.0, 5.0, 1e9)]
    assert exposed[0] == pytest.approx(wire)  # nothing is hidden
    assert exposed[0] > exposed[1] > exposed[2]
    first, root = update.gather(update.layers[0]), [update.gather(update.root), update.reduce(update.root)]
    never = 3 * sum(one.seconds(nodes, LINKS) for one in (first, *root))
    assert exposed[2] == pytest.approx(never + update.reduce_replicas(update.root).seconds(nodes, LINKS))


def test_the_needed_network_adds_five_percent() -> None:
    args = traffic.arguments().parse_args([])
    with torch.device("meta"):
        tensors = traffic.tensors_of(traffic.AutoModelForCausalLM.from_config(traffic.config_of("qwen3-0.6b")))
    model, links = StepModel(CASES[2], tensors, args), Links(300e9, 45e9, 30e-6)
    needed = model.network_needed(links)
    assert needed is not None
    free = model.step_s(model.seconds(links) | {"exposed": 0.0, "sync": 1192099840 / 240e9})
    slow = model.step_s(model.seconds(Links(300e9, needed, 30e-6)))
    assert slow / free == pytest.approx(1.05, abs=0.001)
    assert StepModel(CASES[0], tensors, args).network_needed(links) is None


def test_the_page_has_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["traffic.py", "--table"])
    traffic.main()
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 2 + len(CASES)
    assert table in (ROOT / "docs" / "performance.md").read_text(), f"docs/performance.md should have\n{table}"
