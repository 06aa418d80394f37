"""Which steps are saved and which are kept, by tables."""

import math

import pytest

from rl.checkpoint.checkpoints import Best, check_metric, is_due, steps_to_keep, update_best
from rl.config.schema import CheckpointConfig, ConfigError

HIGHEST = CheckpointConfig(best_metric="eval/accuracy")
LOWEST = CheckpointConfig(best_metric="eval/accuracy", best_is_lowest=True)


@pytest.mark.parametrize(
    ("config", "best", "value", "expected"),
    [
        (HIGHEST, None, 0.5, Best(7, 0.5)),
        (HIGHEST, None, -3.0, Best(7, -3.0)),
        (HIGHEST, Best(3, 0.5), 0.6, Best(7, 0.6)),
        (HIGHEST, Best(3, 0.5), 0.5, Best(3, 0.5)),  # the earlier one of equals
        (HIGHEST, Best(3, 0.5), 0.4, Best(3, 0.5)),
        (HIGHEST, Best(3, 0.5), None, Best(3, 0.5)),  # not measured at this step
        (HIGHEST, None, None, None),
        (HIGHEST, Best(3, 0.5), math.nan, Best(3, 0.5)),
        (HIGHEST, None, math.nan, None),
        (HIGHEST, Best(3, 0.0), -1.0, Best(3, 0.0)),  # a best of 0 is one
        (HIGHEST, Best(3, -1.0), 0.0, Best(7, 0.0)),
        (LOWEST, None, 0.5, Best(7, 0.5)),
        (LOWEST, Best(3, 0.5), 0.4, Best(7, 0.4)),
        (LOWEST, Best(3, 0.5), 0.5, Best(3, 0.5)),
        (LOWEST, Best(3, 0.5), 0.6, Best(3, 0.5)),
        (LOWEST, Best(3, 0.5), math.nan, Best(3, 0.5)),
        (LOWEST, None, math.nan, None),
        (LOWEST, Best(3, 0.0), -1.0, Best(7, -1.0)),
        (CheckpointConfig(), None, 0.5, None),  # no metric was asked for
    ],
)
def test_the_best_step(config: CheckpointConfig, best: Best | None, value: float | None, expected: Best | None) -> None:
    values = {"reward/mean": 9.0} | ({} if value is None else {"eval/accuracy": value})
    assert update_best(best, 7, values, config) == expected


def test_a_step_that_is_not_better_is_told_by_identity() -> None:
    best = Best(3, 0.5)
    assert update_best(best, 7, {"eval/accuracy": 0.5}, HIGHEST) is best
    assert update_best(best, 7, {}, HIGHEST) is best
    assert update_best(best, 7, {"eval/accuracy": 0.7}, HIGHEST) is not best


@pytest.mark.parametrize(
    ("save_interval", "num_steps", "due"),
    [
        (1, 3, [1, 2, 3]),
        (4, 10, [4, 8, 10]),
        (5, 10, [5, 10]),
        (20, 10, [10]),
        (0, 10, [10]),  # the last is always saved
    ],
)
def test_when_a_save_is_due(save_interval: int, num_steps: int, due: list[int]) -> None:
    config = CheckpointConfig(save_interval=save_interval)
    assert [step for step in range(1, num_steps + 1) if is_due(step, num_steps, config)] == due


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "best", "expected"),
    [
        ([10, 20, 30], 2, 0, None, [20, 30]),
        ([10, 20, 30], 1, 0, None, [30]),
        ([10, 20, 30], 3, 0, None, [10, 20, 30]),
        ([10], 2, 0, None, [10]),
        ([], 2, 0, None, []),
        ([30, 100, 20, 9], 2, 0, None, [30, 100]),  # by number, whatever their order
        ([10, 20, 30, 40, 50], 1, 20, None, [20, 40, 50]),
        ([10, 20, 30, 40, 50], 1, 25, None, [50]),
        ([10, 20, 30, 40, 50], 2, 30, None, [30, 40, 50]),
        ([10, 20, 30, 40], 2, 0, Best(10, 0.5), [10, 30, 40]),  # the best is older than the newest two
        ([10, 20, 30, 40], 2, 0, Best(30, 0.5), [30, 40]),  # it is one of them
        ([10, 20, 30, 40], 2, 0, Best(15, 0.5), [30, 40]),  # it is on no disk
        ([10, 20, 30, 40], 1, 20, Best(10, 0.5), [10, 20, 40]),
        ([10, 17, 20], 1, 10, Best(17, 0.5), [10, 17, 20]),
    ],
)
def test_what_is_kept(
    steps: list[int], keep_last: int, keep_every: int, best: Best | None, expected: list[int]
) -> None:
    config = CheckpointConfig(keep_last=keep_last, keep_every=keep_every)
    assert sorted(steps_to_keep(steps, best, config)) == expected


VALUES = {"reward/mean": 1.0, "loss/policy": 0.1}


@pytest.mark.parametrize("name", ["", "reward/mean", "eval/accuracy", "eval/of_a_step_that_comes_later"])
def test_a_metric_that_some_step_reports(name: str) -> None:
    check_metric(VALUES, CheckpointConfig(best_metric=name))


def test_a_metric_that_no_step_reports() -> None:
    message = r"got 'reward/meen', which no step reports; choose one of loss/policy, reward/mean or one under eval/"
    with pytest.raises(ConfigError, match=message):
        check_metric(VALUES, CheckpointConfig(best_metric="reward/meen"))


def test_a_mistyped_eval_metric_is_told_at_the_first_evaluation() -> None:
    config = CheckpointConfig(best_metric="eval/acuracy")
    check_metric(VALUES, config)  # nothing was evaluated yet
    message = r"got 'eval/acuracy', which no step reports; choose one of eval/accuracy, loss/policy, reward/mean or"
    with pytest.raises(ConfigError, match=message):
        check_metric(VALUES | {"eval/accuracy": 0.5}, config)
    check_metric(VALUES | {"eval/accuracy": 0.5, "eval/acuracy": 0.5}, config)


@pytest.mark.parametrize("name", ["policy/mismatch_kl", "policy/staleness_kl"])
def test_a_step_may_have_no_tokens_of_one_kind(name: str) -> None:
    """With lags, nearly all tokens are old, or all are new. Without lags, one of the two metrics never comes."""
    config = CheckpointConfig(best_metric=name)
    check_metric(VALUES | {"rollout/lag_max": 1.0}, config)
    with pytest.raises(ConfigError, match=f"checkpoint.best_metric: got '{name}', which no step reports"):
        check_metric(VALUES, config)
