"""Fixtures that several unit tests use."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="session")
def vllm_environment() -> dict[str, str]:
    """Import vLLM as engines do, and return the environment variables that this sets. A build needs them. They are
    removed again, because other tests start programs."""
    before = dict(os.environ)
    importlib.import_module("rl.rollout.vllm.build")
    changes = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update(before)
    return changes


@pytest.fixture(scope="session")
def vllm_imported(vllm_environment: dict[str, str]) -> None:
    """Import vLLM as engines do."""


@pytest.fixture
def open_stores() -> Iterator[Callable[..., Any]]:
    from tests.mails import stores_on  # imported here, because it imports torch

    with ExitStack() as stack:
        yield lambda roots, sources=None: stack.enter_context(stores_on(roots, sources))


@pytest.fixture
def mesh() -> "Iterator[DeviceMesh]":
    """A mesh of this process alone, on the CPU."""
    import torch.distributed as dist  # here, since not every test needs torch
    from torch.distributed.device_mesh import DeviceMesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    assert dist.group.WORLD is not None
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch.compile work, which the engine's package turns off on CPUs, and forget what it has compiled."""
    import torch._dynamo

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Three nodes with private disks."""
    return [tmp_path / host / "run" / "checkpoints" for host in ("n0", "n1", "n2")]
