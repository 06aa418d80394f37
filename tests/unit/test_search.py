"""The search tool. bm25s imports llvmlite, and vLLM cannot be loaded in a process that has it."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from rl.config.schema import ROOT


@pytest.mark.skipif(find_spec("bm25s") is None, reason="bm25s is not installed; a run does not need it")
def test_search() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/search_checks.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
