"""Figures over ranks, worked out by hand. Ranks are threads with a gloo group."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rl.report.histogram import Histogram
from rl.report.metrics import Measures
from rl.rollout.sampler import length_edges


def reduce(num_ranks: int, add: Callable[[Measures, int], None]) -> list[tuple[dict[str, float], dict[str, Histogram]]]:
    """Return what each rank gets, if `add` adds its part."""
    store = dist.HashStore()

    def of_rank(rank: int) -> tuple[dict[str, float], dict[str, Histogram]]:
        pg, measures = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=20)), Measures()
        add(measures, rank)
        return measures.reduce(pg), measures.histograms

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(of_rank, range(num_ranks)))


PARTS = [[], [3.0], [0.0, 9.0, 4.0]]  # of three ranks; the values are 0, 3, 4 and 9


def add_all(measures: Measures, rank: int) -> None:
    values = torch.tensor(PARTS[rank])
    for part in (values[:1], values[1:]):  # two calls, as of two micro-batches
        measures.mean("mean", part.sum(), len(part))
        measures.sum("sum", part.sum())
        measures.deviation("std", part)
        measures.maximum("max", part)
        measures.histogram("histogram", part, [0, 3, 6, 9])
        measures.mean_if_any("nothing", 0, 0)


def test_figures_are_those_of_all_values_together() -> None:
    """The mean is 4, and the values are 4, 1, 0 and 5 off it: 42 / 4 is the variance. 0 and 3 are in the first bin."""
    for values, histograms in reduce(3, add_all):
        assert values == pytest.approx({"mean": 4, "sum": 16, "std": (42 / 4) ** 0.5, "max": 9})
        assert histograms == {"histogram": Histogram([0, 3, 6, 9], [2, 1, 1])}


def test_included_measures_count_like_their_own_calls() -> None:
    def add(measures: Measures, rank: int) -> None:
        measures.maximum("max", torch.tensor([1.0]))
        other = Measures()
        add_all(other, rank)
        measures.include(other)

    assert reduce(3, add) == [(values | {"max": 9}, histograms) for values, histograms in reduce(3, add_all)]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, -1e6, 0.0])
def test_equal_values_have_no_deviation(value: float) -> None:
    """Their sums have rounding errors, whose root would be seen."""
    ((values, _), *_) = reduce(2, lambda measures, rank: measures.deviation("std", torch.full((3001 + rank,), value)))
    assert values == {"std": 0.0}


def test_a_small_deviation_is_not_lost() -> None:
    ((values, _), *_) = reduce(2, lambda measures, rank: measures.deviation("std", torch.tensor([100 + rank / 1000])))
    assert values["std"] == pytest.approx(0.0005, rel=0.05)  # float32 holds 100.001 to 4 parts in 10 million


def test_without_values_there_is_a_maximum_of_nothing() -> None:
    ((values, histograms), *_) = reduce(
        1, lambda measures, rank: (measures.maximum("max", torch.empty(0)), measures.deviation("std", torch.empty(0)))
    )
    assert (values, histograms) == ({"max": 0.0, "std": 0.0}, {})


def test_only_some_names_can_be_reduced() -> None:
    pg, measures = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20)), Measures()
    add_all(measures, 0)
    assert measures.reduce(pg, "sum") == {"sum": 0.0} and measures.histograms == {}


@pytest.mark.parametrize(
    ("max_new_tokens", "edges"),
    [
        (1, [0, 1]),
        (3, [0, 1, 2, 3]),
        (32, [*range(33)]),
        (40, [0, 1, 2, 3, 5, *[None] * 27, 40]),
        (3200, [*range(0, 3201, 100)]),
    ],
)
def test_edges_of_lengths(max_new_tokens: int, edges: list[int | None]) -> None:
    """Whole numbers that grow, so that no bin can stay empty."""
    found = length_edges(max_new_tokens)
    assert len(found) == len(edges) and sorted(set(found)) == found
    assert all(wanted in (None, got) for got, wanted in zip(found, edges, strict=True))
    lengths = torch.arange(1, max_new_tokens + 1)
    ((_, histograms),) = reduce(1, lambda measures, rank: measures.histogram("lengths", lengths, found))
    assert list(histograms["lengths"].counts) == [right - left for left, right in itertools.pairwise(found)]
