"""Debugging a rank with tools/debug.py in a pseudo-terminal while the other ranks wait."""

import json
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pexpect
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.dap import Client
from tests.e2e.test_endings import launch
from tests.launcher import ROOT, finish
from tests.nvml import StandIn
from tests.terminal import CTRL_C, CTRL_D, leave, tool
from tools.debug import find

pytestmark = [pytest.mark.alone, pytest.mark.timeout(200)]
TWO = ["train.num_steps=2", "placement.actor,rollout=all"]
PROMPT = "(Pdb) "


def attach(run: Path, rank: int) -> pexpect.spawn:
    """Return a terminal at the prompt of that rank's debugger."""
    person = tool("debug.py", run, "--rank", str(rank))
    person.expect_exact(PROMPT)
    return person


def answer(person: pexpect.spawn, line: str) -> str:
    """Return the answer of the debugger."""
    person.sendline(line)
    person.expect_exact(PROMPT)
    return person.before


def wait_for_debugger(run: Path, rank: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 100
    while not (run / "debug" / f"rank_{rank}.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, "no debugger was opened"
        time.sleep(0.1)


def check_stacks(run: Path) -> None:
    """Check the stacks of a rank in a collective and of one in a debugger, without disturbing them."""
    command = [sys.executable, str(ROOT / "tools" / "stacks.py"), str(run)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    first, second = shown.split("rank 1 (rollout,actor), process ")
    assert first.startswith("rank 0 (rollout,actor), process ") and ": stage update, step 2, " in first
    assert "Current thread " in first and "torch/distributed/" in first and "in train\n" in first, first
    assert ": stage update, step 2, " in second and "in a debugger: tools/debug.py\n" in second
    assert "broken_train.py" in second and "in readline\n" in second, second


def shown_gpus(run: Path) -> list[list[str]] | None:
    """Return the columns of GPUs that tools/status.py shows, or None if there are none."""
    command = [sys.executable, str(ROOT / "tools" / "status.py"), str(run)]
    _, head, *lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    if "GPU" not in head:
        return None
    first, last = head.index("GPU MB"), head.index("doing")
    return [line[first:last].split() for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fake", "vllm"])
def test_a_breakpoint_is_attached_to_by_rank_and_nobody_is_blamed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank stands in a collective for longer than it may be silent, and than a transfer may take (vLLM needs
    longer limits to start with). With the fake engine, a stand-in for NVML shows a card for each rank."""
    limits, what = [], "breakpoint"
    if engine == "fake":
        limits, what = ["world.silence_floor_s=2", "world.transfer_timeout_s=3"], "breakpoint + cards"
        nvml = StandIn(tmp_path / "nvml")
        nvml.show("GPU-1", 2000, 90)
        nvml.show("GPU-0", 1000, 10)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.folder))
    process = launch(tmp_path, 2, what, 1, *limits, *TWO, "debug.breakpoints=true", f"rollout.engine={engine}")
    run = tmp_path / "run"
    wait_for_debugger(run, 1, process)
    assert find(run, None).stat().st_mode & 0o777 == 0o600
    time.sleep(5)
    person = attach(run, 1)
    assert "broken_train.py" in person.before and "stop_here()" in person.before
    assert "42" in answer(person, "p answer")
    person.send("p nonsense" + CTRL_C)
    person.expect_exact(PROMPT)
    assert "NameError" not in person.before
    person.send(CTRL_D)
    person.expect_exact("detached; the rank keeps waiting, and you may attach again")
    assert leave(person) == 0
    rows = json.loads((run / "status" / "board.json").read_text())["ranks"]
    assert [row["debugged"] for row in rows] == [False, True]
    assert shown_gpus(run) == ([["1000", "10"], ["2000", "90"]] if engine == "fake" else None)
    check_stacks(run)
    person = attach(run, 1)
    answer(person, "answer = 43")
    assert "--Return--" in answer(person, "n")
    person.sendline("c")
    person.expect_exact("the debugger is closed")
    assert leave(person) == 0
    output = finish(process, 60)
    assert process.returncode == 0, output
    assert "went on with 43" in output and "in 2 steps" in output
    (said,) = [line for line in output.splitlines() if line.startswith("oneworld: rank ")]
    assert said.startswith(f"oneworld: rank 1 (rollout,actor) on {socket.gethostname()} stands at ")
    assert said.endswith(f"; to debug it type there: python tools/debug.py {run} --rank 1")
    assert not any((run / "debug").iterdir())
    logs = {rank: (run / "logs" / "attempt_1" / f"rank_{rank}.log").read_text() for rank in range(2)}
    assert said in logs[1] and "went on with 43" in logs[1] and "in 2 steps" not in logs[1]
    board = EventAccumulator(str(run)).Reload()
    scalars = {name: board.Scalars(name)[-1].value for name in board.Tags()["scalars"] if name.startswith("gpu/")}
    memory = {f"gpu/memory_gb/rank_{rank}": (rank + 1) * 1000 * 2**20 / 1e9 for rank in range(2)}
    busy = {"gpu/utilization/rank_0": 10.0, "gpu/utilization/rank_1": 90.0}
    assert scalars == (pytest.approx(memory | busy) if engine == "fake" else {})
    assert "2 engines; loading" in logs[0] and "in 2 steps" in logs[0] and "went on" not in logs[0]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("debugpy") is None, reason="debugpy is not installed")
def test_vs_code_attaches_to_a_rank_and_nobody_is_blamed(tmp_path: Path) -> None:
    """The other rank stands in a collective for longer than it may be silent, and than a transfer may take."""
    limits = ["world.silence_floor_s=2", "world.transfer_timeout_s=3"]
    settings = ["debug.debugpy_port=15678", "debug.breakpoints=true"]
    process, run = launch(tmp_path, 2, "breakpoint", 1, *limits, *TWO, *settings), tmp_path / "run"
    wait_for_debugger(run, 1, process)
    person = tool("debug.py", run, "--rank", "1")
    person.expect(r"ssh -N -L (\d+):127.0.0.1:\d+ ")
    port = int(person.match[1])
    assert leave(person) == 0
    time.sleep(5)
    with Client(port) as client:
        client.attach()
        thread = client.wait("stopped")["threadId"]
        assert client.frames(thread)[0]["name"] == "stop_here"
        assert client.evaluate(thread, "answer") == "42"
        time.sleep(5)  # the thread stands for longer than it may be silent, too
        rows = json.loads((run / "status" / "board.json").read_text())["ranks"]
        assert [(row["debugged"], row["frozen"]) for row in rows] == [(False, ""), (True, "")]
        client.evaluate(thread, "answer = 43")
        client.request("disconnect", terminateDebuggee=False)
    output = finish(process, 60)
    assert process.returncode == 0, output
    assert "went on with 43" in output and "in 2 steps" in output
    (said,) = [line for line in output.splitlines() if line.startswith("oneworld: rank ")]
    assert said.startswith(f"oneworld: rank 1 (rollout,actor) on {socket.gethostname()} stands at ")
    assert said.endswith(f"; attach a debugpy client there: 127.0.0.1:{port}")
    assert not any((run / "debug").iterdir())


@pytest.mark.slow
def test_post_mortem_and_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    process, run = launch(folder, 2, "update", 1, "world.silence_floor_s=2", "debug.post_mortem=true", *TWO), folder
    wait_for_debugger(run / "run", 1, process)
    path = find(run / "run", 1)
    assert path.is_socket() and path.parent.stat().st_mode & 0o777 == 0o700
    time.sleep(3)
    person = attach(run / "run", 1)
    assert "ZeroDivisionError: planted" in person.before
    assert "'a planted one'" in answer(person, "p reason")
    assert "-> action()" in answer(person, "up")
    person.sendline("q")
    person.expect_exact("the debugger is closed")
    assert leave(person) == 0
    output = finish(process, 60)
    assert process.returncode != 0
    assert "stage update, step 2: ZeroDivisionError: planted" in output, output
    assert output.count("oneworld: rank ") == 2, output
    assert not path.parent.exists()


@pytest.mark.slow
def test_quitting_ends_the_run_as_an_interrupt_does(tmp_path: Path) -> None:
    """Commands can come through a pipe."""
    process, run = launch(tmp_path, 2, "breakpoint", 0, *TWO, restarts=True), tmp_path / "run"
    wait_for_debugger(run, 0, process)
    command = [sys.executable, str(ROOT / "tools" / "debug.py"), str(run), "--rank", "0"]
    said = subprocess.run(command, input="p answer\nq\n", check=True, capture_output=True, text=True, timeout=30)
    assert "42" in said.stdout and "the debugger is closed" in said.stderr
    output = finish(process, 60)
    assert "oneworld: interrupted at step 2, stage update" in output, output
    assert "(ranks that wait for it give up after 300 s; debug.breakpoints=true lets them wait)" in output
    assert not (run / "FATAL").exists()
