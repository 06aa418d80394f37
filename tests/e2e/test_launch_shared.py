"""launch/local.sh with a shared directory and real training on three nodes, numbered by options or the environment."""

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster import cluster, end
from tests.launcher import command_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
SETTINGS = "rollout.engine=fake train.num_steps=3 train.num_prompts_per_step=6 eval.interval=0 run.name=x"


def has_torchrun(launcher: subprocess.Popen[bytes]) -> bool:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return any("--rdzv-id" in command_of(child) for child in children)


def test_an_early_and_a_late_worker_next_to_the_file_of_an_older_run(tmp_path: Path) -> None:
    """One worker waits before there is a head, next to the file of a killed one. The other comes when head and worker
    already meet. Each node has its own run directory. The second head and the late worker are numbered by the
    environment."""
    shared = tmp_path / "shared"
    file = shared / "head.json"
    with cluster(3) as nodes:
        launchers = []

        def launch(index: int, role: str, number: str = "") -> subprocess.Popen[bytes]:
            command = f"bash launch/local.sh {role} --shared {shared} --nproc 1 {SETTINGS}"
            command = f"env ONEWORLD_PREFLIGHT=0 {number} {command}"
            launchers.append(nodes[index].start(f"{command} run.dir={tmp_path / nodes[index].name}"))
            return launchers[-1]

        try:
            older = launch(0, "--master --nnodes 3")
            until(lambda: has_torchrun(older), "the older run")
            nodes[0].kill()
            older.wait(timeout=10)
            assert file.exists(), "it was killed, and has left its file"

            early = launch(1, "--worker 1 --wait 60")
            until(lambda: f"oneworld: ignoring {file}" in nodes[1].output, "the early worker")
            assert "10.77.0.1" in nodes[1].output and not has_torchrun(early)
            head = launch(0, "--nnodes 3", "NODE_RANK=0 RANK=0 LOCAL_RANK=0 WORLD_SIZE=3")
            until(lambda: has_torchrun(head) and has_torchrun(early), "the meeting of head and early worker")
            late = launch(2, "--nnodes 3 --wait 60", "RANK=2")
            codes = [launcher.wait(timeout=100) for launcher in (head, early, late)]
            outputs = [node.output for node in nodes]
        finally:
            end(launchers)
    assert codes == [0, 0, 0], "\n".join(outputs)[-6000:]
    assert sum("3 ranks on 3 nodes" in output for output in outputs) == 1
    assert "ignoring" not in outputs[2], "the late worker meets the new head's file only"
    assert not file.exists()
    (metrics,) = tmp_path.glob("node*/x/metrics.jsonl")
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][1:] == [1, 2, 3]
    assert len(list(tmp_path.glob("node*/x/checkpoints/step_3/model-*"))) == 3
