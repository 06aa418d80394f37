"""Replays of runs whose batches have tokens of several versions, and of a run with real engines.

test_algorithms.py replays a run with a critic.
"""

import json
from pathlib import Path

import pytest

from tests.launcher import train
from tools.replay import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SETTINGS = [
    *("train.num_prompts_per_step=6", "rollout.num_samples_per_prompt=4", "eval.interval=0", "actor.lr=3e-4"),
    *("checkpoint.save_interval=1", "checkpoint.keep_last=9", "debug.save_rollouts=true"),
    "reward.function=tests/e2e/reward_functions.py:varied",
]


def replay(folder: Path, step: int, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    status = main([str(folder), "--step", str(step), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (status, result["matches"]) == (0, True), [each for each in result["metrics"] if not each["matches"]]
    assert "loss/policy" in {each["name"] for each in result["metrics"]}
    return result


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_carried_groups_are_replayed_also_after_a_resume_with_other_ranks(
    num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Responses of up to 6 tokens take up to 3 rounds, so a batch has tokens of up to 3 versions."""
    settings = [*SETTINGS, "rollout.engine=fake", "rollout.max_tokens_per_round=2"]
    train(tmp_path / "run", num_ranks, *settings, "train.num_steps=4")
    train(tmp_path / "run", 2, *settings, "train.num_steps=6")
    lags, numbers = [], []
    for step in range(1, 7):
        result = replay(tmp_path / "run", step, capsys)
        lags.append(max(group["lag_max"] for group in result["groups"]))
        numbers += [group["group"] for group in result["groups"]]
        assert all(group["lag_max"] <= 3 for group in result["groups"])
    assert lags[0] == 0 and max(lags) > 0
    assert len(set(numbers)) == len(numbers) == 36, "each prompt is trained on once"


def test_a_run_with_real_engines_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["algo.kl_coef=0.1", "algo.num_epochs=2", "train.num_steps=3"]
    result = train(tmp_path / "run", 2, *SETTINGS, *settings)
    assert "engine vllm" in result.output
    for step in (1, 3):
        replay(tmp_path / "run", step, capsys)
