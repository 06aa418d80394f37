"""`score_one_row`: the reward functions of a config on one row of its data, before a run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import ROOT, ConfigError, RewardConfig
from rl.rewards.trial import Trial, TrialRow, score_one_row

pytestmark = pytest.mark.timeout(60)
ROW = TrialRow("data.jsonl, line 1", "2+3=", {"answer": "5", "level": 4})
SOURCE = """
import os, re, time

def good(prompt, response, row):
    return {"score": 2 * (response == row["answer"]), "level": row["level"], "prompt": len(prompt)}

def numeric(prompt, response, row):
    return float(response) / 5

def tagged(prompt, response, row):
    return re.search(r"<answer>(.*?)</answer>", response)[1] == row["answer"]

def chosen(prompt, response, row):
    return {"yes": 1, "no": 0}[response]

def unfinished(prompt, response, row):
    if "<answer>" in response:
        return 1.0

def worded(prompt, response, row):
    return "good"

def undefined(prompt, response, row):
    return grade(response)

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
    assert score_one_row(config("exact_match"), ROW) == Trial(f"data.jsonl, line 1: {wanted}", True)
    text = score_one_row(config({f"{file}:good": 1.0, "exact_match": 0.5}), ROW).text
    parts = "good/level 4, good/prompt 4, exact_match"
    assert f"'5' scores 2.5 (good 2, {parts} 1); an" in text
    assert text.endswith(f"scores 0 (good 0, {parts} 0)")


def test_a_function_that_fails_for_one_response_is_no_error(file: Path) -> None:
    text, has_score = score_one_row(config(f"{file}:numeric"), ROW)
    assert has_score
    assert "its answer '5' scores 1; an arbitrary text 'I do not know.' has no score, because the reward" in text
    assert text.endswith(f"numeric failed at {file}:8: ValueError: could not convert string to float: 'I do not know.'")


def test_without_an_answer_only_the_arbitrary_text_is_scored(file: Path) -> None:
    row = TrialRow("data.jsonl, line 1", "2+3=", {"answer": "", "level": 4})
    text = score_one_row(config({"length": 1.0}, options={"length": {"most": 28}}), row).text
    assert text == "data.jsonl, line 1: an arbitrary text 'I do not know.' scores -0.5"
    text, has_score = score_one_row(config(f"{file}:numeric"), row)
    assert not has_score and "failed for the only text that was tried as a response. With the response 'I do" in text


def test_a_long_response_is_shown_with_both_ends() -> None:
    row = TrialRow("data.jsonl, line 1", "2+3=", {"answer": "a" * 40 + "b" * 40})
    assert f"its answer '{'a' * 30}' ... '{'b' * 30}' scores 1" in score_one_row(config("exact_match"), row).text


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("tagged", "TypeError: 'NoneType' object is not subscriptable"),
        ("chosen", "KeyError: '5'"),
        ("unfinished", "TypeError: the score is a NoneType"),
        ("hangs", "it took longer than reward.timeout_s = 0.5 s"),
        ("crashes", "its process ended"),
    ],
)
def test_failures_that_may_depend_on_the_response_are_no_error(file: Path, function: str, what: str) -> None:
    """A run accepts such functions: responses in the right format may have a score."""
    text, has_score = score_one_row(config(f"{file}:{function}", timeout_s=0.5 if function == "hangs" else 20.0), ROW)
    assert not has_score
    assert text.startswith(
        "data.jsonl, line 1: the functions failed for both texts that were tried as a response. With the response "
        f"'5', the reward function {function} failed at {file}:"
    )
    assert what in text and "whatever" not in text
    assert ". A run in which every sample of the first step fails will end. If such responses should get a" in text


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("misspelt", "KeyError: 'answre'"),
        ("worded", "ResultTypeError: the score is a str; return a number, or a dict from names to numbers"),
        ("undefined", "NameError: name 'grade' is not defined"),
    ],
)
def test_a_function_that_always_fails_is_an_error(file: Path, function: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        score_one_row(config(f"{file}:{function}"), ROW)
    text = str(caught.value)
    assert text.startswith("reward.function: data.jsonl, line 1: the functions failed for both texts that were tried")
    assert f"With the response '5', the reward function {function} failed at {file}:" in text
    assert f": {what}. What to change: correct the function, or the columns of the data" in text


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
    text = "the reward functions were not called, because TRIAL_API_KEY is not set here"
    assert score_one_row(wanted, ROW) == Trial(text, has_score=False)
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        score_one_row(config(f"{file}:nothing", credentials=["TRIAL_API_KEY"]), ROW)
    monkeypatch.setenv("TRIAL_API_KEY", "0123456789")
    assert "its answer '5' scores 10" in score_one_row(wanted, ROW).text


def test_it_needs_no_torch() -> None:
    program = "import sys, rl.rewards.trial; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
