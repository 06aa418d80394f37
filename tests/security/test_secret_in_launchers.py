"""Every launcher gives its nodes one secret, which never appears on a command line, in a log or in an open file."""

import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launcher import ROOT
from tests.ports import free_port
from tests.sshd import ssh_server
from tests.unit.test_launchers import SLURM, Machine, until

pytestmark = pytest.mark.timeout(60)
NAME = "ONEWORLD_SECRET"
MADE = re.compile("[0-9a-f]{64}")
# Each call of the fake torchrun adds a line with the secret to a file that only this test reads.
TORCHRUN = '#!/bin/bash\necho "${{ONEWORLD_SECRET-none}}" >> {folder}/secrets\n{then}\n'


class Recorder(Machine):
    """A machine whose torchrun records the secret. All command lines of this system are recorded too."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.commands: set[bytes] = set()
        self.then("sleep 0.3")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._record)
        self._thread.start()

    def then(self, line: str) -> None:
        self.program("torchrun", TORCHRUN.format(folder=self.folder, then=line))

    def start_here(self, *arguments: str) -> subprocess.Popen[str]:
        """Start launch/local.sh of this repository, which has the programs too."""
        once = {"CUDA_VISIBLE_DEVICES": "", "PET_MAX_RESTARTS": "0", "ONEWORLD_MAX_ATTEMPTS": "1"}
        return self._start(["bash", str(ROOT / "launch" / "local.sh"), *arguments], once)

    def secrets(self) -> list[str]:
        file = self.folder / "secrets"
        return file.read_text().split() if file.exists() else []

    def check_hidden(self, secret: str, *outputs: str) -> None:
        """The secret is in no command line, output or file of this machine, except in private files."""
        assert len(self.commands) > 5 and not [line for line in self.commands if secret.encode() in line]
        assert not [output for output in outputs if secret in output]
        for path in self.folder.rglob("*"):
            if path.is_file() and path.name not in ("secrets", "environment") and path.stat().st_mode & 0o077:
                assert secret.encode() not in path.read_bytes(), path

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
        super().end()

    def _record(self) -> None:
        while not self._is_over.wait(0.005):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    self.commands.add(Path(f"/proc/{pid}/cmdline").read_bytes())
                except OSError:
                    continue


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Recorder]:
    machine = Recorder(tmp_path)
    yield machine
    machine.end()


def test_one_node_makes_a_secret_and_keeps_it_when_torchrun_restarts(machine: Recorder) -> None:
    machine.then('[ "$(wc -l < ' + str(machine.folder / "secrets") + ')" -gt 1 ]')
    output = machine.run("local.sh", "run.name=x")
    first, second = machine.secrets()
    assert MADE.fullmatch(first) and first == second, "the second is that of the restart"
    machine.check_hidden(first, output)
    machine.run("local.sh", "run.name=x")
    assert machine.secrets()[2] != first, "another launch, another secret"


def test_a_secret_of_the_user_is_kept_and_a_weak_one_refused(machine: Recorder) -> None:
    mine = "a-secret-of-my-own"
    output = machine.run("run_node.sh", "--nnodes", "2", "--head", "h", "run.name=x", **{NAME: mine})
    output += machine.run("local.sh", "run.name=x", **{NAME: mine})
    assert machine.secrets() == [mine, mine]
    machine.check_hidden(mine, output)
    for weak in ("short", "has a space inside", "x" * 15):
        for launcher in ("run_node.sh", "local.sh"):
            output = machine.run(launcher, code=2, **{NAME: weak})
            assert f"{NAME} is shorter than 16 characters, or has spaces; give a random one" in output
            assert weak not in output.replace("shorter", "")
    assert len(machine.secrets()) == 2, "nothing was started"


def test_several_nodes_without_a_launcher_that_knows_them_make_none(machine: Recorder) -> None:
    """Each node would make another one. train.py says that the network is trusted."""
    for extra in ({}, {NAME: ""}):
        machine.run("run_node.sh", "--nnodes", "2", "--head", "h", "run.name=x", **extra)
    assert machine.secrets() == ["none", "none"]


@pytest.mark.parametrize("launcher", ["slurm.sbatch", "slurm_amd.sbatch"])
def test_the_nodes_of_a_job_get_one_secret_through_the_environment(machine: Recorder, launcher: str) -> None:
    machine.program("scontrol", "#!/bin/bash\nprintf 'n%s\\n' 1 2\n")
    on_nodes = 'while [ "$1" != "--chdir" ]; do shift; done; cd "$2" && shift 2'
    machine.program("srun", f'#!/bin/bash\n{on_nodes}\nSLURM_NODEID=0 "$@" && SLURM_NODEID=1 "$@"\n')
    # docker gets the name of the variable alone, and passes its value on
    run = 'if [ "$1" = run ]; then case " $* " in *" --env ONEWORLD_SECRET "*) exec torchrun ;; esac; fi'
    machine.program("docker", f"#!/bin/bash\n{run}\n")
    machine.environment |= SLURM | {"SLURM_SUBMIT_DIR": str(machine.root), "SLURM_JOB_NUM_NODES": "2"}
    output = machine.run(launcher, "run.name=x")
    first, second = machine.secrets()
    assert MADE.fullmatch(first) and first == second
    machine.check_hidden(first, output)
    shown = machine.run(launcher, "--print", "run.name=x", **{NAME: "x" * 40})
    assert "x" * 40 not in shown


def test_enroot_gets_the_name_of_the_variable_alone(machine: Recorder) -> None:
    machine.program("scontrol", "#!/bin/bash\nprintf 'n%s\\n' 1 2\n")
    machine.environment |= SLURM | {"SLURM_SUBMIT_DIR": str(machine.root)}
    shown = machine.run("slurm.sbatch", "--print", "--runtime", "enroot", "--image", "i")
    assert "--env ONEWORLD_SECRET " in shown and not MADE.search(shown)


def test_a_shared_folder_gives_head_and_worker_one_secret(machine: Recorder) -> None:
    machine.then(f"until [ $(wc -l < {machine.folder}/secrets) = 2 ]; do sleep 0.02; done")
    shared = ["--shared", str(machine.folder / "shared"), "--nproc", "1"]
    head = machine.start("local.sh", "--master", "--nnodes", "2", "--port", str(free_port()), *shared, "run.name=x")
    worker = machine.start("local.sh", "--worker", "1", *shared, "run.name=x")
    until(lambda: (machine.folder / "shared" / "head.json").exists())
    outputs = [process.communicate(timeout=20)[0] for process in (head, worker)]
    assert (head.returncode, worker.returncode) == (0, 0), outputs
    first, second = machine.secrets()
    assert MADE.fullmatch(first) and first == second
    machine.check_hidden(first, *outputs)


@contextmanager
def ssh(machine: Recorder) -> Iterator[list[str]]:
    """Yield the arguments that start a cluster of two nodes, both on this machine, over a real sshd."""
    (machine.folder / "ssh").mkdir()
    (machine.folder / "hosts").write_text("node0\nnode1\n")
    path = {name: machine.environment[name] for name in ("PATH", "PYTHONPATH")}
    (machine.root / ".venv/bin").mkdir(parents=True)
    activate = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in path.items())
    (machine.root / ".venv/bin/activate").write_text(activate)
    with ssh_server(machine.folder / "ssh") as server:
        machine.environment["ONEWORLD_SSH"] = f"{server.command} -i {server.identity}"
        yield ["--hosts", str(machine.folder / "hosts"), "--head", "127.0.0.1", "--nproc", "1"]


@pytest.mark.slow
def test_the_nodes_of_a_cluster_get_one_secret_through_ssh(machine: Recorder) -> None:
    with ssh(machine) as start:
        output = machine.run("ssh.sh", "start", "one", *start, "run.name=x")
        output += machine.run("ssh.sh", "follow", "one")
        first, second = machine.secrets()
        assert MADE.fullmatch(first) and first == second
        machine.check_hidden(first, output, machine.run("ssh.sh", "start", "one", *start, "--print"))
        machine.run("ssh.sh", "start", "one", *start, "run.name=x")
        machine.run("ssh.sh", "follow", "one")
        assert machine.secrets()[2] == machine.secrets()[3] != first


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_in_the_background_does_not_show_its_secret(machine: Recorder, tmp_path: Path) -> None:
    """A real run: its console, its files and the command lines of all its processes."""
    (machine.bin / "torchrun").unlink()  # the real one is next in PATH
    settings = ["rollout.engine=fake", "train.num_steps=3", "train.num_prompts_per_step=4", "eval.interval=0"]
    process = machine.start_here("--nproc", "2", *settings, "run.name=x", f"run.dir={tmp_path / 'runs'}")
    secret, deadline = "", time.monotonic() + 30
    while not secret:
        assert time.monotonic() < deadline
        found = subprocess.run(["pgrep", "-f", f"run.dir={tmp_path / 'runs'}"], capture_output=True, text=True).stdout
        for pid in found.split():
            try:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            secret = secret or next((e.decode()[len(NAME) + 1 :] for e in entries if e.startswith(NAME.encode())), "")
    assert MADE.fullmatch(secret)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    assert "network is trusted" not in output
    machine.check_hidden(secret, output)
