"""Start real runs for tests: torchrun in the activated environment, in a process group of its own, always ended."""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launch.environment import ROOT, TORCHRUN, activated_environment
from rl.checkpoint.manifest import COMMITTED
from rl.data.batch import Batch
from rl.data.group_file import groups_from_bytes

MARK = "ONEWORLD_TEST_WORLD"
_marks: dict[int, str] = {}  # by the launcher's process id
STARTED: list[subprocess.Popen[str]] = []  # launchers of the running test, for tests/conftest.py
WATCHDOG_S = 5.0  # limit for the watchdogs and reward servers of ranks that have ended
_zygotes: dict[bool, subprocess.Popen[str]] = {}  # by whether they have imported vLLM


def start(*arguments: str, restarts: bool = False, **extra: str) -> subprocess.Popen[str]:
    """Start `torchrun ARGUMENTS` with its output in one pipe."""
    environment = activated_environment(**extra)
    if not restarts:
        environment["PET_MAX_RESTARTS"] = "0"
    return spawn([*TORCHRUN, *arguments], environment)


def spawn(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    process = _spawn_marked(command, environment, stderr=subprocess.STDOUT)
    STARTED.append(process)
    return process


def _spawn_marked(command: list[str], environment: dict[str, str], **pipes: int) -> subprocess.Popen[str]:
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {MARK: mark},
        text=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
        **pipes,
    )
    _marks[process.pid] = mark
    return process


def finish(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Wait for a run to end, and return its output. Fail if it takes too long or leaves processes, which are killed."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output[-6000:]}") from None
    orphans = members(process.pid)
    for orphan in orphans:
        orphan.kill()
    assert not orphans, f"orphans {orphans} after the launcher ended:\n{output[-3000:]}"
    return output


def run_program(*words: str, timeout_s: float, has_vllm: bool = False) -> tuple[int, str]:
    """Run a Python program, given by its path and arguments, in a fork of a process that has imported what it needs.
    Return its exit code and output. Fail if it takes too long or leaves processes, which are killed."""
    modules = ["tests.forked_runs", *(["rl.rollout.vllm.build"] if has_vllm else [])]
    zygote = _zygotes.get(has_vllm)
    if zygote is None or zygote.poll() is not None:
        command = [sys.executable, "-m", "tests.zygote", *modules]
        zygote = _zygotes[has_vllm] = _spawn_marked(command, activated_environment(), stdin=subprocess.PIPE)
    assert zygote.stdin is not None and zygote.stdout is not None
    with tempfile.NamedTemporaryFile("r", prefix="oneworld-output-", errors="replace") as file:
        try:
            print(json.dumps([file.name, words]), file=zygote.stdin, flush=True)
            is_ended = bool(select.select([zygote.stdout], [], [], timeout_s)[0])
            assert is_ended, f"still running after {timeout_s} s:\n{file.read()[-6000:]}"
            code = json.loads(zygote.stdout.readline())
            output = file.read()
            deadline = time.monotonic() + WATCHDOG_S
            while orphans := [process for process in members(zygote.pid) if process.pid != zygote.pid]:
                assert time.monotonic() < deadline, f"orphans {orphans} after the program ended:\n{output[-3000:]}"
                time.sleep(0.05)
        except BaseException:
            for process in members(zygote.pid):
                process.kill()
            zygote.wait()
            raise
    return code, output


def members(launcher: int) -> list[psutil.Process]:
    """Return the processes of a run that are still alive, in whatever session: all have inherited its mark."""
    alive = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == _marks[launcher] and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return alive


def command_of(process: psutil.Process) -> list[str]:
    """Return the command of a process, or an empty list if it has ended meanwhile."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)


@dataclass(frozen=True)
class Result:
    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Return one row per step, without that of the evaluation before training (step 0)."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["step"] > 0]

    def rollouts(self, step: int) -> Batch:
        """Return the whole batch of a step in stream order, whichever ranks owned it."""
        files = sorted((self.folder / "rollouts").glob(f"step_{step}.rank_*.safetensors"))
        batch = Batch.concat([group.batch for file in files for group in groups_from_bytes(file.read_bytes())])
        order = sorted(range(batch.num_sequences), key=lambda sequence: int(batch.group_ids[sequence]))
        return batch.select(order)


def train(folder: Path, num_ranks: int, *overrides: str, broken: str = "", timeout_s: float = 200) -> Result:
    """Run train.py to its end, which must succeed. `folder` becomes the run's folder.

    Ranks are forks of one process (tests/forked_runs.py), which imports only once. `torchrun_train` is the real thing.
    `broken` is what tests/e2e/broken_train.py breaks on rank 0.
    """
    described = {"num_ranks": num_ranks, "overrides": [*_place(folder), *overrides], "broken": broken}
    return Result(run_forked_runs([described], timeout_s), folder)


def run_forked_runs(described: list[dict[str, Any]], timeout_s: float) -> str:
    """Run tests/forked_runs.py, which must succeed, and return its output."""
    has_vllm = not all("rollout.engine=fake" in each["overrides"] for each in described)
    code, output = run_program("tests/forked_runs.py", json.dumps(described), timeout_s=timeout_s, has_vllm=has_vllm)
    assert code == 0, output[-6000:]
    return output


def torchrun_train(folder: Path, num_ranks: int, *overrides: str, timeout_s: float = 200) -> Result:
    """Do the same with torchrun."""
    process = start(f"--nproc-per-node={num_ranks}", "train.py", *_place(folder), *overrides)
    output = finish(process, timeout_s)
    assert process.returncode == 0, output[-6000:]
    return Result(output, folder)


def _place(folder: Path) -> list[str]:
    return [f"run.dir={folder.parent}", f"run.name={folder.name}"]


def status_line(folder: Path) -> str:
    """Return what tools/status.py says about a run, without its name and the table of its ranks."""
    command = [sys.executable, "tools/status.py", str(folder)]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return shown.splitlines()[0].removeprefix(f"{folder}: ")


def steps_on(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint."""
    found = [path.parent.name for path in (folder / "checkpoints").glob(f"step_*/{COMMITTED}")]
    return sorted(int(name.removeprefix("step_")) for name in found)
