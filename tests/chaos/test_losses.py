"""Lost nodes, full disks and failed engines. A run goes on without them, or ends and says what to do."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import kill, kill_node, lose_node, stop
from tests.chaos.harness import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
# Ways in which engines and actors work at the same time.
WAYS = {
    "ahead": ["rollout.ahead=1", "algo.correction=token"],
    "ahead in short rounds": ["rollout.ahead=1", "rollout.max_tokens_per_round=2", "algo.correction=token"],
    "overlap": ["actor.overlap=true"],
}


@pytest.mark.parametrize("copies", [2, 1])
def test_a_node_that_is_lost_for_good(copies: int, undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    """The actors' node is lost. With two copies of each file the others go on."""
    with running(tmp_path, f"checkpoint.copies={copies}", nnodes="3:4", loop=True) as world:
        world.wait_for_step(2)
        lose_node(3).happen(world)
        if copies == 2:
            world.finish_well(undisturbed)
            assert "6 ranks on 3 nodes: rollout 0-2, inference 3" in world.output()
            return
        assert world.finish() == [1, 1, 1]
        assert re.search(r"step \d was committed, but no reachable disk holds 4 of its \d+ files", world.output())
        for file in ("model-00000-of-00002", "optimizer-00001-of-00002"):
            assert re.search(rf"{file}.safetensors \(\d+ bytes\): was saved on node3", world.output())
        for node in range(3):
            assert "no reachable disk holds" in (world.run_folder(node) / "FATAL").read_text()


@pytest.mark.timeout(900)
def test_32_ranks_lose_a_node(undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    """The placement is planned again for the remaining 24 ranks."""
    shares = ["placement.rollout=62.5%", "placement.inference=12.5%", "placement.actor=rest"]
    settings = [*shares, "checkpoint.copies=2", "world.silence_floor_s=60"]
    with running(tmp_path, *settings, nnodes="3:4", nproc=8, loop=True) as world:
        world.wait_for_step(5, 300)
        kill_node(1).happen(world)
        world.finish_well(undisturbed, 400)
        assert "24 ranks on 3 nodes: rollout 0-14, inference 15-17, actor 18-23" in world.output()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_stops_and_a_node_is_lost_while_engines_and_actors_work_at_the_same_time(
    way: str, tmp_path: Path
) -> None:
    """A stopped engine is named while the others wait for its round. Then three nodes go on without the actors'."""
    settings = [*WAYS[way], "checkpoint.copies=2"]
    with running(tmp_path / "undisturbed", *settings) as world:
        assert world.finish() == [0, 0, 0, 0], world.output()[-6000:]
        undisturbed = world.metrics()
    with running(tmp_path / "disturbed", *settings, nnodes="3:4", loop=True) as world:
        world.wait_for_step(2)
        stop(1).happen(world)
        world.wait_for_step(4)
        lose_node(3).happen(world)
        world.finish_well(undisturbed, 300)
        assert "6 ranks on 3 nodes: rollout 0-2, inference 3" in world.output()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give the actors' node a disk with room for two checkpoints."""
    disk = tmp_path / "node3"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(small_disk: Path, undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    """The disk is full again after a restart, which ends the run. With more room the run goes on."""
    with running(tmp_path, loop=True) as world:
        said = r"oneworld: rank [67] \(actor\) on node3, stage checkpoint, step 3: CheckpointError: cannot write "
        said += (
            rf"{small_disk}/x/checkpoints/step_3\S+: No space left on device \({small_disk}\S+ has [\d.]+ \w+ left\)"
        )
        world.expect((None, said), (None, said))
        assert world.finish() == [1, 1, 1, 1]
        assert world.output().count("oneworld: fatal, will not be restarted") == 1
        for node in range(4):
            assert "No space left on device" in (world.run_folder(node) / "FATAL").read_text()
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    with running(tmp_path) as world:
        world.finish_well(undisturbed)
        assert "resumes after step 2" in world.output()


@pytest.mark.parametrize("times", ["once", "twice in the first attempt"])
def test_an_exception_in_an_engine(times: str, undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    """After one exception the engine is built again. After two in a row its rank ends, and with it the attempt."""
    with running(tmp_path, broken=f"engine, {times}", culprit=1) as world:
        ended = r"oneworld: rank 1 \(rollout\) on node0, stage rollout, step 1: ZeroDivisionError: planted"
        if times != "once":
            world.expect((None, ended))
        world.finish_well(undisturbed)
        assert world.output().count("oneworld: the engine of rank 1 failed at step ") == 1


@pytest.mark.timeout(900)
def test_a_killed_worker_with_real_engines(tmp_path: Path) -> None:
    """One of the two ranks of an engine is killed. Nothing is left of the memory that they shared."""
    settings = ["rollout.engine=vllm", "placement.rollout=25%", "rollout.tensor_parallel_size=2"]
    settings += ["train.num_steps=4", "world.silence_floor_s=30"]
    with running(tmp_path / "undisturbed", *settings) as world:
        assert world.finish(300) == [0, 0, 0, 0], world.output()[-6000:]
        undisturbed = world.metrics()
    with running(tmp_path / "disturbed", *settings) as world:
        world.wait_for_step(2, 300)
        kill("rollout").happen(world)
        world.finish_well(undisturbed, 300)
