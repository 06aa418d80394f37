"""tools/stacks.py on live, stopped and ended processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launcher import until
from tools import stacks

PROGRAM = """
import time
from rl.watch.stacks import Stacks
stacks = Stacks()
def somewhere():
    print("ready", flush=True)
    time.sleep(60)
somewhere()
"""


def write(run: Path, rank: int, pid: int, host: str = "") -> None:
    fields = {"rank": rank, "host": host or socket.gethostname(), "roles": "actor", "stage": "update", "step": 3}
    fields |= {"item": "micro-batch 1", "waits_for": "", "frozen": "", "stage_s": 1.5, "pid": pid}
    (run / "status").mkdir(exist_ok=True)
    stamp = {"done": False, "world": "a", "at": time.time()}
    (run / "status" / f"rank_{rank}.json").write_text(json.dumps(fields | stamp))


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_stacks_of_live_stopped_and_ended_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    write(tmp_path, 0, process.pid)
    other = subprocess.Popen(["sleep", "60"])  # has got a rank's number, and would end by the signal
    write(tmp_path, 1, other.pid)
    try:
        for _ in range(2):
            stacks.main([str(tmp_path)])
            first, second = capsys.readouterr().out.split("\n\n")[:2]
            head, current, *lines = first.splitlines()
            assert head == f"rank 0 (actor), process {process.pid}: stage update, step 3, 1.5 s in it, micro-batch 1"
            assert current.startswith("Current thread ")
            assert [line.split()[-1] for line in lines] == ["somewhere", "<module>"], "each time only the new ones"
            assert second.splitlines()[1] == stacks.GONE
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(process.pid), "the stop")
        stacks.main([str(tmp_path), "--rank", "0"])
        assert "in somewhere" in capsys.readouterr().out
        until(lambda: is_stopped(process.pid), "the stop after the answer")
        assert other.poll() is None
    finally:
        for each in (process, other):
            each.kill()
            each.wait()
    stacks.main([str(tmp_path), "--rank", "0"])
    assert capsys.readouterr().out.splitlines()[1] == stacks.GONE


def test_ranks_of_another_host_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, host="elsewhere")
    with pytest.raises(SystemExit, match=r"rank 0 is on elsewhere, this is .*: run the same command there"):
        stacks.main([str(tmp_path), "--rank", "0"])
    with pytest.raises(SystemExit, match=r"has no rank 7 on .*; its ranks: 0"):
        stacks.main([str(tmp_path), "--rank", "7"])
    with pytest.raises(SystemExit, match="there is no directory nowhere"):
        stacks.main(["nowhere"])


TICKING = """
import time
from rl.watch.stacks import Stacks
stacks = Stacks()
while True:
    print(flush=True)
    time.sleep(0.001)
"""


def test_a_stopped_process_is_awake_only_to_write_its_stacks() -> None:
    process = subprocess.Popen([sys.executable, "-c", TICKING], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    os.set_blocking(process.stdout.fileno(), False)
    num_ticks = []
    try:
        for _ in range(5):
            process.send_signal(signal.SIGSTOP)
            until(lambda: is_stopped(process.pid), "the stop")
            process.stdout.read()
            assert "in <module>" in stacks.stacks_of(process.pid)
            until(lambda: is_stopped(process.pid), "the stop after the answer")
            num_ticks.append(len(process.stdout.read() or b""))
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
    assert min(num_ticks) < 20, num_ticks  # in 50 ms, there are about 45
