"""The rules of preflight on made-up clusters: outliers, slow pairs, full disks, busy GPUs; and the table."""

from itertools import combinations, permutations
from typing import Any

import pytest

from launch.checks import rules
from launch.checks.bandwidth import Link, describe_slow, pair_rounds, slow_links, usual_rate
from launch.checks.results import (
    FAILED,
    OK,
    WARNING,
    CheckResult,
    format_nodes,
    format_table,
    format_verdict,
    summarize,
)
from rl.placement.nodes import Nodes


def named(*hosts: str) -> list[str]:
    return [f"node {number} ({host})" for number, host in enumerate(hosts)]


NAMES = named("a", "b", "c", "d")
GB = 10**9


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["1", "1", "1"], ""),
        (["1", "2", "1"], "2 on node 1 (b), 1 on the others"),
        (["3", "1", "1", "2", "1"], "3 on node 0 (a), 2 on node 3 (d), 1 on the others"),
        (["1", "2"], "1 on node 0 (a), 2 on node 1 (b)"),
        (["1", "1", "2", "2"], "1 on node 0 (a), node 1 (b), 2 on node 2 (c), node 3 (d)"),
        (["1"], ""),
    ],
)
def test_outliers(values: list[str], text: str) -> None:
    assert rules.describe_outliers(values, named("a", "b", "c", "d", "e")) == text


def facts(**versions: str) -> dict[str, Any]:
    found = {"python": "3.11", "torch": "2.13", "vllm": "0.32", "code": "c0de", "settings": "5e7"}
    return {"versions": found | versions, "commit": "abc"}


def test_versions_that_differ_are_named() -> None:
    row = rules.check_versions([facts()] * 4, NAMES)
    assert row == CheckResult("versions", OK, "commit abc, python 3.11, torch 2.13, vllm 0.32")
    row = rules.check_versions([facts() | {"commit": "abc+changes"}] * 4, NAMES)
    assert row.text == "commit abc+changes, python 3.11, torch 2.13, vllm 0.32, code c0de"
    row = rules.check_versions([facts(), facts(vllm="0.31"), facts(), facts(driver="570")], NAMES)
    assert (row.state, row.text) == (
        FAILED,
        "vllm: 0.31 on node 1 (b), 0.32 on the others; install the same on all nodes",
    )
    assert row.details == ["driver: 570 on node 3 (d), absent on the others; mixed drivers may work"]
    row = rules.check_versions([facts(python="3.12"), facts()], named("a", "b"))
    assert (row.state, row.text[:48]) == (WARNING, "python: 3.12 on node 0 (a), 3.11 on node 1 (b); ")
    changed = facts(code="d1ff")
    assert rules.check_versions([facts(), facts(), changed], named("a", "b", "c")).text.startswith(
        "code: d1ff on node 2 (c), c0de on the others (a digest of the project's programs and "
    )


@pytest.mark.parametrize("count", range(2, 10))
def test_rounds_contain_every_pair_once_and_no_member_twice(count: int) -> None:
    found = pair_rounds(count)
    assert sorted(pair for pairs in found for pair in pairs) == sorted(combinations(range(count), 2))
    assert all(len({*sum(pairs, ())}) == 2 * len(pairs) for pairs in found)
    assert len(found) == count - 1 + count % 2


