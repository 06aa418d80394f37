"""A run with reward functions of a file, some of whose calls hang or raise: it trains on, and counts them."""

from pathlib import Path

import pytest

from tests.e2e.reward_functions import sometimes_hanging
from tests.launcher import Result, finish, start, train

pytestmark = [pytest.mark.alone, pytest.mark.timeout(200)]
FILE = "tests/e2e/reward_functions.py"
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
    assert result.output.count("its sample scores 0: it took longer than reward.timeout_s = 0.5 s") >= 1
    assert "sometimes_hanging: RuntimeError: planted" in result.output


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


def test_a_mistake_in_the_file_ends_the_run_at_once(tmp_path: Path) -> None:
    run = [f"run.dir={tmp_path}", "run.name=run", *SETTINGS, f"reward.function={FILE}:nothing"]
    process = start("--nproc-per-node=2", "train.py", *run)
    output = finish(process, 100)
    assert process.returncode != 0
    assert "has no function 'nothing'; it has varied, sometimes_hanging" in output
    assert "has no function 'nothing'" in (tmp_path / "run" / "FATAL").read_text()
