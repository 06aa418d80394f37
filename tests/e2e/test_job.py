"""tools/jobs.py in a terminal, with a real run in the background."""

import json
import secrets
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_endings import SETTINGS
from tests.launcher import MARK
from tests.terminal import CTRL_C, leave, tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def left_over(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_job_is_submitted_followed_and_stopped_from_a_terminal(tmp_path: Path) -> None:
    """The terminal of the submission is closed at once. A person who follows the job and leaves does not end it."""
    mark, run = secrets.token_hex(8), tmp_path / "a"
    settings = ["--nproc", "2", *SETTINGS, "eval.interval=0", "train.num_steps=100000"]

    def jobs(*arguments: str) -> str:
        """What it shows until it ends."""
        child = tool("jobs.py", "--runs", tmp_path, *arguments, timeout_s=90, **environment)
        leave(child)
        return child.before.replace("\r\n", "\n")

    environment = {MARK: mark, "ONEWORLD_PREFLIGHT": "0"}
    try:
        said = jobs("submit", "a", *settings)
        assert said == f"{run}: submitted; follow it with: python tools/jobs.py --runs {tmp_path} logs -f a\n"
        assert "is running; stop it first, or give another name" in jobs("submit", "a")
        follower = tool("jobs.py", "--runs", tmp_path, "logs", "-f", "a", timeout_s=90, **environment)
        follower.expect("2 engines; loading")
        follower.expect(r"step 2/100000")
        follower.send(CTRL_C)
        assert leave(follower) == 0
        name, state, step, *_ = jobs("list").splitlines()[1].split()
        assert (name, state) == ("a", "running") and int(step) >= 2
        shown = jobs("status", "a")
        assert shown.startswith("a: running\n") and "train.num_steps=100000" in shown and "rollout,actor" in shown
        assert "has no log of rank 7 yet" in jobs("logs", "--rank", "7", "a")
        follower = tool("jobs.py", "--runs", tmp_path, "logs", "-f", "--rank", "0", "a", **environment)
        follower.expect("step 1/100000")
        assert jobs("stop", "a") == "a: stopped\n"
        follower.expect(" is saved")
        assert leave(follower) == 0, "it ends with the job"
        assert jobs("stop", "a") == "a: stopped already\n"
        last = jobs("list").splitlines()[1].split()[2]
        settings[-1] = f"train.num_steps={int(last) + 1}"
        jobs("submit", "a", *settings)
        follower = tool("jobs.py", "--runs", tmp_path, "logs", "-f", "a", timeout_s=90, **environment)
        follower.expect(f"resumes after step {last}")
        assert leave(follower) == 0
        assert jobs("list").splitlines()[1].split()[1:3] == ["done", str(int(last) + 1)]
    finally:
        left = left_over(mark)
        for process in left:
            process.kill()
    assert not left
    command = json.loads((run / "job.json").read_text())["command"]
    assert command[1].endswith("launch/local.sh") and command[-1] == "run.name=a"
