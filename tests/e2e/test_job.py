"""tools/jobs.py with a real run in the background."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_ends import SETTINGS
from tests.launcher import MARK, ROOT
from tools import jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def jobs_tool(runs: Path, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / "jobs.py"), "--runs", str(runs), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, cwd=ROOT, env=os.environ | environment, check=False
    )
    return done.stdout + done.stderr


def left_over(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_job_runs_in_the_background_and_saves_when_it_is_stopped(tmp_path: Path) -> None:
    mark, run = secrets.token_hex(8), tmp_path / "a"
    settings = [*SETTINGS, "eval.interval=0", "train.num_steps=100000"]
    try:
        said = jobs_tool(tmp_path, "submit", "--nproc-per-node", "2", "a", *settings, **{MARK: mark})
        assert said == f"{run}: submitted; follow it with: python tools/jobs.py logs -f a\n"
        assert "is running; stop it first, or give another name" in jobs_tool(tmp_path, "submit", "a")
        deadline = time.monotonic() + 60
        while jobs.last_metrics(run).get("step", 0) < 2:
            assert time.monotonic() < deadline, (run / "console.log").read_text()
            time.sleep(0.2)
        name, state, step, *_ = jobs_tool(tmp_path, "list").splitlines()[1].split()
        assert (name, state) == ("a", "running") and int(step) >= 2
        shown = jobs_tool(tmp_path, "status", "a")
        assert shown.startswith("a: running\n") and "train.num_steps=100000" in shown and "rollout,actor" in shown
        assert "2 engines; loading" in jobs_tool(tmp_path, "logs", "a")
        assert "has no log of rank 7 yet" in jobs_tool(tmp_path, "logs", "--rank", "7", "a")
        follower = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tools" / "jobs.py"),
                "--runs",
                str(tmp_path),
                "logs",
                "-f",
                "--rank",
                "0",
                "a",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert jobs_tool(tmp_path, "stop", "a") == "a: stopped\n"
        followed, _ = follower.communicate(timeout=20)
        assert "step 1/100000" in followed and " is saved" in followed, "it ends with the job"
        assert jobs_tool(tmp_path, "stop", "a") == "a: stopped already\n"
    finally:
        left = left_over(mark)
        for process in left:
            process.kill()
    assert not left
    saved = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    assert saved >= 1
    assert json.loads((run / "job.json").read_text())["command"][-1] == "run.name=a"
