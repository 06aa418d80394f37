"""Watching a loader: what counts as a copy, what cannot be followed, and what is left unfilled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl.shards import TensorInfo
from rl.sync.digest import digest_of, flat_part
from rl.sync.landing import Landings, Region, Unfilled, Untraceable, trace

CPU = torch.device("cpu")


def flat(start: int, count: int) -> list[Region]:
    return [Region(start, 1, count, 0)]


FLOATS = ("float32", "float32")  # of the source and of the parameter
Load = Callable[[Tensor, Tensor], Any]  # the parameter's memory and a tensor of the policy


def watch(load: Load, shape: tuple[int, ...], source: tuple[int, ...], dtypes: tuple[str, str] = FLOATS) -> Landings:
    model = nn.Module()
    memory = torch.full(shape, 7, dtype=getattr(torch, dtypes[1]))
    parameter = nn.Parameter(memory, requires_grad=False)
    model.register_parameter("weight", parameter)
    infos = [TensorInfo("source", source, dtypes[0], True)]
    try:
        return trace(infos, model, lambda weights: [load(parameter.data, weight) for _, weight in weights], CPU)
    finally:
        assert bool((memory == 7).all())


@pytest.mark.parametrize(
    ("shape", "source", "load", "regions"),
    [
        ((), (), lambda p, w: p.copy_(w), flat(0, 1)),
        ((1,), (), lambda p, w: p.copy_(w.view(1)), flat(0, 1)),
        ((4, 1, 3), (4, 1, 3), lambda p, w: p.copy_(w), flat(0, 12)),
        ((4, 3), (3, 4), lambda p, w: p.copy_(w.view(4, 3)), flat(0, 12)),
        ((2, 3, 3), (2, 3, 8), lambda p, w: p.copy_(w[..., 2:5]), [Region(2, 6, 3, 8)]),
        ((2, 8), (2, 3, 8), lambda p, w: p.copy_(w[:, 1]), [Region(8, 2, 8, 24)]),  # one of three interleaved
        ((8, 1), (1, 8), lambda p, w: p.copy_(w.t()), flat(0, 8)),  # of one row, which changes nothing
        ((4, 3), (4, 3), lambda p, w: p.__setitem__(slice(None), w), flat(0, 12)),
        ((4, 6), (4, 3), lambda p, w: (p[:, :3].copy_(w), p[:, 3:].copy_(w)), [Region(0, 4, 3, 3)] * 2),
        ((2, 4, 3), (4, 3), lambda p, w: (p[0].copy_(w), p[1].zero_()), flat(0, 12)),  # one of two experts
        ((2, 3), (2, 3), lambda p, w: (p.copy_(w), p[2:].copy_(w[2:])), flat(0, 6)),  # an empty copy is none
    ],
)
def test_copies(shape: tuple[int, ...], source: tuple[int, ...], load: Load, regions: list[Region]) -> None:
    assert watch(load, shape, source).regions == [regions]


def test_a_wider_parameter_is_a_copy_too() -> None:
    landings = watch(lambda p, w: p.copy_(w), (2, 3), (2, 3), ("bfloat16", "float32"))
    values = torch.randn(2, 3, dtype=torch.bfloat16)
    landings.fill({0: values})
    (held,) = landings.held()
    assert held.values.dtype == torch.float32
    assert digest_of(held).tolist() == digest_of(flat_part(0, values, 0, torch.bfloat16)).tolist()


def fail(*_: Tensor) -> None:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, w: p.copy_(w.t()), "transposes what it puts into weight"),
        (lambda p, w: p.t().copy_(w), "transposes what it puts into weight"),
        (lambda p, w: p.copy_(w.flip(0)), "computes what it puts into weight"),
        (lambda p, w: p.copy_(w * 2), "computes what it puts into weight"),
        (lambda p, w: p.copy_(w.double()), "computes what it puts into weight"),
        pytest.param(
            lambda p, w: p.copy_(w.mul_(2)),
            "computes what it puts into weight",
            marks=pytest.mark.xfail(strict=True, reason="a tensor that the loader changes in place counts as a copy"),
        ),
        (lambda p, w: p.copy_(torch.ones(4, 4)), "computes what it puts into weight"),
        (lambda p, w: p.copy_(w[0]), "reshapes or narrows what it puts into weight"),
        (lambda p, w: p.copy_(w).add_(1), r"calls aten.add_.Tensor on weight"),
        (lambda p, w: p.fill_(1), r"calls aten.fill_.Scalar on weight"),
        (lambda p, w: p.index_copy_(0, torch.arange(4), w), "calls aten.index_copy_.default on weight"),
        (fail, r"cannot be watched \(KeyError: 'lost'\)"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_untraceable(load: Load, reason: str) -> None:
    with pytest.raises(Untraceable, match=reason):
        watch(load, (4, 4), (4, 4))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("int64", "int32"), ("float32", "int64")])
def test_a_narrower_parameter_is_untraceable(dtypes: tuple[str, str]) -> None:
    with pytest.raises(Untraceable, match="reshapes or narrows what it puts into weight"):
        watch(lambda p, w: p.copy_(w), (4, 4), (4, 4), dtypes)


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: None,
        lambda p, w: p[:7].copy_(w[:7]),
        lambda p, w: p[1:].zero_(),
        lambda p, w: [p[:6].copy_(w[:6]) for _ in range(2)],  # the same place twice
        pytest.param(
            lambda p, w: (p[:6].copy_(w[:6]), p[:2].copy_(w[:2])),  # 8 copied, but the last two never
            marks=pytest.mark.xfail(strict=True, reason="elements are counted, whichever they are"),
        ),
    ],
)
def test_what_the_loader_leaves_out_is_unfilled(load: Load) -> None:
    with pytest.raises(
        Unfilled, match=r"weight \[8\] of the engine is filled by no tensor of the policy, or only in part"
    ):
        watch(load, (8,), (8,))


@pytest.mark.xfail(strict=True, reason="elements are counted for the memory of both together")
def test_parameters_that_share_memory_are_filled_each() -> None:
    memory = torch.zeros(12)
    model = nn.ParameterDict({"large": nn.Parameter(memory[:8]), "small": nn.Parameter(memory[8:])})
    infos = [TensorInfo("source", (8,), "float32", True)]
    with pytest.raises(Unfilled, match="small"):
        trace(infos, model, lambda weights: [model["large"].data.copy_(weight) for _, weight in weights], CPU)


def test_a_loader_that_stops_early_fills_what_it_took() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    infos = [TensorInfo(name, (2,), "float32", True) for name in "ab"]
    landings = trace(infos, model, lambda weights: model["a"].data.copy_(next(iter(weights))[1]), CPU)
    assert landings.regions == [flat(0, 2), []]


def test_a_loader_that_gathers_before_it_copies_is_untraceable() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
    infos = [TensorInfo(name, (2,), "float32", True) for name in "ab"]
    with pytest.raises(Untraceable, match="computes what it puts into a"):
        trace(infos, model, lambda weights: [model[name].data.copy_(w) for name, w in list(weights)], CPU)
