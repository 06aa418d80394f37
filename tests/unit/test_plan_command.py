"""`python train.py --plan`, as a person types it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from rl.config.schema import ROOT

MISSION = ["placement.rollout=0-19", "placement.inference=20-23", "placement.actor=24-31"]
PLAIN = {"default": ["--plan"], "wrong placement": ["--plan", "placement.rollout=0", "placement.actor=0-1"]}
# These share a process, since nearly all of a command's seconds are imports.
SHARED = {
    "sizes from flags": ["--plan", "--nnodes", "4", "--nproc-per-node", "8", *MISSION],
    "flags after overrides": [*MISSION, "--plan", "--nproc-per-node=8", "--nnodes=4"],
    "sizes from config": ["--plan", "--config", "cluster.yaml"],
    "flags against config": ["--plan", "--config", "cluster.yaml", "--nnodes", "1"],
    "wrong for the model": ["--plan", "--nproc-per-node=3", "rollout.tensor_parallel_size=3"],
    "too long for the model": ["--plan", "data.max_prompt_tokens=123"],
    "no such file": ["--plan", "--config", "nowhere.yaml"],
    "no such metric": ["--plan", "checkpoint.best_metric=eval/acuracy"],
    "nothing to evaluate": ["--plan", "--eval-only", "data.eval=''", "eval.interval=0"],
    "an own loss": ["--plan", "algo.loss=own.py:whole", "model.path=nobody/no-such-model"],
    "no such loss": ["--plan", "algo.loss=own.py:absent"],
    "a loss of other names": ["--plan", "algo.loss=own.py:other"],
    "good reward": ["--plan", "reward.function=rewards.py:good"],
    "failing reward": ["--plan", "reward.function=rewards.py:misspelt"],
    "reward without data": ["--plan", "reward.function=rewards.py:misspelt", "data.train=nowhere.jsonl"],
    "sizes without a plan": ["--nnodes", "4"],
}
RUN_SHARED = """
import contextlib, io, json, sys
import train
answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, err = ["train.py", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            train.main()
        except SystemExit as end:
            code = end.code
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""
CLUSTER = """
placement: {num_nodes: 2, num_gpus_per_node: 3, rollout: 0-3, actor: rest}
model: {path: nobody/no-such-model}
"""
REWARDS = """
def good(prompt, response, row):
    return {"score": 0.5 * (response == row["answer"]), "length": len(response)}

def misspelt(prompt, response, row):
    return float(response == row["answre"])
"""


class Answer(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def hub() -> Iterator[socket.socket]:
    """Where the model hub's client is sent: it takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, hub: socket.socket) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "own.py").write_text("def whole(new_logprobs): ...\ndef other(logprobs): ...\n")
    (folder / "rewards.py").write_text(REWARDS)
    ours = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"}
    environment = os.environ | ours | {"PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> Answer:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr)

    with ThreadPoolExecutor(2) as pool:
        shared = pool.submit(run, "-c", RUN_SHARED, json.dumps(list(SHARED.values())))
        plain = pool.map(lambda arguments: run(str(ROOT / "train.py"), *arguments), PLAIN.values())
        assert shared.result().code == 0, shared.result().stderr
        rows = [Answer(*row) for row in json.loads(shared.result().stdout)]
        return dict(zip(PLAIN, plain, strict=True)) | dict(zip(SHARED, rows, strict=True))


def test_one_node_of_two_ranks_is_the_default(answers: dict[str, Answer]) -> None:
    answer = answers["default"]
    assert answer.code == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        "rank  node  roles          engine",
        "0     0     rollout,actor  0",
        "1     0     rollout,actor  1",
    ]


@pytest.mark.parametrize("command", ["sizes from flags", "flags after overrides"])
def test_sizes_from_flags(answers: dict[str, Answer], command: str) -> None:
    answer = answers[command]
    assert answer.code == 0, answer.stderr
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert rows[0] == ["rank", "node", "roles", "engine"]
    assert rows[1:21] == [[str(rank), str(rank // 8), "rollout", str(rank)] for rank in range(20)]
    assert rows[21:25] == [[str(rank), "2", "inference", "-"] for rank in range(20, 24)]
    assert rows[25:] == [[str(rank), "3", "actor", "-"] for rank in range(24, 32)]


def test_sizes_from_the_config(answers: dict[str, Answer]) -> None:
    answer = answers["sizes from config"]
    assert answer.code == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        "rank  node  roles    engine",
        "0     0     rollout  0",
        "1     0     rollout  1",
        "2     0     rollout  2",
        "3     1     rollout  3",
        "4     1     actor    -",
        "5     1     actor    -",
    ]


def test_a_loss_in_a_file_is_looked_up_in_the_working_directory(answers: dict[str, Answer]) -> None:
    assert answers["an own loss"].code == 0, answers["an own loss"].stderr


def test_a_model_that_is_not_local_is_not_fetched(answers: dict[str, Answer], hub: socket.socket) -> None:
    assert "nobody/no-such-model" in CLUSTER
    assert answers["sizes from config"].code == 0
    hub.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody knocked
        hub.accept()


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("wrong placement", ["rank 0 is in the entry 'rollout' and in the entry 'actor'", "write 'rollout,actor': 0"]),
        ("flags against config", ["placement.num_nodes: the config says 2", "has 1", "placement.num_nodes=1"]),
        ("wrong for the model", [f"got 3, but {ROOT / 'configs/tiny'} has 4 attention heads", "one of 1, 2, 4"]),
        ("too long for the model", ["got 129, but", "has 128 positions", "data.max_prompt_tokens=122"]),
        ("no such file", ["no config file at nowhere.yaml", "configs/default.yaml"]),
        ("no such metric", ["got 'eval/acuracy', which no evaluation reports", "eval/accuracy, eval/eval/avg@1"]),
        ("no such loss", ["own.py has no function 'absent'", "it has whole, other"]),
        ("a loss of other names", ["other takes (logprobs), but missing a required argument", "must be among new_log"]),
        ("nothing to evaluate", ["--eval-only has nothing to evaluate on", "data.eval is empty"]),
        (
            "failing reward",
            ["train.jsonl, line 1", "misspelt failed at", "rewards.py:6: KeyError: 'answre'", "correct"],
        ),
    ],
)
def test_a_mistake_goes_to_stderr_alone(answers: dict[str, Answer], command: str, parts: list[str]) -> None:
    answer = answers[command]
    assert (answer.code, answer.stdout) == (2, "")
    assert answer.stderr.splitlines()[-1].startswith("oneworld: ")
    assert "Traceback" not in answer.stderr
    assert [part for part in parts if part not in answer.stderr] == [], answer.stderr


def test_the_reward_of_a_row_is_shown(answers: dict[str, Answer]) -> None:
    answer = answers["good reward"]
    assert answer.code == 0, answer.stderr
    assert "train.jsonl, line 1: its answer '88' scores 0.5 (good 0.5, good/length 2); an arbitrary" in answer.stderr
    assert answers["reward without data"].code == 0
    assert "the reward functions were not called, because data.train has no" in answers["reward without data"].stderr


def test_sizes_are_torchruns_unless_there_is_a_plan(answers: dict[str, Answer]) -> None:
    """Otherwise a world of one rank would start, and take no notice of them."""
    answer = answers["sizes without a plan"]
    assert (answer.code, answer.stdout) == (2, "")
    assert "--nnodes and --nproc-per-node after train.py need --plan" in answer.stderr
