"""Faults on a real GPU: NCCL's records of a silent rank, and an engine that is built again in the same memory."""

import pickle
from pathlib import Path

import pytest

from rl.watch.recorder import has_pending
from tests.e2e.test_endings import launch, wait_for_step
from tests.launcher import finish

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_the_last_collectives_of_a_silent_rank_are_kept(tmp_path: Path) -> None:
    # Few prompts, so that all micro-batches are of the smallest shape. The first use of a shape may be silent for long.
    options = ["world.silence_floor_s=15", "debug.share_gpu=true", "actor.compile=false"]
    options.append("train.num_prompts_per_step=2")
    process = launch(tmp_path, 2, "sleeping", 1, *options)
    wait_for_step(tmp_path, process, 1)
    output = finish(process, 100)
    assert "oneworld: rank 1 (" in output, output
    path = Path(output.partition("NCCL's last collectives: ")[2].splitlines()[0])
    assert path.name == "nccl_rank_1", output
    sleeping, waiting = (pickle.loads(path.with_name(f"nccl_rank_{rank}").read_bytes()) for rank in (1, 0))
    assert sleeping["entries"] and not has_pending(sleeping), sleeping["pg_status"]
    assert has_pending(waiting), waiting["pg_status"]


@pytest.mark.parametrize("sleep", ["always", "never"])
def test_a_failed_engine_gives_its_memory_back(sleep: str, tmp_path: Path) -> None:
    """Two engines would not fit into the memory."""
    options = ["rollout.engine=vllm", "rollout.gpu_memory_fraction=0.6", "train.num_steps=3", "actor.compile=false"]
    options.append(f"rollout.sleep={sleep}")
    process = launch(tmp_path, 1, "engine, once", 0, *options)
    output = finish(process, 140)
    assert process.returncode == 0, output[-4000:]
    assert "the engine of rank 0 failed" in output
