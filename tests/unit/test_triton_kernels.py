"""Our Triton kernels compute what torch computes. They run on the CPU here, in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest

from rl.config.schema import ROOT
from rl.model.activations import PART_TOKENS

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")]


def test_kernels_of_the_head_and_of_attention() -> None:
    command = [sys.executable, "-m", "tests.interpreted_kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout) == (0, "all kernels agree with torch\n"), done.stderr[-3000:]


def test_the_estimate_of_an_engine_knows_the_parts_of_a_sequence() -> None:
    from rl.rollout.vllm.decode_attention import MAX_TOKENS  # needs triton

    assert PART_TOKENS == MAX_TOKENS
