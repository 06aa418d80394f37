"""Runs with reward functions of a file. If some calls hang or raise, the run counts them. If all do, it ends."""

import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.config.schema import ROOT
from tests.e2e.reward_functions import misspelt, sometimes_failing, sometimes_hanging
from tests.launcher import Result, finish, start, train

pytestmark = pytest.mark.timeout(200)
FILE, DATA = "tests/e2e/reward_functions.py", "configs/tiny/train.jsonl"
SETTINGS = [
    *("rollout.engine=fake", "train.num_steps=2", "train.num_prompts_per_step=7", "eval.interval=0"),
    *("rollout.deterministic=true", "debug.save_rollouts=true", "reward.timeout_s=0.5"),
    f"reward.function={{{FILE}:sometimes_hanging: 2.0, {FILE}:varied: 0}}",
]


def assert_scored(result: Result) -> None:
    """As the functions say it by themselves, with 0 where they hang or raise."""
    assert [row["step"] for row in result.metrics] == [1, 2]
    for row in result.metrics:
        rewards = result.rollouts(int(row["step"])).rewards.tolist()
        assert len(rewards) == 56
        failures = row["reward/timeouts"] + row["reward/errors"]
        assert rewards.count(0.0) == failures
        assert row["reward/sometimes_hanging"] == pytest.approx(sum(rewards) / 2 / 56, abs=1e-6)
        assert row["reward/mean"] == pytest.approx(sum(rewards) / 56, abs=1e-6)
        assert row["reward/sometimes_hanging/length"] > 0
        assert 0 < row["reward/varied"] < 1
    assert sum(row["reward/timeouts"] for row in result.metrics) > 0
    assert sum(row["reward/errors"] for row in result.metrics) > 0
    assert result.output.count(": it took longer than reward.timeout_s = 0.5 s (configs/tiny/train.jsonl, line ") == 1
    assert result.output.count(": RuntimeError: planted (configs/tiny/train.jsonl, line ") == 1
    assert_counted(result)


def assert_counted(result: Result) -> None:
    """Each line of a step shows its failures, and the end of the run shows all of them."""
    for row in result.metrics:
        (line,) = re.findall(rf"^step {row['step']:g}/2  (.*)$", result.output, re.MULTILINE)
        for name in ("errors", "timeouts"):
            shown = re.findall(rf"  {name} (\d+)  ", line)
            assert shown == ([f"{row[f'reward/{name}']:.0f}"] if row[f"reward/{name}"] else []), line
    num_failed = sum(row["reward/errors"] + row["reward/timeouts"] for row in result.metrics)
    assert f"the reward functions failed for {num_failed:.0f} of 112 samples: " in result.output


@pytest.mark.alone
@pytest.mark.slow
def test_hanging_calls_cost_their_own_samples(tmp_path: Path) -> None:
    """The same whoever scores: two engines, or one of two ranks."""
    assert sometimes_hanging("a", "bc", {})["length"] == 2
    collocated = train(tmp_path / "collocated", 2, *SETTINGS)
    assert_scored(collocated)
    other = train(tmp_path / "apart", 2, *SETTINGS, "placement.rollout=0", "placement.actor=1")
    assert_scored(other)
    for step in (1, 2):
        assert other.rollouts(step).rewards.tolist() == collocated.rollouts(step).rewards.tolist()
    for one, two in zip(collocated.metrics, other.metrics, strict=True):
        names = [name for name in one if name.startswith("reward/")]
        assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, abs=1e-9)


