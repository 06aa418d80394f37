"""The settings of torch's allocator on a real GPU, where memory is short and while an engine is built."""

from collections.abc import Iterator

import pytest
import torch

from rl.learner.offload import ALLOCATOR_VARIABLES, WITHOUT_PAGES, avoid_fragments, without_pages

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]
NUM_BYTES = 64 << 20  # enough for a segment of its own


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")
    yield
    torch._C._accelerator_setAllocatorSettings(WITHOUT_PAGES)


def is_paged(tensor: torch.Tensor) -> bool:
    for segment in torch.cuda.memory._snapshot()["segments"]:
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return bool(segment["is_expandable"])
    raise AssertionError("no segment of the allocator has the tensor")


def test_memory_is_in_pages_except_while_an_engine_is_built() -> None:
    torch.cuda.empty_cache()
    avoid_fragments()
    tensors = [torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")]
    with without_pages():
        tensors.append(torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda"))
        assert not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["expandable_segments"] and settings["pinned_use_cuda_host_register"]
    assert settings["pinned_num_register_threads"] == 8
    tensors.append(torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda"))
    assert [is_paged(tensor) for tensor in tensors] == [True, False, True]
