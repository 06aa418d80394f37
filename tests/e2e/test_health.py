"""Health rules in real runs on the fake engine: planted faults are said once, and a rule can end a run in order."""

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl.report.events import Event, read_events
from rl.report.layout import tag_of
from tests.e2e.test_phases import ROLLOUT, UPDATE, Command, run_all
from tests.launcher import finish, start, status_line, steps_on, train

pytestmark = pytest.mark.timeout(200)
SMALL = [
    *("rollout.engine=fake", "train.num_prompts_per_step=3", "rollout.num_samples_per_prompt=2", "eval.interval=0"),
    *("health.num_steps=3", "health.actions={mismatch: off}"),  # the logprobs of the fake engine are random
]
REWARDS = "reward.function=tests/e2e/reward_functions.py"
DISAGGREGATED = ["placement.rollout=0", "placement.actor=[1, 2]"]
INFINITE = """
def overflow(new_logprobs, old_logprobs, advantages, **others):
    return (new_logprobs - old_logprobs).exp() * float("inf")
"""


def warnings(folder: Path) -> list[Event]:
    return [event for event in read_events(folder) if event.kind == "warning"]


PLANTED = {
    "reward_flat": [f"{REWARDS}:always_zero"],
    "reward_flat, 1": [f"{REWARDS}:always_one"],
    "timeouts": [f"{REWARDS}:often_hanging", "reward.timeout_s=0.2"],
    "truncation": [f"{REWARDS}:varied", "debug.mean_response_tokens=6"],
    "mismatch": [f"{REWARDS}:varied", "health.actions={}"],
    "lag": [
        *(f"{REWARDS}:varied", "debug.mean_response_tokens=6", "rollout.max_tokens_per_round=1", "health.max_lag=0.2"),
        "health.actions={mismatch: off, truncation: off}",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_said_once(name: str, tmp_path: Path) -> None:
    rule = name.partition(",")[0]
    result = train(tmp_path / "run", 2, *SMALL, "train.num_steps=8", *PLANTED[name])
    (warning,) = (event for event in warnings(result.folder) if event.text.startswith(f"health.{rule}: "))
    assert 3 <= warning.step < 8
    assert result.output.count(warning.text) == 1
    fired = [row.get(f"health/{rule}") for row in result.metrics]
    assert fired == [None] * (warning.step - 1) + [1.0] * (9 - warning.step)
    scalars = EventAccumulator(str(result.folder))
    scalars.Reload()
    assert [event.step for event in scalars.Scalars(tag_of(f"health/{rule}"))] == list(range(warning.step, 9))
    health, summary = result.output.rstrip().splitlines()[-2:]
    assert re.fullmatch(rf"oneworld: health rules that have fired: .*{rule} in {9 - warning.step} step.*", health)
    assert summary.startswith("run: reward ")


def test_skipped_steps_end_the_run_with_its_last_good_weights_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """Every gradient is infinite. torchrun may restart the ranks, but does not."""
    loss, folder = tmp_path / "loss.py", tmp_path / "run"
    loss.write_text(INFINITE)
    settings = [*SMALL, *DISAGGREGATED, "train.num_steps=6", f"{REWARDS}:varied"]
    place = ["--nproc-per-node=3", "train.py", f"run.dir={tmp_path}", "run.name=run"]
    fault = [f"algo.loss={loss}:overflow", "health.max_skipped_steps=3"]
    process = start(*place, *settings, *fault, restarts=True)
    output = finish(process, 150)
    assert process.returncode == 1, output[-3000:]
    reason = (
        "health.skipped_steps: gradients were infinite or NaN, so optimizer steps were skipped: 3 steps in a row "
        "(since step 1)."
    )
    *_, before_last, last = output.rstrip().splitlines()
    assert before_last == "oneworld: fatal, will not be restarted"
    assert last.startswith(f"oneworld: {reason}") and last.endswith("step 3 is saved (run.name=run)"), last
    assert (folder / "FATAL").read_text().startswith(f"oneworld: {reason}")
    assert status_line(folder).startswith("ended at step") and "health.skipped_steps" in status_line(folder)
    assert len(list((folder / "logs").iterdir())) == 1  # one attempt
    assert steps_on(folder) == [3]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["optim/skipped_steps"] for row in rows if row["step"]] == [1, 1, 1]
    events = [event for event in read_events(folder) if event.text.startswith("health.skipped_steps: ")]
    assert [(event.kind, event.step) for event in events] == [("warning", 1), ("stop", 3)]

    resumed = train(folder, 3, *settings, *fault[1:])
    assert [(row["step"], row["optim/skipped_steps"]) for row in resumed.metrics[-3:]] == [(4, 0), (5, 0), (6, 0)]
    assert [each for each in read_events(folder) if each.text.startswith("health.skipped_steps: ")] == events
    assert steps_on(folder)[-1] == 6 and not (folder / "FATAL").exists()


PHASES = [
    *("rollout.engine=fake", "train.num_prompts_per_step=4", "rollout.num_samples_per_prompt=2", "eval.interval=0"),
    *("train.num_steps=4", f"{REWARDS}:varied", "debug.mean_response_tokens=6"),
]


@pytest.mark.slow
@pytest.mark.timeout(330)  # six starts
@pytest.mark.parametrize(
    ("rule", "num_steps", "num_sampled"),
    [("mismatch", 2, 0), ("truncation", 1, 4)],
)
def test_a_rule_ends_an_update_of_recorded_groups_and_the_next_commands_say_so(
    rule: str, num_steps: int, num_sampled: int, tmp_path: Path
) -> None:
    """The rule mismatch doubts the weights of step 2, so step 2 is trained again. The rule truncation ends step 1, and
    saves it. Rules see the steps of earlier commands."""
    folder = tmp_path / "run"
    settings = [*PHASES, f"health.num_steps={num_steps}", f"health.actions={{{rule}: stop}}"]
    run_all([Command(folder, 2, [*phase, *settings]) for phase in [ROLLOUT, UPDATE, ROLLOUT][: 2 * num_steps - 1]])
    run = ["--nproc-per-node=2", "train.py", *UPDATE, f"run.dir={tmp_path}", "run.name=run", *settings]
    process = start(*run, restarts=True)
    output = finish(process, 100)
    assert process.returncode == 1, output[-3000:]
    *_, before_last, final = output.rstrip().splitlines()
    assert before_last == "oneworld: fatal, will not be restarted"
    assert final.startswith(f"oneworld: health.{rule}: ") and "(since step 1). What to try: " in final
    end = "This rule ends the run (health.actions). The newest checkpoint: step 1 is saved (run.name=run)"
    assert final.endswith(end), final
    assert (folder / "FATAL").read_text().rstrip() == final
    assert steps_on(folder) == [1]
    assert status_line(folder).startswith(f"ended at step {num_steps}") and f"health.{rule}" in status_line(folder)
    assert [event.kind for event in read_events(folder)][-1] == "fault"

    others = [*settings[:-1], "health.actions={}"]
    sampled, trained = run_all([Command(folder, 2, [*phase, *others]) for phase in (ROLLOUT, UPDATE)])
    for later in (sampled, trained):
        said = f"oneworld: a health rule ended this run at step {num_steps}. health.{rule}: "
        assert later.count(said) == 1, later
        assert " The run continues after step 1, and the rules look at its new steps only: " in later
    assert f"the phase rollout of step 2 is done: {num_sampled} groups sampled" in sampled, sampled
    assert steps_on(folder)[-1] == 2 and not (folder / "FATAL").exists()


@pytest.mark.slow
@pytest.mark.parametrize("placement", [["placement.actor,rollout=all"], [*DISAGGREGATED, "rollout.ahead=1"]])
def test_a_rule_that_doubts_the_weights_saves_nothing_new(placement: list[str], tmp_path: Path) -> None:
    settings = ["train.num_steps=30", f"{REWARDS}:always_zero", "checkpoint.save_interval=4", "health.min_entropy=100"]
    run = [f"run.dir={tmp_path}", "run.name=run", *SMALL, *placement, *settings]
    process = start(
        "--nproc-per-node=3", "train.py", *run, "health.actions={entropy: stop, mismatch: off, waiting: off}"
    )
    output = finish(process, 150)
    assert process.returncode == 1, output[-3000:]
    assert "oneworld: health.entropy: the policy has collapsed" in output.rstrip().splitlines()[-1]
    assert steps_on(tmp_path / "run") == [4]  # the rule fires at step 6


@pytest.mark.slow
def test_a_step_that_a_rule_doubts_is_not_saved_though_it_is_due_or_the_last(tmp_path: Path) -> None:
    """Every step is due. The run has 4 steps, and the rule fires at the last one."""
    settings = ["train.num_steps=4", f"{REWARDS}:varied", "checkpoint.save_interval=1", "health.num_steps=4"]
    run = [f"run.dir={tmp_path}", "run.name=run", *SMALL[:-2], *settings, "health.actions={mismatch: stop}"]
    process = start("--nproc-per-node=2", "train.py", *run, restarts=True)
    output = finish(process, 150)
    assert process.returncode == 1, output[-3000:]
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("oneworld: health.mismatch: "), last
    assert last.endswith("The newest checkpoint: step 3 is saved (run.name=run)"), last
    assert steps_on(tmp_path / "run")[-1] == 3