def line_of(function: Callable, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    (line,) = [first + number for number, line in enumerate(lines) if text in line]
    return line


def test_each_kind_of_failure_is_shown_once(tmp_path: Path) -> None:
    """Two engines score. The console shows one message per exception type and line, and counts the others."""
    settings = [*SETTINGS, "reward.timeout_s=20", f"reward.function={FILE}:sometimes_failing"]
    result = train(tmp_path / "run", 2, *settings)
    kinds = {
        f"{line_of(sometimes_failing, 'planted for')}: ValueError: planted for ",
        f"{line_of(sometimes_failing, 'planted elsewhere')}: ValueError: planted elsewhere for ",
        f"{line_of(sometimes_failing, 'answre')}: KeyError: 'answre' ({DATA}, line ",
        f"{line_of(sometimes_failing, 'def ')}: ResultTypeError: the score is a str; return a number",
    }
    said = re.findall(rf"reward function sometimes_failing failed at {ROOT / FILE}:(.*)", result.output)
    assert len(said) == len(kinds)
    assert [kind for kind in kinds if not any(text.startswith(kind) for text in said)] == []
    sample = rf"\({DATA}, line \d+, prompt: '\d+\+\d+=', response: .*\)\. The sample scores 0\."
    assert all(re.search(sample, text) for text in said)
    num_failed = [int(row["reward/errors"]) for row in result.metrics]
    assert min(num_failed) > 4, "there are repeats, which are not shown"
    assert num_failed == [result.rollouts(step).rewards.tolist().count(0.0) for step in (1, 2)]
    assert_counted(result)


def assert_ended_at_once(process: subprocess.Popen[str], folder: Path, batch: str) -> None:
    output, line = finish(process, 100), line_of(misspelt, "answre")
    assert process.returncode != 0, output
    fatal = (folder / "FATAL").read_text()
    assert f"reward.function: none of the {batch} could be scored" in fatal
    assert f"the reward function misspelt failed at {ROOT / FILE}:{line}: KeyError: 'answre' (configs/tiny/" in fatal
    assert "correct the function" in fatal and "reward.stop_if_all_fail=false" in fatal
    assert output.count(fatal.strip()) == 1, output
    assert output.count("misspelt failed at") == 2, "one message when it first happened, and one at the end"
    assert "step 1/2" not in output and "Traceback" not in output.partition("will not be restarted")[0]
    assert [path.name for path in (folder / "logs").iterdir()] == ["attempt_1"], "torchrun did not restart it"


@pytest.mark.parametrize(
    ("batch", "settings"),
    [
        ("56 samples of step 1", []),
        pytest.param(
            "5 samples of the evaluation",
            ["eval.interval=1", "data.eval=configs/tiny/eval.jsonl", "eval.num_prompts=5"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_function_that_always_fails_ends_the_run(batch: str, settings: list[str], tmp_path: Path) -> None:
    run = [f"run.dir={tmp_path}", "run.name=run", *SETTINGS, f"reward.function={FILE}:misspelt", *settings]
    run += ["reward.timeout_s=20"]
    process = start("--nproc-per-node=2", "--max-restarts=3", "train.py", *run, restarts=True)
    assert_ended_at_once(process, tmp_path / "run", batch)


@pytest.mark.alone
@pytest.mark.slow
def test_a_resumed_run_may_be_restarted(tmp_path: Path) -> None:
    """Its functions worked before, so the cause may be temporary."""
    train(tmp_path / "run", 2, *SETTINGS, "train.num_steps=1")
    run = [f"run.dir={tmp_path}", "run.name=run", *SETTINGS, f"reward.function={FILE}:misspelt"]
    process = start("--nproc-per-node=2", "--max-restarts=1", "train.py", *run, restarts=True)
    output = finish(process, 100)
    assert process.returncode != 0, output
    assert output.count("none of the 56 samples of step 2 could be scored") == 2, "in both attempts"
    assert "so the cause may be temporary, and a restart tries again" in output
    assert not (tmp_path / "run" / "FATAL").exists()


@pytest.mark.alone
@pytest.mark.slow
def test_a_run_that_may_fail_trains_on(tmp_path: Path) -> None:
    settings = [*SETTINGS, f"reward.function={FILE}:misspelt", "reward.stop_if_all_fail=false"]
    result = train(tmp_path / "run", 2, *settings)
    assert [row["reward/errors"] for row in result.metrics] == [56, 56]
    assert_counted(result)
    assert result.output.count("misspelt failed at") == 1


@pytest.mark.slow
def test_a_mistake_in_the_file_ends_the_run_at_once(tmp_path: Path) -> None:
    run = [f"run.dir={tmp_path}", "run.name=run", *SETTINGS, f"reward.function={FILE}:nothing"]
    process = start("--nproc-per-node=2", "train.py", *run)
    output = finish(process, 100)
    assert process.returncode != 0
    assert "has no function 'nothing'; it has varied, sometimes_hanging" in output
    assert "has no function 'nothing'" in (tmp_path / "run" / "FATAL").read_text()
