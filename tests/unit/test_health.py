"""Health rules: each fires at a planted fault, says it once, and is silent in a run without faults."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

from rl.common.events import Event
from rl.config.load import load_config
from rl.config.schema import HEALTH_RULES, Config, ConfigError
from rl.report.health import Finding, Health, describe_stop, make_rules

Row = dict[str, Any]
NUM_SAMPLES = 32 * 8  # of a step, by default
GOOD: Row = {
    **{"reward/mean": 0.4, "reward/std": 0.49, "reward/no_signal": 0.3, "reward/timeouts": 0.0},
    **{"policy/entropy": 0.5, "policy/mismatch_kl": 0.001, "rollout/truncated": 0.1, "rollout/lag_mean": 0.9},
    **{"optim/grad_norm": 0.8, "optim/skipped_steps": 0.0, "host/memory_gb/node_0": 20.0},
    **{"perf/wait/actor/rollout": 0.2, "perf/wait/actor/sync": 0.1, "perf/wait/rollout/actor": 0.3},
}


def run(health: Health, rows: Iterable[Row], first: int = 1) -> list[tuple[int, Finding]]:
    """Return what the rules find, with its steps."""
    return [(step, finding) for step, row in enumerate(rows, first) for finding in health.check(step, row)]


def event(step: int, finding: Finding) -> Event:
    return Event(0.0, step, "stop" if finding.is_stop else "warning", finding.text)


@cache
def settings(*overrides: str) -> Config:
    return load_config(None, list(overrides))


def rules_of(*overrides: str, max_lag: int = 4) -> Health:
    return Health(settings(*overrides), max_lag)


def steady(**changed: float) -> Callable[[int], Row]:
    values = {name.replace("__", "/"): value for name, value in changed.items()}
    return lambda step: GOOD | values


FAULTS: dict[str, tuple[Callable[[int], Row], int, str]] = {  # rows, the step at which it is said, and what is said
    "reward_flat, 0": (
        steady(reward__mean=0.0, reward__std=0.0, reward__no_signal=1.0),
        10,
        "every reward of the last 10 steps is 0 (since step 1)",
    ),
    "reward_flat, 1": (
        steady(reward__mean=1.0, reward__std=0.0, reward__no_signal=1.0),
        10,
        "every reward of the last 10 steps is 1 (since step 1)",
    ),
    "no_signal": (steady(reward__no_signal=1.0), 10, "all rewards of a group were equal, in every group"),
    "entropy": (
        lambda step: GOOD | {"policy/entropy": 0.5 if step < 8 else 0.004},
        20,
        "its entropy per token is 0.004, below health.min_entropy = 0.02, and the mean reward is 0.4 and does not rise "
        "(since step 11)",
    ),
    "mismatch": (
        steady(policy__mismatch_kl=0.3),
        10,
        "policy/mismatch_kl is 0.3 on average over the last 10 steps, above health.max_mismatch_kl = 0.02",
    ),
    "truncation": (
        steady(rollout__truncated=0.75),
        10,
        "rollout/truncated is 75% on average over the last 10 steps, above health.max_truncated = 0.5",
    ),
    "gradient_spikes": (
        lambda step: GOOD | {"optim/grad_norm": 40.0 if step == 12 else 0.8},
        12,
        "the gradient norm was 40, 50 times the median before (0.8) (since step 12)",
    ),
    "skipped_steps": (
        lambda step: GOOD | {"optim/skipped_steps": float(step == 7)},
        7,
        "optimizer steps were skipped: 1 step in a row (since step 7)",
    ),
    "skipped_steps, critic": (
        lambda step: GOOD | {"critic/skipped_steps": float(step == 7)},
        7,
        "optimizer steps were skipped: 1 step in a row (since step 7)",
    ),
    "timeouts": (
        steady(reward__timeouts=0.25 * NUM_SAMPLES),
        10,
        "for 25% of the samples of the last 10 steps, above health.max_timeouts = 0.05",
    ),
    "waiting": (
        steady(perf__wait__actor__rollout=0.5),
        10,
        "actor ranks wait 60% of a step, mostly for rollout; that is above health.max_waiting = 0.5",
    ),
    "host_memory": (
        lambda step: GOOD | {"host/memory_gb/node_0": 20 + 0.1 * step},
        100,
        "host memory of node 0 grew from 21.3 to 28.8 GB in 100 steps (since step 1)",
    ),
    "lag": (steady(rollout__lag_mean=3.4), 10, "trained on 3.4 updates after they were sampled; the bound is 4"),
}


def test_every_rule_has_a_planted_fault() -> None:
    assert {name.partition(",")[0] for name in FAULTS} == set(HEALTH_RULES) == set(make_rules(settings(), 0))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_said_once_with_what_to_try(name: str) -> None:
    make, said_at, expected = FAULTS[name]
    rule = name.partition(",")[0]
    ((step, finding),) = run(rules_of(), [make(step) for step in range(1, 121)])
    assert (step, finding.rule, finding.is_stop) == (said_at, rule, False)
    assert finding.text.startswith(f"health.{rule}: ") and expected in finding.text
    assert len(finding.text.partition("What to try: ")[2]) > 40


@pytest.mark.parametrize("name", FAULTS)
def test_a_rule_can_be_turned_off(name: str) -> None:
    health = rules_of(f"health.actions={{{name.partition(',')[0]}: off}}")
    assert run(health, [FAULTS[name][0](step) for step in range(1, 121)]) == []
    assert health.metrics() == {} and health.summary() == ""


def test_a_run_without_faults_or_without_metrics_is_silent() -> None:
    health = rules_of()
    assert run(health, [GOOD] * 300) == [] and health.metrics() == {}
    assert run(rules_of(), [{"reward/mean": 0.4}] * 300) == []
    assert run(rules_of(), [{"eval/accuracy": 0.0}] * 300) == []


def once(name: str, value: float, step: int) -> Callable[[int], Row]:
    return lambda now: GOOD | ({name: value} if now == step else {})


NEAR_MISSES: dict[str, Callable[[int], Row]] = {
    "reward_flat, one sample differs": steady(reward__mean=1 / NUM_SAMPLES, reward__std=0.06),
    "reward_flat, rewards of -1 and 1": steady(reward__mean=0.0, reward__std=1.0),
    "reward_flat, 9 of 10 steps": lambda step: GOOD | ({"reward/mean": 0.0, "reward/std": 0.0} if step % 10 else {}),
    "reward_flat, 0 but once 1": lambda step: GOOD | {"reward/mean": float(step % 10 == 0), "reward/std": 0.0},
    "no_signal, one of 32 groups has one": steady(reward__no_signal=31 / 32),
    "no_signal, 9 of 10 steps": lambda step: GOOD | {"reward/no_signal": float(step % 10 > 0)},
    "entropy, at the limit": steady(policy__entropy=0.02),
    "entropy, solved": steady(reward__mean=0.95, policy__entropy=0.001),
    "entropy, still learning": lambda step: GOOD | {"reward/mean": step / 200, "policy/entropy": 0.001},
    "mismatch, at the limit": steady(policy__mismatch_kl=0.02),
    "mismatch, one bad step": once("policy/mismatch_kl", 0.18, 50),
    "truncation, at the limit": steady(rollout__truncated=0.5),
    "truncation, one bad step": once("rollout/truncated", 1.0, 50),
    "gradient_spikes, ten times the median": once("optim/grad_norm", 8.0, 50),
    "gradient_spikes, always clipped": steady(optim__grad_norm=500.0),
    "gradient_spikes, too few before": once("optim/grad_norm", 99.0, 5),
    "gradient_spikes, no gradients": steady(optim__grad_norm=0.0),
    "skipped_steps, none": steady(optim__skipped_steps=0.0, critic__skipped_steps=0.0),
    "timeouts, at the limit": lambda step: GOOD | {"reward/timeouts": 13.0 if step % 5 else 12.0},  # 128 of 2,560
    "timeouts, one bad step": once("reward/timeouts", 0.4 * NUM_SAMPLES, 50),
    "waiting, at the limit": steady(perf__wait__actor__rollout=0.4),
    "waiting, two roles": steady(perf__wait__actor__rollout=0.35, perf__wait__rollout__actor=0.45),
    "waiting, one slow step": once("perf/wait/actor/rollout", 0.9, 50),
    "host_memory, at the limit": lambda step: GOOD | {"host/memory_gb/node_0": 20 + 4.0 * step / 120},
    "host_memory, full after a while": lambda step: GOOD | {"host/memory_gb/node_0": 20.0 + min(step, 26)},
    "host_memory, up and down": lambda step: GOOD | {"host/memory_gb/node_0": 20.0 + 10 * (step // 20 % 2)},
    "lag, below the limit": steady(rollout__lag_mean=3.19),
}


def test_every_rule_has_a_near_miss() -> None:
    assert {name.partition(",")[0] for name in NEAR_MISSES} == set(HEALTH_RULES)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_no_fault(name: str) -> None:
    assert run(rules_of(), [NEAR_MISSES[name](step) for step in range(1, 121)]) == []


def test_tokens_of_a_run_one_round_ahead_all_have_the_largest_lag() -> None:
    assert run(rules_of(max_lag=1), [GOOD | {"rollout/lag_mean": 1.0}] * 120) == []


def test_small_gradients_that_grow_are_no_spike() -> None:
    rows = [GOOD | {"optim/grad_norm": 0.9 if step == 20 else 0.001} for step in range(1, 40)]
    assert run(rules_of(), rows) == []
    (spike,) = run(rules_of("actor.max_grad_norm=0.5"), rows)
    assert spike[0] == 20


def test_a_rule_that_went_away_and_came_back_is_said_again() -> None:
    def row(step: int) -> Row:
        return GOOD | {"rollout/truncated": 0.9 if step <= 15 or step > 40 else 0.0}

    health = rules_of()
    first, second = run(health, [row(step) for step in range(1, 61)])
    assert (first[0], second[0]) == (10, 46)
    assert "It fired before, up to step 19." in second[1].text and "before" not in first[1].text
    assert health.metrics() == {"health/truncation": 1.0}
    assert health.summary() == "health rules that have fired: truncation in 25 steps (docs/health.md)"
    run(health, [GOOD] * 20, first=61)
    assert health.metrics() == {"health/truncation": 0.0}


def test_skipped_steps_stop_the_run_after_five_in_a_row() -> None:
    skipped, health = GOOD | {"optim/skipped_steps": 1.0}, rules_of()
    found = run(health, [GOOD, skipped, skipped, GOOD, *[skipped] * 5])
    assert [(step, finding.is_stop) for step, finding in found] == [(2, False), (5, False), (9, True)]
    assert "5 steps in a row (since step 5)" in found[-1][1].text
    assert "This rule ends the run (health.actions)." in found[-1][1].text and found[-1][1].is_worth_saving
    warned = run(rules_of("health.actions={skipped_steps: warn}"), [skipped] * 20)
    assert [(step, finding.is_stop) for step, finding in warned] == [(1, False)]


def test_a_rule_that_stops_ends_the_run_at_once_and_says_whether_its_step_is_worth_saving() -> None:
    ((step, finding), *_) = run(rules_of("health.actions={truncation: stop}"), [GOOD | {"rollout/truncated": 1}] * 11)
    assert (step, finding.is_stop, finding.is_worth_saving) == (10, True, True)
    rows = [FAULTS["entropy"][0](step) for step in range(1, 21)]
    ((_, finding),) = run(rules_of("health.actions={entropy: stop}"), rows)
    assert (finding.is_stop, finding.is_worth_saving) == (True, False)


@pytest.mark.parametrize("resumed_at", [3, 9, 10, 14, 15, 19, 30])
def test_a_restart_neither_resets_nor_repeats_a_warning(resumed_at: int) -> None:
    """The run is killed at step 50. It resumes from an earlier checkpoint, and repeats the steps after it."""
    rows = [GOOD | {"rollout/truncated": 0.9 if step <= 15 else 0.0} for step in range(1, 51)]
    rows[20:30] = [GOOD | {"optim/grad_norm": 99.0}] * 10
    before = run(rules_of(), rows)
    assert [finding.rule for _, finding in before] == ["truncation", "gradient_spikes"]
    kept = [json.loads(json.dumps({"step": step} | row)) for step, row in enumerate(rows[:resumed_at], 1)]
    health = rules_of()
    health.restore(kept, [event(step, finding) for step, finding in before])
    assert run(health, rows[resumed_at:], first=resumed_at + 1) == []
    through = rules_of()
    run(through, rows)
    assert (health.metrics(), health.summary()) == (through.metrics(), through.summary())
    fresh = rules_of()  # another kill, but nobody has been told anything
    fresh.restore(kept)
    assert run(fresh, rows[resumed_at:], first=resumed_at + 1) == [each for each in before if each[0] > resumed_at]


def test_a_resumed_run_is_judged_by_its_new_steps_after_a_stop() -> None:
    flat = GOOD | {"reward/mean": 0.0, "reward/std": 0.0}
    health = rules_of("health.actions={reward_flat: stop}")
    ((step, finding),) = run(health, [flat] * 10)
    resumed = rules_of("health.actions={reward_flat: stop}")
    resumed.restore([{"step": step} | flat for step in range(1, 11)], [event(step, finding)])
    assert run(resumed, [flat] * 9, first=11) == []
    ((step, again),) = run(resumed, [flat], first=20)
    assert (step, again.is_stop) == (20, True) and "(since step 11)" in again.text


def test_the_next_start_says_which_rule_ended_the_run_until_it_has_begun() -> None:
    flat = GOOD | {"reward/mean": 0.0, "reward/std": 0.0}
    ((step, finding),) = run(rules_of("health.actions={reward_flat: stop}"), [flat] * 10)
    begin, end = Event(0.0, 0, "start", "attempt 1"), Event(0.0, 10, "fault", f"ended at step 10: {finding.text}")
    story = [begin, event(step, finding), Event(0.0, 10, "checkpoint", "step 10 is saved"), end]
    said = describe_stop(story, 10)
    assert said.startswith(
        "a health rule ended this run at step 10. health.reward_flat: every reward of the last 10 steps is 0 (since "
        "step 1). What to try: look at the samples; "
    )
    assert said.endswith(
        "or take harder ones. The run continues after step 10, and the rules look at its new steps only: if you have "
        "changed nothing, it is likely to end in the same way"
    )
    assert " The run starts again, and the rules look at its new steps only" in describe_stop(story, 0)
    resume = Event(0.0, 10, "resume", "attempt 2 continues after step 10")
    assert describe_stop([*story, resume], 10) == describe_stop([begin], 0) == describe_stop([], 0) == ""
    assert describe_stop([begin, Event(0.0, 3, "stop", "stopped by a signal at step 3")], 3) == ""


def test_rows_with_null_for_infinity_count_as_missing() -> None:
    assert run(rules_of(), [GOOD | {"rollout/truncated": None, "optim/grad_norm": float("nan")}] * 20) == []


def test_bad_actions_are_refused() -> None:
    for value in ("{truncated: stop}", "{truncation: fail}"):
        with pytest.raises(ConfigError, match=r"health.actions: got .*; it must be a mapping of rules \(reward_flat, "):
            load_config(None, [f"health.actions={value}"])