def rates(count: int, usual: float, **slow: float) -> dict[Link, float]:
    """Return rates of all directed links: `usual`, except for those given as _FROM_TO."""
    given = {(int(name[1]), int(name[3])): rate for name, rate in slow.items()}
    return dict.fromkeys(permutations(range(count), 2), usual) | given


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (rates(4, 1.0 * GB), []),
        (rates(4, 1.0 * GB, _1_2=0.01 * GB), ["node 1 (b) to node 2 (c): 10 MB/s"]),
        (rates(4, 1.0 * GB, _1_2=0.2 * GB, _2_1=0.1 * GB), ["node 1 (b) and node 2 (c): 0.10 GB/s"]),
        (rates(4, 1.0 * GB, _1_0=1e7, _1_2=2e7, _1_3=1e7), ["node 1 (b) sends slowly to all: 20 MB/s at best"]),
        (rates(3, 1.0 * GB, _0_2=1e7, _1_2=2e7), ["node 2 (c) receives slowly from all: 20 MB/s at best"]),
        (
            rates(3, 1.0 * GB, _0_2=1e7, _1_2=2e7, _2_0=1e7, _2_1=1e7),
            ["node 2 (c) is slow with all others: 20 MB/s at best"],
        ),
        (rates(2, 1.0 * GB, _1_0=1e7), ["node 1 (b) to node 0 (a): 10 MB/s"]),
        (rates(4, 1.0 * GB, _1_2=0.31 * GB), []),  # above the floor
        (rates(4, 0.2 * GB, _1_2=0.11 * GB), []),  # not below half of the others
        (rates(2, 0.0), ["node 0 (a) and node 1 (b): 0 MB/s"]),  # nothing gets through
    ],
)
def test_slow_pairs_are_described(found: dict[Link, float], lines: list[str]) -> None:
    assert describe_slow(slow_links(found, 0.3 * GB), found, NAMES) == lines


def test_one_slow_node_of_three_does_not_change_the_usual_rate() -> None:
    """4 of the 6 links are slow; the nodes reach at best 1, 1 and 0.01 GB/s."""
    assert usual_rate(rates(3, 1.0 * GB, _0_2=1e7, _1_2=1e7, _2_0=1e7, _2_1=1e7)) == 1.0 * GB


def test_a_slow_link_fails_the_check_of_rates() -> None:
    row = rules.check_rates("between nodes", rates(4, 2.0 * GB, _1_2=0.01 * GB), 0.3 * GB, NAMES)
    assert row.state == FAILED and row.text.startswith("node 1 (b) to node 2 (c): 10 MB/s, where 2.00 GB/s is usual; ")
    row = rules.check_rates("between nodes", rates(3, 2.0 * GB, _1_2=1.5 * GB), 0.3 * GB, NAMES)
    assert row == CheckResult("between nodes", OK, "1.50 GB/s to 2.00 GB/s, 6 links")


@pytest.mark.parametrize(
    ("found", "state", "text"),
    [
        (rates(2, 0.11 * GB), OK, "0.11 GB/s to 0.11 GB/s, 2 links"),  # a gigabit a second
        (rates(2, 0.011 * GB), WARNING, "all links are slow: 11 MB/s to 11 MB/s; look at which interface"),
        (rates(4, 0.09 * GB, _1_2=0.06 * GB), WARNING, "all links are slow: 0.06 GB/s to 0.09 GB/s; look"),
        (rates(4, 0.15 * GB, _1_2=0.09 * GB), WARNING, "node 1 (b) to node 2 (c): 0.09 GB/s, but 0.10 GB/s or more is"),
        (rates(4, 0.09 * GB, _1_2=0.01 * GB), FAILED, "node 1 (b) to node 2 (c): 10 MB/s, where 0.09 GB/s is usual;"),
    ],
)
def test_links_may_be_slow_in_absolute_terms(found: dict[Link, float], state: str, text: str) -> None:
    row = rules.check_rates("between nodes", found, 0.3 * GB, NAMES, least=0.1 * GB)
    assert (row.state, row.text[: len(text)]) == (state, text)
    assert len(row.details) == int(state == FAILED), "all links are slow, in one line"
    assert rules.check_rates("inside nodes", rates(2, 0.01 * GB), 0.3 * GB, NAMES).state == OK


def gpu(free_gb: float = 79.0, count: int = 2, index: int = 0) -> dict[str, Any]:
    return {"count": count, "name": "H100", "free": int(free_gb * GB), "total": 80 * GB, "index": index}


