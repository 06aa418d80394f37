"""What bounds a step, from the shares of busy and waiting time."""

import pytest

from rl.report.accounting import describe_bound


def shares(role: str, busy: float, **waits: float) -> dict[str, float]:
    return {f"perf/busy/{role}": busy} | {f"perf/wait/{role}/{name}": share for name, share in waits.items()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            shares("actor", 0.36, rollout=0.62, sync=0.02) | shares("rollout", 0.6, actor=0.4),
            "rollout-bound: actors wait 62 %",
        ),
        (
            shares("actor", 0.7, rollout=0.25, sync=0.05) | shares("rollout", 0.3, actor=0.7),
            "actor-bound: engines wait 70 %",
        ),
        (shares("actor", 0.2, rollout=0.3, inference=0.5), "inference-bound: actors wait 50 %"),
        (shares("actor", 0.2, rollout=0.3, sync=0.5), "sync-bound: actors wait 50 %"),
        # The engines have sampled everything, and the scores are late.
        (
            shares("actor", 0.2, rollout=0.8) | shares("rollout", 0.1, reward=0.7, actor=0.2),
            "reward-bound: engines wait 70 %",
        ),
        # Ranks that only serve are mostly idle. They do not say what bounds the step.
        (shares("actor", 0.4, rollout=0.6) | shares("inference", 0.05, actor=0.95), "rollout-bound: actors wait 60 %"),
        # Shared ranks are busy in both roles, so the stages tell.
        (
            shares("rollout_actor", 0.9, rollout=0.1) | {"time/step": 10.0, "time/rollout": 7.0, "time/update": 2.5},
            "rollout-bound: sampling takes 70 %",
        ),
        (
            shares("rollout_actor", 0.9, rollout=0.1)
            | {"time/step": 10.0, "time/rollout": 4.0, "time/update": 3.0, "time/logprobs": 2.0},
            "actor-bound: training takes 50 %",
        ),
        (
            shares("rollout_actor", 0.4, reward=0.6) | {"time/step": 10.0, "time/rollout": 8.0, "time/update": 2.0},
            "reward-bound: ranks wait 60 %",
        ),
        # Some actors only train.
        (shares("actor", 0.4, rollout=0.6) | shares("rollout_actor", 1.0), "rollout-bound: actors wait 60 %"),
        ({}, ""),
        ({"time/step": 1.0, "reward/mean": 0.5}, ""),
    ],
)
def test_what_bounds_a_step(values: dict[str, float], expected: str) -> None:
    assert describe_bound(values) == expected
