"""Fixtures that several unit tests use."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """Import vLLM as engines do, and restore the environment that it changes: other tests start programs."""
    before = dict(os.environ)
    importlib.import_module("rl.rollout.vllm.build")
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def open_stores() -> Iterator[Callable[..., Any]]:
    from tests.mails import stores_on  # imported here, because it imports torch

    with ExitStack() as stack:
        yield lambda roots, sources=None: stack.enter_context(stores_on(roots, sources))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Three nodes with private disks."""
    return [tmp_path / host / "run" / "checkpoints" for host in ("n0", "n1", "n2")]
