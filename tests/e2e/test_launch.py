"""launch/local.sh around a real run: torchrun, or the loop around it, restarts what dies, and the run continues."""

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.launcher import ROOT, activated_environment, command_of, finish, members, spawn
from tests.ports import free_port

pytestmark = [pytest.mark.alone, pytest.mark.timeout(150)]
NUM_STEPS = 8
SETTINGS = ["rollout.engine=fake", f"train.num_steps={NUM_STEPS}", "train.num_prompts_per_step=4", "eval.interval=0"]
# With "never" a launch begins anew, and its later attempts go on.
SAVING = ["checkpoint.save_interval=1", "checkpoint.resume=never", "run.name=x"]


def steps(folder: Path) -> list[int]:
    """Return the steps in the metrics, without the evaluation before training."""
    file = folder / "x" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()][1:] if file.exists() else []


@pytest.mark.slow  # the loop itself is tested in milliseconds: tests/unit/test_launchers.py
@pytest.mark.parametrize("victim", ["agent", "worker"])
def test_a_killed_process_is_restarted_and_the_run_continues(victim: str, tmp_path: Path) -> None:
    command = [str(ROOT / "launch" / "local.sh"), "--nproc", "1", *SETTINGS, *SAVING, f"run.dir={tmp_path}"]
    process = spawn(["bash", *command], activated_environment(ONEWORLD_BACK_OFF_S="0", ONEWORLD_PREFLIGHT="0"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "x" / "checkpoints" / "step_1").exists():
        assert process.poll() is None and time.monotonic() < deadline, "the run did not get to step 1"
        time.sleep(0.02)
    before = len(steps(tmp_path))
    agents = [one for one in members(process.pid) if any(part.endswith("torchrun") for part in command_of(one))]
    (agent,) = [one for one in agents if one.ppid() == process.pid]
    ranks = [one for one in psutil.Process(agent.pid).children() if "train.py" in command_of(one)]
    assert before < NUM_STEPS and len(ranks) == 1
    (agent if victim == "agent" else ranks[0]).send_signal(signal.SIGKILL)
    output = finish(process, 100)
    assert process.returncode == 0, output[-4000:]
    assert steps(tmp_path) == list(range(1, NUM_STEPS + 1))
    assert output.count("step 1/") == 1, output
    assert output.count("oneworld: torchrun ended with status 137") == (victim == "agent"), output[-4000:]


@pytest.mark.slow
def test_ranks_that_refuse_their_settings_are_not_restarted(tmp_path: Path) -> None:
    """Only the ranks and preflight can see this mistake, and preflight is left out."""
    command = [str(ROOT / "launch" / "local.sh"), "--nproc", "1", *SETTINGS, *SAVING, "placement.actor,rollout=0-1"]
    process = spawn(["bash", *command, f"run.dir={tmp_path}"], activated_environment(ONEWORLD_PREFLIGHT="0"))
    output = finish(process, 60)
    assert process.returncode == 1
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("oneworld: placement.rollout,actor: got rank 1 in a world of 1 rank"), output[-4000:]
    assert last in (tmp_path / "x" / "FATAL").read_text()


def start_two_nodes(folder: Path, *settings: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start a head and a worker on this machine that meet through a shared directory. The worker starts first."""
    port = free_port()
    environment = activated_environment(ONEWORLD_BACK_OFF_S="1", ONEWORLD_PREFLIGHT="0")
    local, place = ["bash", str(ROOT / "launch" / "local.sh")], ["--shared", str(folder / "shared"), "--nproc", "1"]
    arguments = [*SETTINGS, *SAVING, f"run.dir={folder}", *settings]
    worker = spawn([*local, "--worker", "1", *place, *arguments], environment)
    head = spawn([*local, "--master", "--nnodes", "2", "--port", str(port), *place, *arguments], environment)
    return head, worker


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_worker_meets_a_restarted_head(tmp_path: Path) -> None:
    head, worker = start_two_nodes(tmp_path)
    wait_for(tmp_path / "x" / "checkpoints" / "step_1", head)
    agents = [one for one in members(head.pid) if any(part.endswith("torchrun") for part in command_of(one))]
    (agent,) = [one for one in agents if one.ppid() == head.pid]
    agent.send_signal(signal.SIGKILL)
    outputs = [finish(process, 120) for process in (head, worker)]
    assert [head.returncode, worker.returncode] == [0, 0], "\n".join(outputs)[-6000:]
    assert steps(tmp_path) == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_signals_to_one_launcher_reach_the_world(tmp_path: Path) -> None:
    """SIGUSR1 saves, and SIGINT on one node ends the loops of both."""
    head, worker = start_two_nodes(tmp_path, "train.num_steps=2000", "checkpoint.save_interval=0")
    wait_for(tmp_path / "x" / "metrics.jsonl", head)
    while len(steps(tmp_path)) < 2:
        time.sleep(0.05)
    assert not list((tmp_path / "x" / "checkpoints").glob("step_*"))
    worker.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "x" / "checkpoints").glob("step_*[0-9]")):
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.05)
    worker.send_signal(signal.SIGINT)
    outputs = [finish(process, 45) for process in (head, worker)]
    assert [head.returncode, worker.returncode] == [1, 130], "\n".join(outputs)[-6000:]
    lines = sorted(output.rstrip().splitlines()[-1] for output in outputs)
    assert lines[0].startswith("oneworld: interrupted at step "), outputs
    assert lines[1].startswith("oneworld: the ranks on ") and ": interrupted at step " in lines[1], outputs
