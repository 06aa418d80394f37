"""Algorithms beside GRPO learn on real vLLM, on the demo's task: what they are paid for rises."""

import statistics
from pathlib import Path

import pytest

from tests.launcher import Result, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SETTINGS = ["train.num_steps=40", "eval.interval=0"]
LEARN = {
    "PPO": ["algo.advantage=gae", "critic.lr=1e-3"],
    "RLOO": ["algo.advantage=rloo"],
    "DAPO": [
        *("algo.dynamic_sampling=true", "algo.clip_high=0.28", "algo.overlong_tokens=2", "algo.num_mini_batches=2"),
        *("algo.max_sampling_rounds=3", "train.num_prompts_per_step=16"),
    ],
}


def means(result: Result, metric: str) -> tuple[float, float]:
    """Of the first and of the last 5 steps."""
    rows = [row[metric] for row in result.metrics]
    return statistics.mean(rows[:5]), statistics.mean(rows[-5:])


@pytest.mark.parametrize("name", LEARN)
def test_reward_rises(name: str, tmp_path: Path) -> None:
    """By what the function says of all that was sampled, also of groups that were left out."""
    first, last = means(train(tmp_path / "run", 2, *SETTINGS, *LEARN[name], timeout_s=390), "reward/exact_match")
    assert first < 0.55
    assert last > 0.85


def test_certainty_rises_without_any_other_reward(tmp_path: Path) -> None:
    """And with it the entropy falls. Steps are few: the mean over tokens soon depends on little but the length."""
    settings = ["reward.function={exact_match: 0}", "algo.certainty_coef=1", "algo.advantage=dr_grpo", "actor.lr=1e-4"]
    result = train(tmp_path / "run", 2, *SETTINGS, *settings, "train.num_steps=30", timeout_s=390)
    first, last = means(result, "reward/certainty")
    assert last > first + 0.25
    before, after = means(result, "policy/entropy")
    assert after < 0.8 * before
    assert {row["reward/mean"] for row in result.metrics} == {0.0}
