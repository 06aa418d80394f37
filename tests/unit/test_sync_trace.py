"""Tracing a loader: what counts as a copy, what cannot be traced, and what is left unfilled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl.model.shards import TensorInfo
from rl.sync.digest import digest_of, flat_part
from rl.sync.layout import MemoryLayout, Region, Untraceable, trace

CPU = torch.device("cpu")


def flat(start: int, count: int) -> list[Region]:
    return [Region(start, 1, count, 0)]


FLOATS = ("float32", "float32")  # of the source and of the parameter
Load = Callable[[Tensor, Tensor], Any]  # the parameter's memory and a tensor of the policy


def watch(
    load: Load, shape: tuple[int, ...], source: tuple[int, ...], dtypes: tuple[str, str] = FLOATS
) -> MemoryLayout:
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
    layout = watch(lambda p, w: p.copy_(w), (2, 3), (2, 3), ("bfloat16", "float32"))
    values = torch.randn(2, 3, dtype=torch.bfloat16)
    layout.fill({0: values})
    (held,) = layout.held([[(0, 6)]])
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
        (lambda p, w: p.copy_(w.mul_(2)), r"calls aten.mul_.Tensor on what it was given"),
        (lambda p, w: p.copy_(w[:2].zero_()), r"calls aten.zero_.default on what it was given"),
        (lambda p, w: torch.mul(w, 2, out=p), r"calls aten.mul.out on weight"),
        (lambda p, w: torch._foreach_copy_([p], [w]), r"calls aten._foreach_copy_.default on weight"),
        (lambda p, w: p.fill_(w[0, 0].item()), r"calls aten.fill_.Scalar on weight"),
        (lambda p, w: p.fill_(w[0, 0]), r"calls aten.fill_.Tensor on weight"),
        (lambda p, w: p.copy_(torch.ones(4, 4)), "computes what it puts into weight"),
        (lambda p, w: p.copy_(w[0]), "reshapes or narrows what it puts into weight"),
        (lambda p, w: p.copy_(w).add_(1), r"calls aten.add_.Tensor on weight"),
        (lambda p, w: p.index_copy_(0, torch.arange(4), w), "calls aten.index_copy_.default on weight"),
        (fail, r"cannot be watched \(KeyError: 'lost'\)"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_untraceable(load: Load, reason: str) -> None:
    with pytest.raises(Untraceable, match=reason):
        watch(load, (4, 4), (4, 4))


@pytest.mark.parametrize(
    ("load", "dtype"),
    [
        (lambda p, w: (p.copy_(w), p[2:].zero_()), "float32"),  # zeros are filled first, so they would not stay
        (lambda p, w: p.view(torch.int16).copy_(w.view(torch.int16)), "bfloat16"),  # values would be cast to int16
        (lambda p, w: p.view(torch.uint8).copy_(w.view(torch.uint8)), "float32"),  # four times as many elements
    ],
)
def test_what_fill_would_do_otherwise_is_untraceable(load: Load, dtype: str) -> None:
    with pytest.raises(Untraceable):
        watch(load, (4, 4), (4, 4), (dtype, dtype))


@pytest.mark.parametrize(
    "dtypes", [("float32", "bfloat16"), ("int64", "int32"), ("float32", "int64"), ("int64", "float32")]
)
def test_a_parameter_that_cannot_hold_every_value_is_untraceable(dtypes: tuple[str, str]) -> None:
    with pytest.raises(Untraceable, match="reshapes or narrows what it puts into weight"):
        watch(lambda p, w: p.copy_(w), (4, 4), (4, 4), dtypes)


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: None,
        lambda p, w: p[:7].copy_(w[:7]),
        lambda p, w: p[1:].zero_(),
        lambda p, w: [p[:6].copy_(w[:6]) for _ in range(2)],  # the same place twice
        lambda p, w: (p[:6].copy_(w[:6]), p[:2].copy_(w[:2])),  # 8 copied, but the last two never
        lambda p, w: p.view(2, 4)[:, :3].copy_(w.view(2, 4)[:, :3]),  # all columns but one
    ],
)
def test_what_the_loader_leaves_out_is_named(load: Load) -> None:
    with pytest.raises(Untraceable, match=r"^no tensor of the policy fills all of its weight \[8\]$"):
        watch(load, (8,), (8,))


def test_parameters_that_share_memory_are_filled_each() -> None:
    memory = torch.zeros(12)
    model = nn.ParameterDict({"large": nn.Parameter(memory[:8]), "small": nn.Parameter(memory[8:])})
    infos = [TensorInfo("source", (8,), "float32", True)]
    with pytest.raises(Untraceable, match=r"fills all of its small \[4\]$"):
        trace(infos, model, lambda weights: [model["large"].data.copy_(weight) for _, weight in weights], CPU)


def test_a_loader_that_stops_early_fills_what_it_took() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    infos = [TensorInfo(name, (2,), "float32", True) for name in "ab"]
    layout = trace(infos, model, lambda weights: model["a"].data.copy_(next(iter(weights))[1]), CPU)
    assert layout.regions == [flat(0, 2), []]


def test_a_loader_that_gathers_before_it_copies_is_untraceable() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
    infos = [TensorInfo(name, (2,), "float32", True) for name in "ab"]
    with pytest.raises(Untraceable, match="computes what it puts into a"):
        trace(infos, model, lambda weights: [model[name].data.copy_(w) for name, w in list(weights)], CPU)