def test_gpus_that_are_missing_busy_or_broken() -> None:
    two = named("a", "b")

    def check(gpus: list[dict[str, Any]], share: bool = False) -> CheckResult:
        return rules.check_gpus(gpus, Nodes((2, 2)), share, [["77, python, 40000 MiB"], []], two)

    good = [gpu(index=index) for index in (0, 1)]
    assert check([{}] * 4) == CheckResult("GPUs", OK, "none: all ranks run on CPUs")
    assert check(good * 2) == CheckResult("GPUs", OK, "2 x H100 on every node, free")
    row = check([good[0], gpu(30, index=1), *good])
    text = "GPU 1 of node 0 (a) has 50.00 GB of 80.00 GB in use (processes there: 77, python, 40000 MiB); "
    text += "end the processes that use it"
    assert (row.state, row.text) == (FAILED, text)
    row = check([good[0], gpu(71, index=1), *good])
    assert (row.state, row.text) == (WARNING, text.replace("50.00 GB of", "9.00 GB of"))
    assert check([*good, good[0], gpu(71, index=1)]).state == OK, "the driver's own use, since no process is named"
    row = check([*good, good[0], {"count": 2, "index": 1, "error": "CUDA error: uncorrectable ECC error"}])
    assert (row.state, row.text[:55]) == (FAILED, "GPU 1 of node 1 (b) cannot be used: CUDA error: uncorre")
    row = check([*good, gpu(count=1), {"count": 1}])
    assert (row.state, row.text[:36]) == (FAILED, "node 1 (b) has 1 for 2 ranks; give -")
    assert check([*good, gpu(count=1), gpu(count=1)], share=True).state == OK
    assert check([gpu(count=8)] * 4).state == WARNING
    row = check([*good, {}, {}])
    assert row.state == FAILED and "node 1 (b) has none that torch can use" in row.text
    unusable = {"count": 0, "unusable_because": "CUDA_VISIBLE_DEVICES is empty"}
    assert check([unusable] * 4).text == "there are GPUs, but CUDA_VISIBLE_DEVICES is empty: all ranks run on CPUs"


def test_clocks_reachability_and_port() -> None:
    assert rules.check_clocks([0.0, 0.02, -0.4], NAMES[:3]) == CheckResult("clocks", OK, "within 400 ms")
    row = rules.check_clocks([0.0, -3.25], NAMES[:2])
    assert (row.state, row.text[:25]) == (WARNING, "node 1 (b) is -3.2 s off;")
    row = rules.check_reach({(0, 2): "timed out", (1, 2): "timed out"}, NAMES)
    assert row.state == FAILED and row.text.startswith("node 0 (a) cannot reach node 2 (c): timed out; open all TCP")
    assert len(row.details) == 1
    assert rules.check_port(29500, "", {}, "node 0 (a)", NAMES).state == OK
    row = rules.check_port(29500, "process 7 (x)", {}, "node 0 (a)", NAMES)
    assert row.text == "port 29500 of node 0 (a) is held by process 7 (x); end it, or give another --port"
    row = rules.check_port(29500, "", {2: "No route to host"}, "node 0 (a)", NAMES)
    assert (row.state, row.text[:65]) == (FAILED, "node 2 (c) cannot reach port 29500 of node 0 (a): No route to hos")


def test_nodes_that_share_a_disk_form_a_group() -> None:
    assert rules.group_by_disk([[0, 1, 2]] * 3) == [[0, 1, 2]]
    assert rules.group_by_disk([[0], [1], [2]]) == [[0], [1], [2]]
    assert rules.group_by_disk([[0, 1], [0, 1], [2]]) == [[0, 1], [2]]
    assert rules.group_by_disk([[], [1]]) == [[0], [1]], "a node that could not leave a marker sees none"


def folder(free_gb: float, error: str = "") -> dict[str, Any]:
    return {"path": "runs", "free": int(free_gb * GB), "error": error}


