"""Type the commands of docs/first_run.md and the jobs of docs/debugging.md on real vLLM, and run the benchmarks that
pages name."""

import json
import os
import re
import secrets
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.doc_commands import BENCHMARKS, ENVIRONMENTS, FIRST_RUN, JOBS, PLACEHOLDERS, copy_repository, shorter
from tests.launcher import MARK, activated_environment, finish, spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Reader:
    """A reader who types commands in a copy of the repository. `leave` ends all processes that they started."""

    def __init__(self, folder: Path):
        self.root = copy_repository(folder)
        self._mark = secrets.token_hex(8)
        self._environment = activated_environment(PYTHONPATH=str(self.root)) | {MARK: self._mark}

    def start(self, text: str) -> subprocess.Popen[str]:
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(shorter(text))]
        return subprocess.Popen(
            words,
            cwd=self.root,
            env=self._environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def type(self, text: str, timeout_s: float = 120) -> str:
        process = self.start(text)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, output[-4000:]
        return output

    def leave(self) -> None:
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.pid != os.getpid():
                    process.kill()
            except (ProcessLookupError, psutil.Error):
                continue


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.leave()


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]  # a job may be writing the last one


def test_first_run(reader: Reader) -> None:
    dry, whole, longer, status, any_status, merge, merge_any, board = FIRST_RUN
    run = reader.root / "runs" / "mine"
    said = reader.type(dry)
    assert "dry run: one step took " in said and "rank 0 (rollout,actor): at most " in said
    said = reader.type(whole)
    assert "runs/mine: 1 rank on 1 node: rollout 0, actor 0; 1 engine; loading" in said
    assert re.search(r"^mine: reward \d\.\d\d -> \d\.\d\d in 2 steps, \d+ s, engine vllm [\d.]+$", said, re.MULTILINE)
    said = reader.type(longer)
    assert "runs/mine/checkpoints: resumes after step 2; settings changed since then: train.num_steps 2 -> 3" in said
    assert re.search(
        r" in 3 steps, the last 1 of them in \d+ s after a resume, engine vllm [\d.]+$", said, re.MULTILINE
    )
    assert steps(run) == [0, 1, 2, 3]
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"reward/closeness", "reward/closeness/is_number", "reward/exact_match"} <= row.keys()
    for text in (status, any_status):
        assert reader.type(text).startswith("runs/mine: done after 3 of 3 steps\n")
    assert (run / "logs" / "attempt_1" / "rank_0.log").is_file()
    assert "the digest of every slice was checked" in reader.type(merge)
    assert {"model.safetensors", "config.json"} <= {path.name for path in (run / "merged" / "step_3").iterdir()}
    run.rename(run.with_name("x"))
    assert "merged/step_3" in reader.type(merge_any)
    assert has_reward_curve(reader, board)


def has_reward_curve(reader: Reader, board: str) -> bool:
    """Start TensorBoard, which prints its address, and wait until it serves the curve."""
    process = reader.start(f"{board} --port 0")
    try:
        assert process.stdout is not None
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        deadline = time.monotonic() + 60
        while True:
            with urllib.request.urlopen(f"{address}data/plugin/scalars/tags", timeout=20) as answer:
                tags = json.load(answer)
            if "reward/mean" in tags.get("x", {}):
                return True
            assert time.monotonic() < deadline, tags
            time.sleep(0.5)  # it reads the folder in a thread and does not announce the end
    finally:
        process.kill()
        process.communicate()


def test_environments(reader: Reader) -> None:
    """The page shows the middle of the first command's output."""
    attempt, train = ENVIRONMENTS
    said = reader.type(attempt)
    page = (reader.root / "docs" / "environments.md").read_text()
    shown = re.search(r"This is its middle:\n\n((?:    .*\n)+)", page)
    assert shown and "".join(line[4:] + "\n" for line in shown[1].splitlines()) in said, said
    assert "-- end: " in said and "-- reward: it scores " in said
    reader.type(train, timeout_s=300)
    assert steps(reader.root / "runs" / "tools") == [0, 1, 2]


def test_jobs(reader: Reader) -> None:
    submit, listing, status, stacks, stop, logs, submit_mine = JOBS
    config = reader.root / "my.yaml"
    config.write_text(config.read_text().replace("num_steps: 2", "num_steps: 100000"))
    run = reader.root / "runs" / "x"
    assert reader.type(submit) == "runs/x: submitted; follow it with: python tools/jobs.py logs -f x\n"
    deadline = time.monotonic() + 120
    while not steps(run)[1:]:
        assert time.monotonic() < deadline, (run / "console.log").read_text()
        time.sleep(0.2)  # the metrics file is the only sign of progress
    assert reader.type(listing).splitlines()[1].split()[:2] == ["x", "running"]
    assert reader.type(status).startswith("x: running\n")
    assert "train.py" in reader.type(stacks.replace("--rank 5", "--rank 0"))
    reader.type(stop)
    assert reader.type(listing).splitlines()[1].split()[:2] == ["x", "stopped"]
    assert "engines; loading" in reader.type(logs)
    assert "runs/mine: submitted" in reader.type(submit_mine)
    reader.type(logs.replace(" x", " mine"))  # follow it to its end
    assert [line.split()[:2] for line in reader.type(listing).splitlines()[1:]] == [["x", "stopped"], ["mine", "done"]]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("text", BENCHMARKS)
def test_benchmarks(text: str) -> None:
    """They succeed and print what they measured. They check their results themselves."""
    process = spawn(shlex.split(f"{text} {BENCHMARKS[text]}"), activated_environment())
    output = finish(process, 680)
    assert process.returncode == 0, output[-4000:]
    row = json.loads(output.splitlines()[-1])
    assert row["benchmark"] == Path(text.split()[1]).stem
    assert row.get("leaked", 0) == 0 and row.get("faults", True)
