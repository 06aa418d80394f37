"""Faults on a real GPU: what NCCL knows of a silent rank, and an engine that is built anew in its own memory."""

import pickle
from pathlib import Path

import pytest

from tests.e2e.test_ends import launch, wait_for_step
from tests.launcher import finish

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_the_last_collectives_of_a_silent_rank_are_kept(tmp_path: Path) -> None:
    process = launch(tmp_path, 2, "sleeping", 1, "world.silence_floor_s=15", "debug.share_gpu=true")
    wait_for_step(tmp_path, process, 1)
    output = finish(process, 100)
    path = Path(output.partition("NCCL's last collectives: ")[2].splitlines()[0])
    trace = pickle.loads(path.read_bytes())
    assert trace["entries"], trace
    other = path.with_name(path.name.removesuffix("1") + "0")
    assert len(pickle.loads(other.read_bytes())["entries"]) >= len(trace["entries"]), "who waits is no less far"


def test_a_failed_engine_gives_its_memory_back(tmp_path: Path) -> None:
    """Two of them would not fit."""
    process = launch(
        tmp_path, 1, "engine, once", 0, "rollout.engine=vllm", "rollout.gpu_memory_fraction=0.6", "train.num_steps=3"
    )
    output = finish(process, 250)
    assert process.returncode == 0, output[-4000:]
    assert "the engine of rank 0 failed" in output
