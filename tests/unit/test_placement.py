"""The placement grammar: what each form gives, and what each mistake says."""

import re
from typing import Any, NamedTuple

import pytest
import yaml

from rl.config.schema import ConfigError
from rl.placement.nodes import Nodes
from rl.placement.roles import Placement, plan

MISSION = {"rollout": "0-19", "inference": "20-23", "actor": "24-31"}


def span(first: int, end: int) -> list[int]:
    return list(range(first, end))


def counts(placement: Placement) -> tuple[int, int, int]:
    return len(placement.ranks("rollout")), len(placement.ranks("inference")), len(placement.ranks("actor"))


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("0-2,5,7", [0, 1, 2, 5, 7]),
        (" 6 , 0-1 ", [0, 1, 6]),
        (3, [3]),
        ("3", [3]),
        ([0, 4, 6], [0, 4, 6]),
        (["0-2", 5], [0, 1, 2, 5]),
        ("4 ranks", [0, 1, 2, 3]),
        ("1 rank", [0]),
        ("25%", [0, 1]),
        ("12.5%", [0]),
    ],
)
def test_a_value_and_the_rest(value: Any, ranks: list[int]) -> None:
    placement = plan({"rollout": value, "actor": "rest"}, 1, 8)
    assert placement.ranks("rollout") == ranks
    assert placement.ranks("actor") == [rank for rank in range(8) if rank not in ranks]
    assert placement.engines == tuple((rank,) for rank in ranks)


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_all(world_size: int) -> None:
    placement = plan({"actor,rollout": "all"}, 1, world_size)
    assert placement.roles == (("rollout", "actor"),) * world_size
    assert placement.scorers == []
    assert placement.leader == 0


def test_order_of_relative_entries_is_the_order_of_ranks() -> None:
    placement = plan({"actor": "2 ranks", "inference": "rest", "rollout": "37.5%"}, 1, 8)
    assert placement.actors == [0, 1]
    assert placement.ranks("inference") == [2, 3, 4]
    assert placement.ranks("rollout") == [5, 6, 7]


SHARES = {"rollout": "62.5%", "inference": "12.5%", "actor": "25%"}
DOCUMENTED = {"rollout": "62.5%", "inference": "4 ranks", "actor": "rest"}
THIRDS = {"rollout": "33.3%", "inference": "33.3%", "actor": "33.4%"}


