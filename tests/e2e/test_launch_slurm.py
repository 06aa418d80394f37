"""launch/slurm.sbatch and tools/jobs.py on a real Slurm: a controller and two nodes on this machine. Needs slurmctld,
slurmd and root."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher import ROOT, activated_environment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NUM_STEPS = 25
SETTINGS = ["rollout.engine=fake", f"train.num_steps={NUM_STEPS}", "train.num_prompts_per_step=4", "eval.interval=0"]
SETTINGS += ["checkpoint.save_interval=0", "placement.num_gpus_per_node=1", "run.name=x"]

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
# A requeued job waits until its credentials have expired.
AuthInfo=cred_expire=10
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
MpiDefault=none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = activated_environment(SLURM_CONF=str(folder / "slurm.conf"), ONEWORLD_PREFLIGHT="0")

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, cwd=ROOT, text=True, capture_output=True, timeout=20
        ).stdout

    def submit(self, *arguments: str) -> str:
        output = f"{self.folder}/out-%j"
        answer = self.ask("sbatch", "--nodes", "2", "--output", output, "launch/slurm.sbatch", *arguments)
        return answer.split()[-1]

    def jobs(self, *arguments: str) -> str:
        """tools/jobs.py, which must have no error."""
        command = [sys.executable, "tools/jobs.py", "--runs", str(self.folder), *arguments]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, text=True, capture_output=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def address(self) -> str:
        """Of the first node, whose name nobody knows."""
        return self.ask(sys.executable, "launch/find_head.py", "address").strip()

    def output(self, job: str) -> str:
        file = self.folder / f"out-{job}"
        return file.read_text() if file.exists() else ""

    def has_ended(self, job: str) -> bool:
        return not self.ask("squeue", "--noheader", "--states", "R,CG,PD", "--job", job).strip()

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if os.getuid() or not (shutil.which("slurmctld") and shutil.which("slurmd")):
        pytest.skip("needs root, and slurmctld and slurmd, which Debian's packages of these names have")
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(3)]
    host = socket.gethostname().split(".")[0]
    conf = SLURM_CONF.format(folder=tmp_path, host=host, ports=ports, cpus=os.cpu_count())
    (tmp_path / "slurm.conf").write_text(conf)
    (tmp_path / "state").mkdir()
    slurm = Slurm(tmp_path)
    daemons = []
    try:
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]):
            log = (tmp_path / f"{command[-1]}.log").open("w")
            daemons.append(subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log))
        until(lambda: "idle" in slurm.ask("sinfo", "--noheader", "--format", "%T %D"), "Slurm's start", 30)
        yield slurm
        slurm.ask("scancel", "--user", "root")
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=20)


def test_a_job_saves_on_request_and_when_cancelled_and_the_next_continues(slurm: Slurm, tmp_path: Path) -> None:
    metrics, run = tmp_path / "x" / "metrics.jsonl", tmp_path / "x"
    arguments = ["--head", slurm.address(), "--activate", str(tmp_path / "env.sh"), *SETTINGS, f"run.dir={tmp_path}"]
    job = slurm.submit(*arguments)
    until(lambda: slurm.has_ended(job), "the end of a job whose nodes lack a file", 60)
    for node in ("0 (node1)", "1 (node2)"):
        assert f"oneworld: node {node}: there is no file {tmp_path}/env.sh that can be read" in slurm.output(job)
    assert "torchrun" not in slurm.output(job)
    (tmp_path / "env.sh").write_text(f"touch {tmp_path}/sourced-$SLURMD_NODENAME\n")
    job = slurm.submit(*arguments)
    until(lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), "step 3", 120)
    slurm.ask("scancel", "--signal=USR1", job)
    until(lambda: list((run / "checkpoints").glob("step_*")), "the checkpoint that was asked for", 30)
    slurm.ask("scancel", job)
    until(lambda: slurm.has_ended(job), "the end of the job", 60)
    output = slurm.output(job)
    assert output.count("oneworld: stopped at step ") == 1, output
    assert sorted(path.name for path in tmp_path.glob("sourced-*")) == ["sourced-node1", "sourced-node2"]
    saved = [int(folder.name.removeprefix("step_")) for folder in (run / "checkpoints").glob("step_*")]
    assert saved and 3 <= max(saved) < NUM_STEPS, output
    job = slurm.submit(*arguments)
    until(lambda: slurm.has_ended(job), "the end of the second job", 120)
    assert slurm.state(job) == "COMPLETED", slurm.output(job)
    assert "2 ranks on 2 nodes" in slurm.output(job)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][1:] == list(range(1, NUM_STEPS + 1))


def test_the_demo_as_a_job(slurm: Slurm) -> None:
    """tools/jobs.py submits the embedded default on vLLM and follows it to its end."""
    settings = ["train.num_steps=3", "eval.interval=0", "placement.num_gpus_per_node=1"]
    said = slurm.jobs("submit", "--slurm=--nodes 2", "demo", "--head", slurm.address(), *settings)
    assert "demo: submitted" in said
    output = slurm.jobs("logs", "-f", "demo")
    assert "2 ranks on 2 nodes" in output and "engine vllm" in output, output[-4000:]
    assert slurm.jobs("list").splitlines()[1].split()[:3] == ["demo", "done", "3"]
    assert slurm.jobs("stop", "demo") == "demo: done already\n"
    file = slurm.folder / "demo" / "job.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"slurm_id": "4711"}))  # as when Slurm has forgotten it
    assert slurm.jobs("list").splitlines()[1].split()[:3] == ["demo", "done", "3"]


def test_a_job_at_its_time_limit_is_requeued_and_continues(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm signals before the time limit, up to a minute earlier than requested."""
    metrics, console = tmp_path / "x" / "metrics.jsonl", tmp_path / "x" / "console.log"
    settings = [setting for setting in SETTINGS if not setting.startswith(("run.name", "train.num_steps"))]
    settings += ["train.num_steps=100000", "checkpoint.resume=never"]
    slurm.jobs("submit", "--slurm=--nodes 2 --time 2 --signal=B:USR1@30", "x", "--head", slurm.address(), *settings)
    until(lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), "step 3", 60)
    assert slurm.jobs("list").splitlines()[1].split()[:2] == ["x", "running"]
    until(lambda: "is requeued" in console.read_text(), "the end of its time", 120)
    job = json.loads((tmp_path / "x" / "job.json").read_text())["slurm_id"]
    output = console.read_text()
    assert f"the time of job {job} is almost over" in output and "oneworld: stopped at step " in output
    saved = max(int(folder.name.removeprefix("step_")) for folder in (tmp_path / "x/checkpoints").glob("step_*"))
    until(lambda: f"resumes after step {saved}" in console.read_text(), "its second start", 120)
    until(lambda: f'"step": {saved + 2},' in metrics.read_text(), "what follows", 60)
    assert slurm.jobs("stop", "x") == "x: stopped\n"
    assert slurm.state(job) == "CANCELLED" and slurm.ask("scontrol", "show", "job", job).count("Restarts=1") == 1
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()][1:]
    assert steps == list(range(1, len(steps) + 1)), "no step was lost or done twice"
