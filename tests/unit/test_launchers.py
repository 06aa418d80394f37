"""The launchers with a fake torchrun: the command that each builds, the restart loop, and how nodes find each other."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.debian import find_program
from tests.launcher import ROOT
from tests.ports import free_port
from tests.sshd import ssh_server

pytestmark = pytest.mark.timeout(30)
LAUNCH = ROOT / "launch"
SCHEDULERS = ("SLURM_", "SKYPILOT_", "DSTACK_", "PET_", "ONEWORLD_", "TORCHELASTIC_")
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# Records its arguments and environment, then runs the line of `script` for this call.
FAKE_TORCHRUN = """#!/bin/bash
calls={folder}/calls
number=1
until mkdir "$calls/.$number" 2>/dev/null; do number=$((number + 1)); done
printf '%s\\0' "$@" > "$calls/.$number/call"
env -0 > {folder}/environment
mv "$calls/.$number/call" "$calls/$number"
eval "$(sed -n "${{number}}p" {folder}/script)"
"""


class Machine:
    """A copy of launch/, and a directory of fake programs that stand for the real ones."""

    def __init__(self, folder: Path):
        self.folder, self.root, self.bin = folder, folder / "repository", folder / "bin"
        self.calls = folder / "calls"
        self.calls.mkdir()
        self.bin.mkdir()
        shutil.copytree(LAUNCH, self.root / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        self.program("torchrun", FAKE_TORCHRUN.format(folder=folder))
        self.script("exit 0")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(SCHEDULERS) and k not in DEVICES}
        path = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = clean | {"PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0,1"}
        self.environment |= {"ONEWORLD_BACK_OFF_S": "0", "ONEWORLD_PREFLIGHT": "0"}
        self._processes: list[subprocess.Popen[str]] = []

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def script(self, *lines: str) -> None:
        (self.folder / "script").write_text("\n".join(lines) + "\n")

    def start(self, launcher: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        return self._start(["bash", str(self.root / "launch" / launcher), *arguments], extra)

    def _start(self, command: list[str], extra: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=self.environment | extra,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(self, launcher: str, *arguments: str, code: int = 0, **extra: str) -> str:
        return self._end_of(self.start(launcher, *arguments, **extra), code)

    def shell(self, script: str, code: int = 0) -> str:
        return self._end_of(self._start(["bash", "-c", script], {}), code)

    def _end_of(self, process: subprocess.Popen[str], code: int) -> str:
        output, _ = process.communicate(timeout=20)
        assert process.returncode == code, output
        return output

    def call(self, number: int) -> list[str]:
        return (self.calls / str(number)).read_text().split("\0")[:-1]

    @property
    def num_calls(self) -> int:
        return len(list(self.calls.glob("[0-9]*")))

    def seen(self) -> dict[str, str]:
        """Return the environment of the last call."""
        entries = (self.folder / "environment").read_text().split("\0")
        return dict(entry.split("=", 1) for entry in entries if entry)

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.end()


def until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


# The loop around torchrun


def test_arguments_survive_and_every_attempt_is_the_same_run(machine: Machine) -> None:
    machine.script("exit 1", "exit 1", "exit 0")
    odd = ['data.system_prompt=it\'s "a"  $HOME *', "data.chat_template=true"]
    output = machine.run("local.sh", "--nproc", "3", "--config", "configs/rloo.yaml", *odd)
    assert machine.num_calls == 3
    first = machine.call(1)
    assert first[:-1] == ["--nnodes", "1", "--nproc-per-node", "3", "train.py", "--config", "configs/rloo.yaml", *odd]
    assert first[-1].startswith("run.name=rloo-20")
    assert machine.call(2) == machine.call(3) == first
    assert machine.seen()["PET_RDZV_BACKEND"] == "c10d"
    assert output.count("torchrun ended with status 1") == 2


def test_a_given_run_name_is_kept(machine: Machine) -> None:
    machine.run("local.sh", "run.name=mine")
    assert machine.call(1)[-2:] == ["run.name=mine", "run.name=mine"]


def test_the_number_of_ranks_is_that_of_visible_gpus(machine: Machine) -> None:
    assert "--nproc-per-node 2 " in machine.run("local.sh", "--print")
    assert "--nproc-per-node 3 " in machine.run("local.sh", "--print", CUDA_VISIBLE_DEVICES="4,5,7")
    assert "--nproc-per-node 6 " in machine.run(
        "local.sh", "--print", "placement.num_gpus_per_node=6", CUDA_VISIBLE_DEVICES=""
    )
    del machine.environment["CUDA_VISIBLE_DEVICES"]
    assert re.search("--nproc-per-node [1-9]", machine.run("local.sh", "--print"))
    machine.program("nvidia-smi", '#!/bin/bash\nprintf "GPU %s: H100\\n" 0 1 2 3\n')
    assert "--nproc-per-node 4 " in machine.run("local.sh", "--print")
    assert machine.num_calls == 0


def test_mistakes_in_the_settings_start_nothing(machine: Machine) -> None:
    assert "did you mean actor.lr?" in machine.run("local.sh", "actor.lrr=1", code=2)
    assert "no config file at none.yaml" in machine.run("local.sh", "--config", "none.yaml", code=2)
    assert machine.num_calls == 0


def test_a_fatal_error_ends_the_loop_but_an_older_one_does_not(machine: Machine) -> None:
    run = machine.root / "runs" / "x"
    run.mkdir(parents=True)
    (run / "FATAL").write_text("of the last launch\n")
    machine.script("exit 1", f"echo bad data > {run}/FATAL; exit 1", "exit 0")
    output = machine.run("local.sh", "run.name=x", code=1)
    assert machine.num_calls == 2
    assert "not restarted, see runs/x/FATAL" in output


def test_ranks_that_stop_torchrun_end_the_loop(machine: Machine) -> None:
    machine.script('touch "$ONEWORLD_STOP_FILE"; exit 1', "exit 0")
    assert "the ranks told torchrun to stop" in machine.run("local.sh", code=1)
    assert machine.num_calls == 1


@pytest.mark.parametrize(
    ("told", "last"),
    [
        ('echo "oneworld: bad data" > "$ONEWORLD_LAST_LINE_FILE"', "oneworld: bad data"),
        (': > "$ONEWORLD_LAST_LINE_FILE"', "torchrun's"),  # which left out its traceback
        ('test ! -e "$ONEWORLD_LAST_LINE_FILE"', "oneworld: not restarted: the ranks told torchrun to stop"),
    ],
)
def test_what_the_ranks_said_stands_last(told: str, last: str, machine: Machine) -> None:
    """What an earlier attempt said does not count."""
    earlier = 'echo "oneworld: the first attempt" > "$ONEWORLD_LAST_LINE_FILE"; exit 1'
    machine.script(earlier, f'{told} && echo "torchrun\'s"; touch "$ONEWORLD_STOP_FILE"; exit 1')
    assert machine.run("local.sh", code=1).rstrip().splitlines()[-1] == last


@pytest.mark.parametrize("is_told", [True, False])
def test_what_the_ranks_said_stands_last_after_a_signal(is_told: bool, machine: Machine) -> None:
    tell = 'echo "oneworld: stopped at step 7" > "$ONEWORLD_LAST_LINE_FILE"; ' if is_told else ""
    machine.script(f"trap '{tell}echo Traceback; exit 1' TERM; echo up; while :; do sleep 0.1; done")
    process = machine.start("local.sh")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert output.rstrip().splitlines()[-1] == ("oneworld: stopped at step 7" if is_told else "Traceback")


def test_short_attempts_are_limited(machine: Machine) -> None:
    machine.script(*["exit 7"] * 9)
    hook = "http://127.0.0.1:9/a-secret-part"
    output = machine.run("local.sh", code=1, ONEWORLD_MAX_ATTEMPTS="4", ONEWORLD_WEBHOOK=hook)
    assert machine.num_calls == 4
    assert "gave up: 4 attempts in a row ended within 300 s" in output
    failed = "ONEWORLD_WEBHOOK: the message about the end of the run was not sent: URLError"
    assert output.count(failed) == 1 and "secret-part" not in output


@pytest.mark.parametrize(("left", "is_told"), [("x-world tell", True), ("x-world", False)])
def test_the_node_whose_watchdog_leaves_the_message_tells_the_webhook(
    left: str, is_told: bool, machine: Machine
) -> None:
    """On the other nodes, the ranks have met too. Without a world, the node of rank 0 tells."""
    machine.script(*[f'echo "{left}" > "$ONEWORLD_WORLD_FILE"; exit 7'] * 2)
    hook = {"ONEWORLD_MAX_ATTEMPTS": "2", "ONEWORLD_WEBHOOK": "http://127.0.0.1:9/a-secret-part"}
    output = machine.run("local.sh", code=1, **hook)
    assert output.count("the message about the end of the run was not sent") == is_told, output


def test_a_long_attempt_resets_the_limit_and_the_back_off(machine: Machine) -> None:
    machine.program("sleep", '#!/bin/bash\necho "sleeps $1"\n')
    machine.script("exit 1", "exit 1", "/bin/sleep 2.1; exit 1", "exit 1", "exit 0")
    output = machine.run("local.sh", ONEWORLD_MAX_ATTEMPTS="3", ONEWORLD_LASTED_S="2", ONEWORLD_BACK_OFF_S="40")
    assert [line for line in output.splitlines() if "sleeps" in line] == [
        "sleeps 40",
        "sleeps 60",
        "sleeps 40",
        "sleeps 60",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_torchrun_once_and_end_the_loop(machine: Machine, number: int, code: int) -> None:
    name = signal.Signals(number).name
    machine.script(f"trap 'echo got {name}; sleep 0.2; exit 1' {name[3:]}; echo up; while :; do sleep 0.05; done")
    process = machine.start("local.sh")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
    output, _ = process.communicate(timeout=10)
    assert (process.returncode, output.count(f"got {name}"), machine.num_calls) == (code, 1, 1)


def test_a_signal_ends_the_back_off(machine: Machine) -> None:
    machine.script("exit 1")
    process = machine.start("local.sh", ONEWORLD_BACK_OFF_S="30")
    assert process.stdout is not None and "in 30 s" in process.stdout.readline()
    process.terminate()
    assert process.wait(timeout=5) == 143


def test_usr1_reaches_only_ranks_that_are_ready_for_it(machine: Machine) -> None:
    """Slurm sends it to all processes. torchrun, and a rank that is still importing, would die of it."""
    ready = "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *a: os.write(1, b'saved\\n')); "
    ready += "print('up', flush=True)\nwhile not os.path.exists('end'): time.sleep(0.05)"
    (machine.folder / "ready.py").write_text(ready)
    unready = "until [ -e end ]; do sleep 0.05; done"
    machine.script(
        f'cd {machine.folder}; echo $$ >pid; "{sys.executable}" ready.py & ({unready}) & wait $!; '
        "code=$?; wait; exit $code"
    )
    process = machine.start("local.sh")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "saved\n"
    os.killpg(int((machine.folder / "pid").read_text()), signal.SIGUSR1)
    assert process.stdout.readline() == "saved\n"
    (machine.folder / "end").touch()
    output, _ = process.communicate(timeout=10)
    assert (process.returncode, output, machine.num_calls) == (0, "", 1)


def test_torchrun_ends_with_a_killed_launcher(machine: Machine) -> None:
    machine.script("echo $$; sleep 20")
    process = machine.start("local.sh")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())


def test_preflight_comes_first(machine: Machine) -> None:
    del machine.environment["ONEWORLD_PREFLIGHT"]
    machine.script("exit 0", "exit 0", "exit 9", 'echo 1 > "$ONEWORLD_PREFLIGHT_CODE"', "exit 0")
    nodes = ["--nproc", "8", "--head", "h", "--launch", "7"]
    machine.run("run_node.sh", *nodes, "train.num_steps=3")
    settings = ["train.num_steps=3", "run.name=default-7"]
    rendezvous = ["--rdzv-endpoint", "h:29501", "--rdzv-id", "default-7-preflight", "launch/preflight.py"]
    assert machine.call(1)[-7:] == [*rendezvous, *settings]
    assert machine.call(2)[-7:] == ["--rdzv-endpoint", "h:29500", "--rdzv-id", "default-7", "train.py", *settings]
    assert "preflight failed" in machine.run("run_node.sh", *nodes, code=9)
    assert "preflight failed" in machine.run("run_node.sh", *nodes, code=1), "by what the ranks left in a file"
    assert machine.num_calls == 4
    machine.run("run_node.sh", *nodes, ONEWORLD_PREFLIGHT="0")
    assert "train.py" in machine.call(5)


def test_several_nodes_hold_a_roll_call_before_preflight(machine: Machine) -> None:
    del machine.environment["ONEWORLD_PREFLIGHT"]
    nodes = ["--nnodes", "2", "--nproc", "8", "--head", "127.0.0.1", "--port", str(free_port())]
    wait = {"ONEWORLD_PREFLIGHT_WAIT_S": "0.2", "ONEWORLD_NODES": "alpha beta"}
    assert "on 1 of 2 nodes: node 1 (beta)" in machine.run(
        "run_node.sh", *nodes, "--node-rank", "0", "run.name=x", code=1, **wait
    )
    output = machine.run("run_node.sh", *nodes, "--node-rank", "1", "run.name=x", code=1, **wait)
    assert "could not reach the head at 127.0.0.1:" in output and "so nothing was started" in output
    assert machine.num_calls == 0
    processes = [machine.start("run_node.sh", *nodes, "--node-rank", rank, "run.name=x") for rank in "10"]
    outputs = [process.communicate(timeout=15)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    programs = [part for number in range(1, 5) for part in machine.call(number) if part.endswith(".py")]
    assert programs.count("launch/preflight.py") == programs.count("train.py") == 2


def test_nodes_differ_only_in_their_environment(machine: Machine) -> None:
    nodes = ["--nnodes", "2", "--nproc", "8", "--launch", "7"]
    machine.run("run_node.sh", *nodes, "--head", "fd00::1", "--node-rank", "0")
    head = machine.seen()
    machine.run("run_node.sh", *nodes, "--head", "fd00::1", "--node-rank", "1")
    worker = machine.seen()
    assert machine.call(1) == machine.call(2)
    assert "[fd00::1]:29500" in machine.call(1)
    assert head["PET_RDZV_CONF"].endswith(",keep_alive_max_attempt=3,is_host=1")
    assert worker["PET_RDZV_CONF"].endswith(",keep_alive_max_attempt=3,is_host=0")
    assert head["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    machine.run("run_node.sh", *nodes, "--head", "127.0.0.1", "--node-rank", "0")
    assert machine.seen()["PET_LOCAL_ADDR"] == "127.0.0.1"


def test_several_nodes_need_one_run_name(machine: Machine) -> None:
    assert "needs --head" in machine.run("run_node.sh", "--nnodes", "2", code=2)
    assert "need one run" in machine.run("run_node.sh", "--nnodes", "2", "--head", "h", code=2)
    machine.run("run_node.sh", "--nnodes", "2", "--head", "h", "run.name=x")


# A shared folder


def test_workers_wait_for_the_head_and_ignore_a_stale_file(machine: Machine) -> None:
    """The worker starts first, next to the file of an older run."""
    shared = machine.folder / "shared"
    shared.mkdir()
    (shared / "head.json").touch(mode=0o600)
    (shared / "head.json").write_text(json.dumps({"addresses": ["127.0.0.1"], "answer_port": 1, "secret": "x" * 64}))
    machine.script(f"until [ -e {machine.folder}/end ]; do sleep 0.05; done", f"touch {machine.folder}/end")
    worker = machine.start("local.sh", "--worker", "1", "--shared", str(shared), "--nproc", "1", "--wait", "10")
    assert worker.stdout is not None and "ignoring" in worker.stdout.readline()
    port = str(free_port())
    head = machine.start(
        "local.sh", "--master", "--nnodes", "2", "--shared", str(shared), "--nproc", "1", "--port", port
    )
    assert worker.communicate(timeout=15) and worker.returncode == 0
    assert head.communicate(timeout=15) and head.returncode == 0
    first, second = machine.call(1), machine.call(2)
    assert first[-3:] == second[-3:]
    assert first[-3].startswith("default-20")
    assert first[5].endswith(f":{port}") and second[5].endswith(f":{port}")
    until(lambda: not (shared / "head.json").exists())


def test_a_worker_does_not_wait_for_ever(machine: Machine) -> None:
    output = machine.run("local.sh", "--worker", "1", "--shared", str(machine.folder / "none"), "--wait", "0.5", code=1)
    assert "found no head in" in output
    assert machine.num_calls == 0


def test_a_head_reports_a_port_that_is_taken(machine: Machine) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        arguments = ["--master", "--nnodes", "2", "--shared", str(machine.folder), "--port", port]
        assert "give another one with --port" in machine.run("local.sh", *arguments, code=2)
    assert not (machine.folder / "head.json").exists()


# Schedulers

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "8"}
TORCHRUN = "torchrun --nnodes {nodes} --nproc-per-node 8 --rdzv-endpoint {endpoint} --rdzv-id {name} train.py"
ARGUMENTS = ["--config", "configs/rloo.yaml", "data.system_prompt=two words", "data.chat_template=true"]


def expected(nodes: int, endpoint: str, name: str) -> list[str]:
    line = TORCHRUN.format(nodes=nodes, endpoint=endpoint, name=name)
    return [*line.split(), *ARGUMENTS, f"run.name={name}"]


@pytest.fixture
def slurm(machine: Machine) -> Machine:
    machine.program("scontrol", '#!/bin/bash\n[ "$*" = "show hostnames n[1-4]" ] && printf "n%s\\n" 1 2 3 4\n')
    machine.program("srun", f'#!/bin/bash\nprintf "%s\\n" "$@" >> {machine.folder}/srun\n')
    machine.environment |= SLURM | {"SLURM_SUBMIT_DIR": str(machine.root), "HF_HOME": "/models", "HF_TOKEN": "secret"}
    return machine


def test_slurm_builds_the_command(slurm: Machine) -> None:
    step, line = map(shlex.split, slurm.run("slurm.sbatch", "--print", *ARGUMENTS).splitlines())
    assert line == expected(4, "n1:24711", "rloo-slurm-4711")
    assert step[:5] == ["srun", "--nodes", "4", "--ntasks-per-node", "1"]
    slurm.run("slurm.sbatch", *ARGUMENTS)
    assert (slurm.folder / "srun").read_text().splitlines() == step[1:]
    assert slurm.num_calls == 0
    slurm.program("srun", '#!/bin/bash\necho "$ONEWORLD_NODES"\n')
    assert slurm.run("slurm.sbatch") == "n1 n2 n3 n4\n", "for preflight"


@pytest.mark.parametrize(
    ("runtime", "parts"),
    [
        ("apptainer", ["--bind {root} --bind /models --pwd {root} image launch/run_node.sh"]),
        ("enroot", ["enroot start --rw --mount {root}:{root} --mount /models:/models", "--env HF_TOKEN", "image bash"]),
        (
            "pyxis",
            ["--container-mounts {root}:{root},/models:/models --container-workdir {root}", "--container-image image"],
        ),
    ],
)
def test_slurm_starts_containers(slurm: Machine, runtime: str, parts: list[str]) -> None:
    output = slurm.run("slurm.sbatch", "--print", "--runtime", runtime, "--image", "image", *ARGUMENTS)
    step, line = output.splitlines()
    assert shlex.split(line) == expected(4, "n1:24711", "rloo-slurm-4711")
    for part in parts:
        assert part.format(root=slurm.root) in " ".join(shlex.split(step))
    assert "secret" not in output


def test_slurm_amd_builds_the_command(slurm: Machine) -> None:
    output = slurm.run("slurm_amd.sbatch", "--print", "--runtime", "docker", "--head", "fd00::1", *ARGUMENTS)
    container, line = output.splitlines()
    assert shlex.split(line) == expected(4, "[fd00::1]:24711", "rloo-slurm-4711")
    for part in (
        "--network host --ipc host",
        "--device /dev/kfd --device /dev/dri",
        f"--volume {slurm.root}:{slurm.root} --volume /models:/models",
        "--env HIP_VISIBLE_DEVICES",
        "--env ROCR_VISIBLE_DEVICES",
        "--env CUDA_VISIBLE_DEVICES",
        "--env RCCL_MSCCL_ENABLE",
        "--env NCCL_IB_GID_INDEX",
        "--env ONEWORLD_NODES",
        "--env HF_TOKEN",
        f"--workdir {slurm.root} oneworld-rocm launch/run_node.sh",
    ):
        assert part in container, part
    assert "secret" not in output
    podman = slurm.run("slurm_amd.sbatch", "--print", "--runtime", "podman", *ARGUMENTS)
    assert "podman run --rm" in podman and "--userns keep-id" in podman


def test_slurm_amd_runs_one_container_per_node(slurm: Machine) -> None:
    """srun runs the file again on each node. It builds a missing image and passes the variables on."""
    slurm.program("srun", '#!/bin/bash\nwhile [ "$1" != "--chdir" ]; do shift; done; cd "$2" && shift 2 && exec "$@"\n')
    show = 'echo "$ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES $CUDA_VISIBLE_DEVICES $NCCL_PROTO"'
    docker = f'#!/bin/bash\necho "docker $*"; case $1 in image) exit 1 ;; run) {show}; exit 5 ;; esac\n'
    slurm.program("docker", docker)
    devices = {"ROCR_VISIBLE_DEVICES": "4,5", "SLURM_GPUS_ON_NODE": "2", "NCCL_PROTO": "mine"}
    output = slurm.run("slurm_amd.sbatch", *ARGUMENTS, code=5, **devices).splitlines()
    assert output[0] == f"docker build --tag oneworld-rocm --file {slurm.root}/launch/Dockerfile.rocm {slurm.root}"
    assert "docker run --rm --init --name oneworld-4711-0 " in output[1]
    assert output[1].endswith(f"--nproc 2 --launch slurm-4711 -- {' '.join(ARGUMENTS)}")
    assert output[2] == "4,5 0,1 0,1 mine"


def test_slurm_refuses_to_run_outside_of_a_job(machine: Machine) -> None:
    for launcher in ("slurm.sbatch", "slurm_amd.sbatch"):
        assert "submit this file with sbatch" in machine.run(launcher, "--print", code=2)


def render(machine: Machine, script: str, environment: dict[str, str]) -> list[str]:
    """Run the commands of a scheduler's file with --print among the user's arguments."""
    environment = machine.environment | environment | {"ARGS": f"--print {shlex.join(ARGUMENTS)}"}
    result = subprocess.run(
        ["sh", "-ec", script], cwd=machine.root, env=environment, text=True, capture_output=True, timeout=20
    )
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


def test_skypilot_builds_the_command(machine: Machine) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "workdir", "resources", "file_mounts", "envs", "secrets", "setup", "run"}
    assert task["workdir"] == "." and task["num_nodes"] >= 2 and "HF_TOKEN" in task["secrets"]
    assert {"ARGS", "HF_HOME"} <= set(task["envs"])
    cluster = {
        "SKYPILOT_NUM_NODES": "3",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3",
        "SKYPILOT_NODE_RANK": "1",
    }
    cluster |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-7_x-1"}
    assert render(machine, task["run"], cluster) == expected(3, "10.0.0.1:29500", "rloo-sky-7_x-1")


def dstack_script(machine: Machine, task: dict[str, Any]) -> str:
    """Return the commands of the task, with a volume in the folder of the test, and without the setup."""
    (machine.root / "Makefile").write_text("setup:\n\t@true\n")
    return " && ".join(task["commands"]).replace("/checkpoints", f"{machine.folder}/checkpoints")


def test_dstack_builds_the_command(machine: Machine) -> None:
    task = yaml.safe_load((LAUNCH / "dstack.yml").read_text())
    assert task["type"] == "task" and task["nodes"] >= 2
    assert {"ARGS", "HF_TOKEN"} <= set(task["env"]) and any(entry.startswith("HF_HOME=") for entry in task["env"])
    assert task["volumes"] and task["resources"]["gpu"]
    cluster = {"DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.9", "DSTACK_NODE_RANK": "0"}
    cluster |= {"DSTACK_GPUS_PER_NODE": "8", "DSTACK_RUN_NAME": "oneworld"}
    line = render(machine, dstack_script(machine, task), cluster)
    assert line == expected(2, "10.0.0.9:29500", "rloo-oneworld")


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_dockerfiles_copy_files_that_exist(kind: str) -> None:
    lines = (LAUNCH / f"Dockerfile.{kind}").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert [line.split()[0] for line in lines if line and line[0].isupper()][:2] == ["ARG", "FROM"]


# ssh


def test_ssh_shows_the_command(machine: Machine) -> None:
    hosts = machine.folder / "hosts"
    hosts.write_text("# two nodes\nme@alpha  # the head\n\nbeta\n")
    output = machine.run("ssh.sh", "start", "one", "--hosts", str(hosts), "--nproc", "8", "--print", *ARGUMENTS)
    line = shlex.split(output)
    name = line[8]
    assert name.startswith("rloo-one-20")
    assert line == expected(2, line[6], name)
    assert line[6].startswith("alpha:2")
    other = machine.run("ssh.sh", "start", "two", "--hosts", str(hosts), "--nproc", "8", "--print")
    assert shlex.split(other)[6] != line[6]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ssh_starts_follows_and_stops_clusters_side_by_side(machine: Machine) -> None:
    """Use a real sshd. Both nodes are this machine."""
    (machine.folder / "ssh").mkdir()
    hosts = machine.folder / "hosts"
    hosts.write_text("node0\nnode1\n")
    wait = "trap 'echo saved and stopped; exit 1' TERM; while :; do sleep 0.05; done"
    machine.script(*[f'echo "at work, $HF_TOKEN"; {wait}'] * 2, "echo done", "echo done")
    with ssh_server(machine.folder / "ssh") as server:
        # sshd gives its sessions an environment of their own.
        path = {name: machine.environment[name] for name in ("PATH", "PYTHONPATH")}
        (machine.root / ".venv/bin").mkdir(parents=True)
        activate = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in path.items())
        (machine.root / ".venv/bin/activate").write_text(activate)
        machine.environment |= {"ONEWORLD_SSH": f"{server.command} -i {server.identity}", "HF_TOKEN": "it's secret"}
        start = ["--hosts", str(hosts), "--head", "127.0.0.1", "--nproc", "1"]
        assert "one runs on 2 nodes" in machine.run("ssh.sh", "start", "one", *start, "run.name=x")
        until(lambda: machine.num_calls == 2)
        assert machine.call(1) == machine.call(2)
        assert machine.seen()["ONEWORLD_NODES"] == "node0 node1"
        assert "cluster one is not free" in machine.run("ssh.sh", "start", "one", *start, code=2)
        machine.run("ssh.sh", "start", "two", *start)
        output = machine.run("ssh.sh", "follow", "two").splitlines()
        ended = [f"[{k} node{k}] {text}" for k in (0, 1) for text in ("done", "ended with status 0")]
        assert sorted(output) == sorted(ended)
        assert machine.run("ssh.sh", "list") == "one\ntwo\n"
        assert machine.run("ssh.sh", "status", "one").count("runs, process") == 2
        assert machine.run("ssh.sh", "stop", "one").count("ended with status 143") == 2
        output = machine.run("ssh.sh", "follow", "one", code=143)
        assert output.count("at work, it's secret") == output.count("saved and stopped") == 2


# All of them


def test_variables_that_matter_are_forwarded() -> None:
    matter = ["HF_TOKEN", "HF_HOME", "NCCL_IB_HCA", "RCCL_MSCCL_ENABLE", "ONEWORLD_MAX_ATTEMPTS", "https_proxy"]
    matter += ["SLURM_NODEID", "SLURM_RESTART_COUNT"]  # read by launch/run_node.sh in a container
    others = ["HOME", "MY_HF_TOKEN", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "ONEWORLD_LAUNCHER"]
    environment = {"PATH": os.environ["PATH"]} | dict.fromkeys([*matter, *others], "x")
    script = f". {LAUNCH}/forward.sh; forwarded_names"
    output = subprocess.run(["bash", "-c", script], env=environment, text=True, capture_output=True, timeout=10).stdout
    assert sorted(output.split()) == sorted(matter)


def test_shellcheck() -> None:
    program, reason = find_program("shellcheck")
    if not program:
        pytest.skip(reason)
    files = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
    result = subprocess.run([program, "-x", *files], cwd=ROOT, text=True, capture_output=True, timeout=25)
    assert len(files) >= 6 and result.returncode == 0, result.stdout


@pytest.mark.parametrize("launcher", ["run_node.sh", "local.sh", "ssh.sh", "slurm.sbatch", "slurm_amd.sbatch"])
def test_help_is_the_comment_at_the_top_of_the_file(launcher: str, machine: Machine) -> None:
    output = machine.run(launcher, "--help")
    assert f"launch/{launcher}" in output and "--print" in output
    assert "set -euo" not in output and "#SBATCH" not in output