def test_room_for_checkpoints() -> None:
    """Each of 4 nodes writes 1 GB of a checkpoint; 3 are kept."""
    share = [GB] * 4
    apart, together = [[node] for node in range(4)], [[0, 1, 2, 3]]
    row = rules.check_folder([folder(3.5)] * 4, apart, share, 3, NAMES)
    assert row == CheckResult("run folder", OK, "private to each node, 3.50 GB free, a checkpoint takes 4.00 GB")
    row = rules.check_folder([folder(3.5)] * 4, together, share, 3, NAMES)
    assert (row.state, row.text[:57]) == (FAILED, "runs on all 4 nodes has 3.50 GB left, and a checkpoint an")
    row = rules.check_folder([folder(5)] * 4, together, share, 3, NAMES)
    assert (row.state, row.text[:70]) == (
        WARNING,
        "runs on all 4 nodes has 5.00 GB left, and 3 checkpoints take 12.00 GB;",
    )
    row = rules.check_folder([folder(9), folder(9), folder(0.5), folder(9)], apart, share, 3, NAMES)
    assert row.state == FAILED and row.text.startswith("runs on node 2 (c) has 500.00 MB left, and a checkpoint and")
    row = rules.check_folder([folder(9, "Read-only file system: runs"), *[folder(9)] * 3], apart, [], 3, NAMES)
    assert row.state == FAILED and row.text.startswith("runs on node 0 (a) cannot be written to: Read-only file")
    unknown = {"path": "runs", "error": "No such file or directory: /proc/runs"}
    row = rules.check_folder([unknown, *[folder(9)] * 3], apart, share, 3, NAMES)
    assert row.state == FAILED and row.text.startswith("runs on node 0 (a) cannot be written to: No such file or dir")
    row = rules.check_folder([folder(9)] * 4, [[0, 1], [2], [3]], [], 3, NAMES)
    assert row.state == WARNING and "node 0 (a), node 1 (b); node 2 (c); node 3 (d)" in row.text


def test_host_memory() -> None:
    def node(available_gb: int, shm_gb: float = 60, error: str = "") -> dict[str, Any]:
        shared = {"total": int(shm_gb * GB), "free": int(shm_gb * GB), "error": error}
        return {"memory": {"total": 100 * GB, "available": available_gb * GB}, "shared_memory": shared}

    two = named("a", "b")
    row = rules.check_memory([node(90), node(80)], [50 * GB, 40 * GB], True, two)
    text = "80.00 GB available, /dev/shm 60.00 GB free; the ranks of a node take at least 50.00 GB"
    assert row == CheckResult("host memory", OK, text)
    assert rules.check_memory([node(90), node(30)], [50 * GB, 40 * GB], True, two).state == WARNING
    row = rules.check_memory([node(90), node(30)], [50 * GB, 101 * GB], True, two)
    assert row.state == FAILED and row.text.startswith("node 1 (b) has 30.00 GB of 100.00 GB available, and its ranks")
    small = [node(90), node(90, 0.064)]
    assert rules.check_memory(small, [], True, two).text.startswith("node 1 (b) has 64.00 MB of /dev/shm")
    assert rules.check_memory(small, [], False, two).state == OK
    assert rules.check_memory([node(90), node(90, 0, "/dev/shm: none")], [], False, two).state == FAILED


def test_table_and_verdict() -> None:
    findings = [(WARNING, "a driver"), (FAILED, "a version")]
    rows = [CheckResult("nodes", OK, "2 nodes"), summarize("versions", findings, "equal")]
    assert summarize("versions", [(OK, "a note")], "equal") == CheckResult("versions", OK, "equal", ["a note"])
    assert rows[1] == CheckResult("versions", FAILED, "a version", ["a driver"])
    assert format_table(rows).splitlines() == [
        "check     state   result",
        "nodes     ok      2 nodes",
        "versions  FAILED  a version",
        "                  a driver",
    ]
    assert format_verdict(rows, 2, 16, 3.21) == "preflight: 1 problem: versions: a version"
    both = [*rows, CheckResult("port", FAILED, "busy")]
    assert format_verdict(both, 2, 16, 3.21) == "preflight: 2 problems: versions: a version; port: busy"
    assert format_verdict(rows[:1], 4, 32, 12.34) == "preflight: ready, 4 nodes, 32 ranks, 12.3 s"
    warned = [CheckResult("clocks", WARNING, "late")]
    assert format_verdict(warned, 1, 1, 1.0) == "preflight: ready, 1 node, 1 rank, 1.0 s, 1 warning"


def test_names_of_nodes() -> None:
    assert format_nodes([0, 1], ["node 10 (a)", "node 2 (b)", "node 1 (c)"]) == "node 2 (b), node 10 (a)"
    many = named(*[f"n{number}" for number in range(9)])
    assert format_nodes(range(8), many).endswith("node 5 (n5) and 2 more")
    assert format_nodes(range(9), many) == "all 9 nodes"
