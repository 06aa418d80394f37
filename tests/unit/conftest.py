"""vLLM for the tests that need it, imported once."""

import importlib
import os

import pytest


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """Import vLLM as engines do, and take back what that puts into the environment: other tests start programs."""
    before = dict(os.environ)
    importlib.import_module("rl.rollout.vllm.build")
    os.environ.clear()
    os.environ.update(before)
