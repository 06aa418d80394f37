"""Tensors that are offloaded and reloaded are the same objects with the same views and values."""

import os
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from rl.learner.offload import ALLOCATOR_VARIABLES, WITHOUT_PAGES, Offloader, avoid_fragments, without_pages
from rl.learner.sharded_trainer import ShardedTrainer, TrainerSettings
from rl.model import host_memory
from rl.run import build


def test_views_stay_valid_and_their_memory_is_free_meanwhile() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    row, column = whole.view(3, 4)[1], whole.view(3, 4)[:, 2]
    other = torch.ones(2, dtype=torch.bfloat16)
    offload = Offloader([whole, row, other])
    offload.start_reload()  # nothing is offloaded yet
    offload.offload()
    offload.offload()
    assert offload.is_offloaded and whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert offload.host_copy(row).tolist() == [4, 5, 6, 7]
    assert offload.host_copy(column).tolist() == [2, 6, 10]
    assert offload.host_copy(other).dtype == torch.bfloat16
    offload.start_reload()
    assert not offload.is_offloaded
    assert (row.tolist(), column.tolist(), other.tolist()) == ([4, 5, 6, 7], [2, 6, 10], [1, 1])
    whole.mul_(2)
    offload.offload()
    assert offload.host_copy(row).tolist() == [8, 10, 12, 14], "the host has what was last on the device"


def test_constant_tensors_are_copied_only_once() -> None:
    """Frozen weights are offloaded in every step, and their copy in host memory is always right."""
    weights = torch.ones(3)
    offload = Offloader([weights], constant=True)
    offload.offload()
    offload.start_reload()
    assert weights.tolist() == [1, 1, 1]
    weights.fill_(2)  # nobody does this. It shows what is copied
    offload.offload()
    assert offload.is_offloaded and weights.untyped_storage().nbytes() == 0
    assert offload.host_copy(weights).tolist() == [1, 1, 1]


def test_tensors_of_all_sizes_leave_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 8192)
    tensors = [torch.randn(size) for size in [*[300] * 20, 1, 0, 4096]]  # the last is larger than a slab
    wanted = [tensor.clone() for tensor in tensors]
    offload = Offloader(tensors)
    offload.offload()
    for tensor, value in zip(tensors, wanted, strict=True):
        assert torch.equal(offload.host_copy(tensor), value) and not tensor.untyped_storage().nbytes()
    offload.start_reload(tensors[:2])
    offload.start_reload()
    for tensor, value in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor, value)


def test_an_optimizer_goes_on_as_if_nothing_had_happened() -> None:
    def train(offloads: bool) -> list[float]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(3):
            layer(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if offloads:
                moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
                offload = Offloader([*(parameter.detach() for parameter in layer.parameters()), *moments])
                offload.offload()
                offload.start_reload()
        return [value for parameter in layer.parameters() for value in parameter.flatten().tolist()]

    assert train(offloads=True) == train(offloads=False)


def test_a_weight_sync_does_not_wait_for_moments_on_their_way_to_host_memory() -> None:
    trainer = ShardedTrainer.__new__(ShardedTrainer)
    moments = Mock(is_offloaded=False)  # `start_offload` has started the copy
    trainer.model, trainer._offloaders = nn.Linear(2, 1), {"exp_avg": moments}
    assert [part.info.name for part in trainer.weight_slices()] == ["weight", "bias"]
    assert not moments.wait.called


@pytest.mark.parametrize("given", ["", "max_split_size_mb:512"])
def test_settings_of_the_allocator_that_the_user_gives_are_left_alone(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    avoid_fragments()
    assert applied == ([] if given else [os.environ["PYTORCH_CUDA_ALLOC_CONF"]])
    assert ("expandable_segments:True" in os.environ["PYTORCH_CUDA_ALLOC_CONF"]) is not bool(given)
    with without_pages():
        assert (os.environ["PYTORCH_CUDA_ALLOC_CONF"], len(applied)) == (("", 0) if given else (WITHOUT_PAGES, 2))


@pytest.mark.parametrize(
    ("offloads", "device", "expected"),
    [
        (["none", "none"], "cuda", ["offload", "offload"]),
        (["moments"], "cuda", ["avoid", "offload"]),
        (["always"], "cuda", ["avoid", "offload"]),
        (["none", "rollout"], "cuda", ["avoid", "offload", "offload"]),  # only the critic is moved
        (["rollout"], "cpu", ["offload"]),
        ([], "cpu", []),  # a rank without an engine
    ],
)
def test_fragments_are_avoided_before_any_memory_is_pinned(
    offloads: list[Any], device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(build, "avoid_fragments", lambda: done.append("avoid"))
    trainers = []
    for offload in offloads:
        trainer = ShardedTrainer.__new__(ShardedTrainer)
        trainer._settings, trainer._device = TrainerSettings(1e-6, offload, 1024), torch.device(device)
        monkeypatch.setattr(trainer, "offload", lambda: done.append("offload"))
        trainers.append(trainer)
    build.offload_for_engine(trainers)
    assert done == expected