@pytest.mark.parametrize(
    ("spec", "world_size", "tp", "expected"),
    [
        (SHARES, 8, 1, (5, 1, 2)),
        (SHARES, 16, 1, (10, 2, 4)),
        (SHARES, 32, 1, (20, 4, 8)),
        (SHARES, 16, 2, (10, 2, 4)),
        (DOCUMENTED, 16, 1, (10, 4, 2)),
        (DOCUMENTED, 32, 1, (20, 4, 8)),
        (THIRDS, 7, 1, (2, 3, 2)),  # boundaries 2.331 -> 2, 4.662 -> 5, 7
        ({"rollout": "50%", "inference": "25%", "actor": "25%"}, 5, 1, (2, 2, 1)),  # 2.5 -> 2 (to even), 3.75 -> 4, 5
        ({"rollout": "75%", "actor": "rest"}, 3, 1, (2, 0, 1)),
        ({"rollout": "75%", "actor": "25%"}, 7, 1, (5, 0, 2)),  # 5.25 -> 5
        ({"rollout": "10%", "actor": "rest"}, 4, 1, (1, 0, 3)),  # 0.4 -> 0, but at least one
        ({"rollout": "50%", "actor": "rest"}, 6, 2, (4, 0, 2)),  # 3 ranks are 1.5 engines -> 2
        ({"rollout": "62.5%", "actor": "rest"}, 16, 4, (8, 0, 8)),  # 10 ranks are 2.5 engines -> 2 (to even)
        ({"rollout": "5%", "actor": "rest"}, 8, 4, (4, 0, 4)),  # at least one engine
        # The last entry gets a rank too, where rounding up would take them all.
        ({"rollout": "75%", "actor": "rest"}, 2, 1, (1, 0, 1)),
        ({"rollout": "75%", "actor": "25%"}, 2, 1, (1, 0, 1)),
        ({"rollout": "97%", "actor": "3%"}, 8, 1, (7, 0, 1)),
        # A count is taken as written, whatever the shares before it were rounded to.
        ({"rollout": "62.5%", "inference": "3 ranks", "actor": "rest"}, 12, 1, (8, 3, 1)),
        ({"rollout": "10%", "inference": "2 ranks", "actor": "rest"}, 4, 1, (1, 2, 1)),
        ({"rollout": "62.5%", "inference": "4 ranks", "actor": "rest"}, 16, 4, (8, 4, 4)),
    ],
)
def test_counts_and_shares(spec: dict[str, str], world_size: int, tp: int, expected: tuple[int, int, int]) -> None:
    placement = plan(spec, 1, world_size, tp)
    assert counts(placement) == expected
    assert [len(engine) for engine in placement.engines] == [tp] * (expected[0] // tp)


def test_shared_ranks_are_written_with_comma_keys() -> None:
    placement = plan({"actor,rollout": "0-7", "rollout": "8-31"}, 4, 8)
    assert placement.actors == span(0, 8)
    assert placement.ranks("rollout") == span(0, 32)
    assert placement.roles[7] == ("rollout", "actor")
    assert placement.roles[8] == ("rollout",)
    assert placement.engine_of(31) == 31


@pytest.mark.parametrize(("tp", "num_engines", "second"), [(1, 20, (1,)), (2, 10, (2, 3))])
def test_four_nodes_of_eight(tp: int, num_engines: int, second: tuple[int, ...]) -> None:
    placement = plan({"num_nodes": 4, "num_gpus_per_node": 8, **MISSION}, 4, 8, tp)
    assert placement.world_size == 32
    assert placement.ranks("rollout") == span(0, 20)
    assert placement.scorers == span(20, 24)
    assert placement.actors == span(24, 32)
    assert placement.leader == 24
    assert len(placement.engines) == num_engines
    assert placement.engines[1] == second
    assert placement.engine_of(19) == num_engines - 1
    assert placement.engine_of(20) is None


@pytest.mark.parametrize(
    ("spec", "scorers"),
    [
        ({"actor,inference,rollout": "all"}, []),
        ({"actor,inference": "0-1", "rollout": "2-3"}, []),
        ({"rollout": "0-1", "inference": "2", "actor": "3"}, [2]),
        ({"inference,rollout": "0-2", "actor": "3"}, [0, 1, 2]),
    ],
)
def test_scorers_are_inference_ranks_that_are_not_the_actors(spec: dict[str, str], scorers: list[int]) -> None:
    assert plan(spec, 1, 4).scorers == scorers


class Traffic(NamedTuple):
    """Who sends weights to whom."""

    spec: dict[str, str]
    num_replicas: int
    replicas: list[list[int]]
    owners: list[int]
    receivers: list[int]


TRAFFIC = {
    "apart": Traffic({"rollout": "0-1", "actor": "2-3"}, 1, [[2, 3]], [2, 3], [0, 1]),
    "together": Traffic({"actor,rollout": "all"}, 1, [[0, 1, 2, 3]], [0, 1, 2, 3], [0, 1, 2, 3]),
    "scorers receive": Traffic({"rollout": "0-1", "inference": "2", "actor": "3"}, 1, [[3]], [3], [0, 1, 2]),
    "scoring actors do not": Traffic({"actor,inference": "1-3", "rollout": "0"}, 1, [[1, 2, 3]], [1, 2, 3], [0]),
    "one rank two roles": Traffic({"inference,rollout": "1-3", "actor": "0"}, 1, [[0]], [0], [1, 2, 3]),
    "two replicas take turns": Traffic({"actor,rollout": "all"}, 2, [[0, 1], [2, 3]], [0, 3], [0, 1, 2, 3]),
    "replicas of one": Traffic({"rollout": "0", "actor": "1-3"}, 3, [[1], [2], [3]], [1], [0]),
    "actors with gaps": Traffic({"actor": "0,3", "rollout": "1-2"}, 2, [[0], [3]], [0], [1, 2]),
}


@pytest.mark.parametrize("case", TRAFFIC.values(), ids=TRAFFIC.keys())
def test_who_sends_weights_to_whom(case: Traffic) -> None:
    placement = plan(case.spec, 1, 4, num_replicas=case.num_replicas)
    assert placement.replicas == case.replicas
    assert placement.owners == case.owners
    assert placement.receivers == case.receivers
    for owner in case.owners:
        assert placement.sync_ranks(owner) == sorted({owner, *case.receivers})


def test_every_shard_has_one_owner_and_replicas_share_the_sending() -> None:
    placement = plan({"rollout": "0-3", "actor": "4-15"}, 2, 8, num_replicas=3)
    assert placement.replicas == [span(4, 8), span(8, 12), span(12, 16)]
    assert placement.owners == [4, 9, 14, 7]  # shard 0 of replica 0, 1 of 1, 2 of 2, 3 of 0
    assert placement.sync_ranks(9) == [0, 1, 2, 3, 9]


def test_table() -> None:
    placement = plan({"actor,rollout": "0-1", "inference": "2", "rollout": "4-5", "actor": "3"}, 2, 3, 2)
    assert placement.table().splitlines() == [
        "rank  node  roles          engine",
        "0     0     rollout,actor  0",
        "1     0     rollout,actor  0",
        "2     0     inference      -",
        "3     1     actor          -",
        "4     1     rollout        1",
        "5     1     rollout        1",
    ]


class Mistake(NamedTuple):
    spec: dict[str, Any]
    got: str
    rule: str
    example: str
    repaired: dict[str, Any] | None = None  # the spec with the example put in, unless that is a whole mapping
    shape: tuple[int, int] = (1, 4)
    tp: int = 1
    num_replicas: int = 1


COVER = "must give each entry at least one rank and cover the world"
RANK_FORMS = "0-3,8, or all, rest, '4 ranks', '25%'"
SIZE_FORMS = "a count is a whole number from 1 to 4, a share lies above 0% and up to 100%"
HALF = {"rollout": "50%", "actor": "rest"}
TWO_AND_TWO = {"rollout": "0-1", "actor": "2-3"}
ANY_ENGINE = "an engine's ranks must be consecutive ranks of one node"

MISTAKES = {
    "rank missing": Mistake(
        {"rollout": "0-1", "actor": "2"},
        "rank 3 of 4 ranks has no role",
        "every rank needs one",
        "actor: 2-3",
        TWO_AND_TWO,
    ),
    "ranks missing": Mistake(
        {"actor": "0", "rollout": "2"},
        "ranks 1,3 of 4",
        "every rank needs one",
        "rollout: 1-3",
        {"actor": "0", "rollout": "1-3"},
    ),
    "rank in two entries": Mistake(
        {"rollout": "0-2", "actor": "2-3"},
        "rank 2 is in the entry 'rollout' and in the entry 'actor'",
        "a rank belongs to one entry",
        "'rollout,actor': 2",
        {"rollout": "0-1", "rollout,actor": "2", "actor": "3"},
    ),
    "all twice": Mistake(
        {"rollout": "all", "actor": "all"},
        "ranks 0-3 are in the entry 'rollout' and in the entry 'actor'",
        "a rank belongs to one entry",
        "'rollout,actor': 0-3",
        {"rollout,actor": "0-3"},
    ),
    "rank twice in an entry": Mistake(
        {"rollout": "0-2,1", "actor": "3"},
        "got '0-2,1'",
        "names rank 1 twice",
        "write 0-2",
        {"rollout": "0-2", "actor": "3"},
    ),
    "out of range": Mistake(
        {"rollout": "0-2", "actor": "3-7"},
        "placement.actor: got rank 7",
        "in a world of 4 ranks, 0 to 3",
        "write for example 3-3",
        {"rollout": "0-2", "actor": "3-3"},
    ),
    "reversed": Mistake(
        {"rollout": "2-0", "actor": "3"}, "got '2-0'", "runs backwards", "write 0-2", {"rollout": "0-2", "actor": "3"}
    ),
    "not a rank": Mistake({"rollout": "zero", "actor": "3"}, "got 'zero'", "write ranks as", RANK_FORMS),
    "open range": Mistake({"rollout": "0-", "actor": "3"}, "got '0-'", "write ranks as", RANK_FORMS),
    "no value": Mistake({"rollout": None, "actor": "3"}, "got 'None'", "write ranks as", RANK_FORMS),
    "no actor": Mistake(
        {"rollout": "all"}, "no rank has the role 'actor'", "role", "{'rollout': '75%', 'actor': 'rest'}"
    ),
    "no rollout": Mistake({"actor": "all"}, "no rank has the role 'rollout'", "role", "{'actor,rollout': 'all'}"),
    "no role at all": Mistake({"num_nodes": 1}, "names no role", "role", "{'actor,rollout': all}"),
    "unknown role": Mistake(
        {"actor,critic": "all"},
        "got the role 'critic' in 'actor,critic'",
        "roles are rollout, inference, actor",
        "'actor,rollout: all'",
        {"actor,rollout": "all"},
    ),
    "role twice": Mistake(
        {"actor,rollout,actor": "all"},
        "got 'actor,rollout,actor'",
        "names a role twice",
        "write 'actor,rollout'",
        {"actor,rollout": "all"},
    ),
    "tp does not divide": Mistake(
        {"rollout": "0-2", "actor": "3"},
        "got 2, but the rollout role has 3 ranks (ranks 0-2)",
        "their number must be a multiple",
        "give the role 2 ranks",
        {"rollout": "2 ranks", "actor": "rest"},
        tp=2,
    ),
    "tp spans nodes": Mistake(
        {"rollout": "0-3", "actor": "4-5"},
        "got 2, but ranks 2, 3 of one engine are on different nodes of 3 ranks",
        ANY_ENGINE,
        "rollout: 0-1",
        {"rollout": "0-1", "actor": "2-5"},
        shape=(2, 3),
        tp=2,
    ),
    "tp larger than a node": Mistake(
        {"actor,rollout": "all"},
        "got 4, but ranks 0, 1, 2, 3 of one engine are on different nodes of 2 ranks",
        ANY_ENGINE,
        "rollout.tensor_parallel_size=2",
        shape=(2, 2),
        tp=4,
    ),
    "tp not consecutive": Mistake(
        {"rollout": "0,2", "actor": "1,3"},
        "got 2, but ranks 0, 2 of one engine are not consecutive",
        ANY_ENGINE,
        "rollout: 0-1",
        TWO_AND_TWO,
        tp=2,
    ),
    "engine ranks with different roles": Mistake(
        {"actor,rollout": "0-2", "rollout": "3"},
        "rank 2 is rollout,actor; rank 3 is rollout",
        "each 2 rollout ranks in a row need the same roles",
        "move the boundary of the ranges to a multiple of 2",
        {"actor,rollout": "0-1", "rollout": "2-3"},
        tp=2,
    ),
    "absolute beside relative": Mistake(
        {"rollout": "75%", "actor": "3"},
        "got the ranks '3'",
        "write all entries the same way",
        "{'rollout': '0-2', 'actor': '3'}",
    ),
    "all beside relative": Mistake(
        {"rollout": "all", "actor": "1 rank"},
        "got the ranks 'all'",
        "write all entries the same way",
        "'actor': 'rest'}",
    ),
    "two rests": Mistake(
        {"rollout": "rest", "actor": "rest"}, "'rest' is written twice", "only one entry", "for example {"
    ),
    "rest of nothing": Mistake(
        {"actor,rollout": "all", "inference": "rest"}, "inference", "at least one rank", "", {"actor,rollout": "all"}
    ),
    "shares below the world": Mistake(
        {"rollout": "50%", "actor": "25%"},
        "rollout: 50% = 2, actor: 25% = 1 ranks, which is 3 of 4",
        COVER,
        "write 'rest'",
        HALF,
    ),
    "shares above the world": Mistake(
        {"rollout": "75%", "actor": "50%"},
        "rollout: 75% = 3, actor: 50% = 2 ranks, which is 5 of 4",
        COVER,
        "write 'rest'",
        HALF,
    ),
    "nothing left for rest": Mistake(
        {"rollout": "4 ranks", "actor": "rest"},
        "rollout: 4 ranks = 4, actor: rest = 0 ranks",
        COVER,
        "write 'rest'",
        HALF,
    ),
    "count that is no number": Mistake(
        {"rollout": "many ranks", "actor": "rest"}, "got 'many ranks'", "a count is", "'4 ranks', a share '25%'"
    ),
    "count above the world": Mistake(
        {"rollout": "5 ranks", "actor": "rest"}, "got '5 ranks'", "world of 4", SIZE_FORMS
    ),
    "count that is not whole": Mistake({"rollout": "1.5 ranks", "actor": "rest"}, "got '1.5 ranks'", "", SIZE_FORMS),
    "no share": Mistake({"rollout": "0%", "actor": "rest"}, "got '0%'", "", SIZE_FORMS),
    "share above 100": Mistake({"rollout": "120%", "actor": "rest"}, "got '120%'", "", SIZE_FORMS),
    "num_nodes": Mistake(
        {"actor,rollout": "all", "num_nodes": 3},
        "placement.num_nodes: the config says 3, but the world that torchrun started has 1",
        "start 3 x 4 = 12 ranks as the config says",
        "or set placement.num_nodes=1",
        {"actor,rollout": "all", "num_nodes": 1},
    ),
    "num_gpus_per_node": Mistake(
        {"actor,rollout": "all", "num_gpus_per_node": 8},
        "placement.num_gpus_per_node: the config says 8, but the world that torchrun started has 4",
        "start 1 x 8 = 8 ranks as the config says",
        "or set placement.num_gpus_per_node=4",
        {"actor,rollout": "all", "num_gpus_per_node": 4},
    ),
    "inference on some actors": Mistake(
        {"actor,inference": "0-1", "actor": "2", "rollout": "3"},
        "ranks 0-1 are actor and inference, but other ranks have only one of these roles",
        "or leave out inference",
        "{'actor,rollout': '0-2', 'inference': '3'}",
    ),
    "actors on some inference ranks": Mistake(
        {"actor,inference": "0", "inference,rollout": "1-3"},
        "rank 0 is actor and inference",
        "Separate the roles",
        "{'actor,rollout': '0-2', 'inference': '3'}",
    ),
    "replicas of different sizes": Mistake(
        {"rollout": "0-1", "actor": "2-7"},
        "actor.num_replicas: got 4, but the actor role has 6 ranks (ranks 2-7)",
        "must divide into replicas of equal size",
        "choose one of 1, 2, 3, 6",
        shape=(1, 8),
        num_replicas=4,
    ),
    "more replicas than actors": Mistake(
        {"rollout": "0-2", "actor": "3"},
        "actor.num_replicas: got 2, but the actor role has 1 rank (rank 3)",
        "must divide into replicas of equal size",
        "choose one of 1",
        num_replicas=2,
    ),
    "inference and rollout with tp 2": Mistake(
        {"inference,rollout": "0-3", "actor": "4-7"},
        "ranks that are inference and rollout",
        "need rollout.tensor_parallel_size=1",
        "{'rollout': '50%', 'inference': '25%', 'actor': 'rest'}",
        shape=(1, 8),
        tp=2,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_say_what_was_got_the_rule_and_the_way_out(mistake: Mistake) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(mistake.spec, *mistake.shape, mistake.tp, mistake.num_replicas)
    message = str(caught.value)
    for part in (mistake.got, mistake.rule, mistake.example):
        assert part in message
    examples = [yaml.safe_load(text) for text in re.findall(r"\{.*?\}", message)]
    repairs = [repair for repair in [*examples, mistake.repaired] if repair is not None]
    for repaired in repairs:
        assert plan(repaired, *mistake.shape, mistake.tp).world_size == mistake.shape[0] * mistake.shape[1]


def test_inference_and_rollout_share_ranks_without_tensor_parallelism() -> None:
    placement = plan({"inference,rollout": "0-3", "actor": "4-7"}, 1, 8)
    assert placement.scorers == [0, 1, 2, 3]
    assert len(placement.engines) == 4


def test_nodes_of_different_sizes() -> None:
    """8 and 4 ranks, engines of 4 ranks. Nothing in the placement depends on equal nodes."""
    placement = plan({"rollout": "75%", "actor": "rest"}, 2, [8, 4], 4)
    assert placement.engines == ((0, 1, 2, 3), (4, 5, 6, 7)) and placement.actors == [8, 9, 10, 11]
    assert placement.node_leads == [0, 8]
    assert [placement.nodes.node_of(rank) for rank in (0, 7, 8, 11)] == [0, 0, 1, 1]
    assert [*placement.nodes.ranks_of(1)] == [8, 9, 10, 11]
    assert placement.summary().startswith("12 ranks on 2 nodes (8 and 4 ranks): ")
    assert [line.split()[1] for line in placement.table().splitlines()[1:]] == ["0"] * 8 + ["1"] * 4


def test_a_config_may_state_the_size_of_each_node() -> None:
    spec = {"actor,rollout": "all", "num_nodes": 2, "num_gpus_per_node": [2, 1]}
    assert plan(spec, 2, [2, 1]).world_size == 3
    with pytest.raises(ConfigError, match="the config says 2,1, but the world that torchrun started has 1,2; start 2"):
        plan(spec, 2, [1, 2])
    assert plan(spec | {"num_gpus_per_node": [2, 2]}, 2, 2).world_size == 4


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ("2,1,1", {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),  # the first node has two engines
        ([2, 1, 1], {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),
        ("1, 1 ,2", {0: 0.125, 1: 0.125, 2: 0.25, 3: 0.5}),
        ("0.5,1,1", {0: 0.1, 1: 0.1, 2: 0.4, 3: 0.4}),
        ("auto", None),
        (None, None),
    ],
)
def test_weights_of_nodes_are_divided_among_their_engines(weights: Any, shares: dict[int, float] | None) -> None:
    placement = plan({"actor,rollout": "all", "rank_weights": weights}, 3, [2, 1, 1])
    assert placement.engine_shares == (None if shares is None else pytest.approx(shares))


@pytest.mark.parametrize(
    ("local_ranks", "sizes"), [([0], (1,)), ([0, 1, 0, 1], (2, 2)), ([0, 1, 0], (2, 1)), ([0, 0, 1, 2], (1, 3))]
)
def test_nodes_are_found_from_local_ranks(local_ranks: list[int], sizes: tuple[int, ...]) -> None:
    assert Nodes.from_local_ranks(local_ranks).sizes == sizes


@pytest.mark.parametrize("local_ranks", [[0, 0, 1, 1], [1, 0], [0, 2]])
def test_ranks_of_a_node_must_be_consecutive(local_ranks: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"the ranks of a node must be consecutive.*as torchrun starts them"):
        Nodes.from_local_ranks(local_ranks)
