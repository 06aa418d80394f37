"""`score_one_row`: the reward functions of a config on one row of its data, before a run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import ROOT, ConfigError, RewardConfig
from rl.rewards.trial import TrialRow, score_one_row

pytestmark = pytest.mark.timeout(60)
ROW = TrialRow("data.jsonl, line 1", "2+3=", {"answer": "5", "level": 4})
SOURCE = """
import os, time

def good(prompt, response, row):
    return {"score": 2 * (response == row["answer"]), "level": row["level"], "prompt": len(prompt)}

def numeric(prompt, response, row):
    return float(response) / 5

def misspelt(prompt, response, row):
    wanted = row["answre"]
    return response == wanted

def hangs(prompt, response, row):
    time.sleep(1000)

def crashes(prompt, response, row):
    os._exit(3)

def keyed(prompt, response, row):
    return len(os.environ["TRIAL_API_KEY"])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path / "rewards.py"


def config(function: Any, **options: Any) -> RewardConfig:
    return RewardConfig(function=function, timeout_s=options.pop("timeout_s", 20.0), **options)


def test_the_scores_of_the_answer_and_of_an_arbitrary_text(file: Path) -> None:
    wanted = "its answer '5' scores 1; an arbitrary text 'I do not know.' scores 0"
    assert score_one_row(config("exact_match"), ROW) == f"data.jsonl, line 1: {wanted}"
    text = score_one_row(config({f"{file}:good": 1.0, "exact_match": 0.5}), ROW)
    parts = "good/level 4, good/prompt 4, exact_match"
    assert f"'5' scores 2.5 (good 2, {parts} 1); an" in text
    assert text.endswith(f"scores 0 (good 0, {parts} 0)")


def test_a_function_that_fails_for_one_response_is_no_error(file: Path) -> None:
    text = score_one_row(config(f"{file}:numeric"), ROW)
    assert "its answer '5' scores 1; an arbitrary text 'I do not know.' has no score, because the reward" in text
    assert text.endswith(f"numeric failed at {file}:8: ValueError: could not convert string to float: 'I do not know.'")


def test_without_an_answer_only_the_arbitrary_text_is_scored(file: Path) -> None:
    row = TrialRow("data.jsonl, line 1", "2+3=", {"answer": "", "level": 4})
    text = score_one_row(config({"length": 1.0}, options={"length": {"most": 28}}), row)
    assert text == "data.jsonl, line 1: an arbitrary text 'I do not know.' scores -0.5"
    with pytest.raises(ConfigError, match="could not convert"):
        score_one_row(config(f"{file}:numeric"), row)


@pytest.mark.parametrize(
    ("function", "what", "remedy"),
    [
        ("misspelt", "failed at {file}:11: KeyError: 'answre'. ", "correct the function, or the columns of the data"),
        ("hangs", "failed at {file}:15: it took longer than reward.timeout_s = 0.5 s. ", "raise reward.timeout_s"),
        ("crashes", "failed at {file}:17: its process ended", "correct the function"),
    ],
)
def test_a_function_that_always_fails_is_an_error(file: Path, function: str, what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        score_one_row(config(f"{file}:{function}", timeout_s=0.5 if function == "hangs" else 20.0), ROW)
    text = str(caught.value)
    assert text.startswith("reward.function: the functions fail for data.jsonl, line 1, whatever the response is.")
    assert f"With the response '5', the reward function {function} {what.format(file=file)}" in text
    assert remedy in text


def test_mistakes_in_the_settings_are_found(file: Path) -> None:
    for function, message in ((f"{file}:nothing", "has no function 'nothing'"), ("last_word", "choose one of")):
        with pytest.raises(ConfigError, match=message):
            score_one_row(config(function), ROW)
    file.write_text("import os; os._exit(7)")
    with pytest.raises(ConfigError, match=r"could not be scored: .* has ended with exit code 7"):
        score_one_row(config(f"{file}:good"), ROW)


def test_a_credential_that_is_not_set_here_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--plan may run on another machine than the run. The functions are still imported."""
    wanted = config(f"{file}:keyed", credentials=["TRIAL_API_KEY"])
    monkeypatch.delenv("TRIAL_API_KEY", raising=False)
    assert score_one_row(wanted, ROW) == "the reward functions were not called, because TRIAL_API_KEY is not set here"
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        score_one_row(config(f"{file}:nothing", credentials=["TRIAL_API_KEY"]), ROW)
    monkeypatch.setenv("TRIAL_API_KEY", "0123456789")
    assert "its answer '5' scores 10" in score_one_row(wanted, ROW)


def test_it_needs_no_torch() -> None:
    program = "import sys, rl.rewards.trial; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
