"""Commands whose output goes to a pipe that is closed early, as in `python tools/status.py | head -1`."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.config.schema import ROOT
from tests.checkpoint_files import write_checkpoint
from tests.merging import TENSORS

COMMANDS = {
    "status": ["tools/status.py", "{runs}/demo"],
    "status, followed": ["tools/status.py", "{runs}/demo", "--follow"],
    "stacks": ["tools/stacks.py", "{runs}/demo"],
    "list of jobs": ["tools/jobs.py", "--runs", "{runs}", "list"],
    "status of a job": ["tools/jobs.py", "--runs", "{runs}", "status", "demo"],
    "log of a job": ["tools/jobs.py", "--runs", "{runs}", "logs", "demo"],
    "stop of a job": ["tools/jobs.py", "--runs", "{runs}", "stop", "demo"],
    "merge": ["tools/merge_checkpoint.py", "{runs}/saved"],
    "data": ["tools/prepare_data.py", "gsm8k", "--input", "{runs}/gsm8k", "--output", "{runs}/data"],
    "help": ["train.py", "--help"],
    "plan": ["train.py", "--plan", "--nnodes", "64", "--nproc-per-node", "8"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs with one job that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    status = folder / "demo" / "status"
    status.mkdir(parents=True)
    row = {"rank": 0, "host": socket.gethostname(), "roles": "actor", "stage": "update", "step": 3, "version": 3}
    row |= {"waits_for": "", "item": "", "stage_s": 1.5, "frozen": "", "done": True, "world": "b", "pid": 2**22 + 1}
    (status / "rank_0.json").write_text(json.dumps(row | {"at": time.time()}))
    job = {"pid": 2**22 + 1, "started_at": 1.0, "command": ["x"], "submitted_at": 0.0}
    (folder / "demo" / "job.json").write_text(json.dumps(job))
    (folder / "demo" / "console.log").write_text("a line of the log\n" * 10_000)
    write_checkpoint([folder / "saved"], TENSORS, 2)
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        (folder / "gsm8k" / f"{split}.jsonl").write_text('{"question": "Ducks?", "answer": "13\\n#### 13"}\n')
    return folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_pipe_is_no_error(command: list[str], runs: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, *[word.format(runs=runs) for word in command]]
    done = subprocess.run(words, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("merge: ")]  # a bar of progress
    assert (done.returncode, said) == (0, [])
    if "merge" in words[1] or "data" in words[1]:  # work is done, whoever reads about it
        assert list(runs.glob("saved/merged/*/model.safetensors" if "merge" in words[1] else "data/test.jsonl"))
