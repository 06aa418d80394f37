"""Environments that are wrong at the start of a run, and servers and calls that are ended in the middle of one.

The faults of single samples are in test_environments.py.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.test_phases import Command, run_all
from tests.environment_runs import FUNCTIONS, find_server, make_chat_model, overrides_of
from tests.launcher import finish, start, until
from tests.reference_rounds import TINY

pytestmark = pytest.mark.timeout(300)
MAX_END_S = 15.0
CODE = """
import unknown_package
"""
WRONG = '''
class Mute:
    def reset(self, row):
        return "Begin."

    def step(self, message):
        return "", True


class Untyped:
    def add(self, n):
        """Add a number."""

    def reward(self):
        return 0.0


def rollout(task, generate):
    return 0.0
'''
SHORT = ["data.max_prompt_tokens=40", "environment.max_conversation_tokens=60"]  # for configs/tiny
# By name: overrides, and the text that the console must have once. FOLDER is where the files are.
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no chat template": ([f"model.path={TINY}", *SHORT], "has no chat template, which conversations need"),
    "no chat": (["data.chat_template=false"], "set data.chat_template=true"),
    "no such file": (["environment.class=FOLDER/nothing.py:Game"], "but no file at FOLDER/nothing.py"),
    "no such class": (["environment.class=FOLDER/wrong.py:Gone", "environment.tools=[]"], "wrong.py has no "),
    "cannot be imported": (["environment.class=FOLDER/import.py:Game"], "unknown_package"),
    "untyped": (["environment.class=FOLDER/wrong.py:Untyped", "environment.tools=[]"], "no type"),
    "no reward": (["environment.class=FOLDER/wrong.py:Mute"], "has no method `reward`"),
    "unused reward": (["reward.function=exact_match"], "but the environment has a reward of its own"),
    "not asynchronous": (
        ["environment.rollout=FOLDER/wrong.py:rollout", "environment.class=", "environment.tools=[]"],
        "it must be asynchronous",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def mistakes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """Return what two ranks print for each mistake, and the folder of the run."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "import.py").write_text("import unknown_package\n")
    (folder / "wrong.py").write_text(WRONG)
    commands = [
        Command(
            folder / name.replace(" ", "_"),
            2,
            [*overrides_of(model), *(one.replace("FOLDER", str(folder)) for one in overrides)],
            may_fail=True,
        )
        for name, (overrides, _) in MISTAKES.items()
    ]
    outputs = run_all(commands)
    return {name: (outputs[index], commands[index].folder) for index, name in enumerate(MISTAKES)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_once_and_nothing_is_written(name: str, mistakes: dict[str, tuple[str, Path]]) -> None:
    output, folder = mistakes[name]
    text = MISTAKES[name][1].replace("FOLDER", str(folder.parent))
    assert output.count("oneworld: fatal, will not be restarted") == 1, output
    assert output.count(text) == 1, output
    assert "Traceback" not in output
    written = {file.name for file in folder.glob("*")}
    assert not written & {"metrics.jsonl", "checkpoints", "rollouts", "eval"}, written


def test_a_rollout_function_needs_no_chat_template(tmp_path: Path) -> None:
    """Its prompt is that of the data file."""
    arguments = [*overrides_of(TINY, "rollout", 1), *SHORT, "data.chat_template=false", "eval.interval=0"]
    (output,) = run_all([Command(tmp_path / "run", 1, arguments)])
    assert "in 1 steps" in output or "in 1 step" in output


def start_waiting(model: Path, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start a run of two ranks, and wait until a call of its environment hangs."""
    options = f"environment.options={{mark: {folder / 'called'}}}"
    settings = [*overrides_of(model), f"environment.class={FUNCTIONS}:Waiting", "environment.tools=[]", options]
    settings += ["rollout.engine=fake", "environment.timeout_s=500", "eval.interval=0", *overrides]
    process = start("--nproc-per-node=2", "train.py", f"run.dir={folder}", "run.name=run", *settings)
    until(lambda: (folder / "called").exists() or process.poll() is not None, "a call", 100)
    assert process.poll() is None, finish(process, 5)
    return process


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "oneworld: interrupted at step 1, stage "),
        pytest.param(signal.SIGTERM, "oneworld: stopped at step 1, stage ", marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_a_run_whose_calls_hang(number: signal.Signals, said: str, model: Path, tmp_path: Path) -> None:
    """`finish` checks that no process is left."""
    process = start_waiting(model, tmp_path)
    began = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # what a terminal does
    else:
        os.kill(process.pid, number)
    output = finish(process, 60)
    assert time.monotonic() - began < MAX_END_S, output
    assert process.returncode != 0
    assert output.count(said) == 1, output


@pytest.mark.slow
def test_a_killed_conversation_server_is_named_and_ends_the_world(model: Path, tmp_path: Path) -> None:
    process = start_waiting(model, tmp_path)
    server = find_server(process.pid)
    assert server is not None
    began = time.monotonic()
    os.kill(server, signal.SIGKILL)
    output = finish(process, 60)
    assert time.monotonic() - began < MAX_END_S, output
    assert process.returncode != 0
    place = r"oneworld: rank [01] \(rollout,actor\) on .*, stage rollout, step 1: RuntimeError: "
    cause = "the conversation server of this rank has ended with exit code -9"
    assert len(re.findall(place + cause, output)) == 1, output
