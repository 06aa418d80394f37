"""The options of `--rl-phase`: what they mean, and which settings and placements do not go with them."""

import argparse

import pytest

from rl.config.load import add_arguments
from rl.config.modes import PhaseOptions, load_settings, read_phase
from rl.config.schema import ConfigError
from rl.placement.roles import plan

DYNAMIC, LIMITED = "algo.dynamic_sampling=true", "rollout.max_tokens_per_round=2"


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_intermixed_args(arguments)


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(parse(*arguments))
    return str(caught.value)


def test_the_phase_of_a_command() -> None:
    assert read_phase(parse("run.name=x")) == PhaseOptions()
    rollout = read_phase(parse("--rl-phase", "rollout", "--rollout-part", "2/3", "--rollout-split", "train-only"))
    assert rollout == PhaseOptions("rollout", "train-only", (2, 3))
    assert [number for number in range(8) if rollout.is_in_part(number)] == [1, 4, 7]
    update = read_phase(parse("--rl-phase=update", "--trajectories=a", "x=1", "--trajectories=b", "--partial-batch"))
    assert update == PhaseOptions("update", folders=("a", "b"), takes_partial=True)


@pytest.mark.parametrize("phase", ["rollout", "update"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.ahead=1", "rollout.ahead: got 1, but separate commands cannot sample and train at the same time; "),
        ("actor.overlap=true", "actor.overlap: got true, but separate commands cannot train while engines sample; "),
        ("checkpoint.resume=never", "checkpoint.resume: got never, so each command would begin again with step 1; "),
        ("checkpoint.best_metric=eval/accuracy", "checkpoint.best_metric: got 'eval/accuracy', but the command that "),
    ],
)
def test_settings_that_phases_refuse(phase: str, setting: str, message: str) -> None:
    load_settings(parse("run.name=x", setting))
    assert refusal("--rl-phase", phase, "run.name=x", setting).startswith(f"--rl-phase {phase}: {message}")


def test_a_phase_needs_the_name_of_its_run() -> None:
    message = "--rl-phase update: run.name is empty, so each command would be a new run; give a name, "
    assert refusal("--rl-phase", "update").startswith(message)


@pytest.mark.parametrize("setting", [DYNAMIC, LIMITED])
def test_several_rounds_exclude_parts_of_a_batch(setting: str) -> None:
    load_settings(parse("--rl-phase", "rollout", "run.name=x", setting))
    remedy = "set algo.dynamic_sampling=false" if setting == DYNAMIC else "set rollout.max_tokens_per_round=0"
    for arguments in (["rollout", "--rollout-part", "1/2"], ["update", "--partial-batch"]):
        assert refusal("--rl-phase", *arguments, "run.name=x", setting).endswith(f"leave the option out, or {remedy}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rollout-split eval-only", "--rollout-split needs --rl-phase rollout, but the phase is both"),
        ("--rl-phase update --rollout-part 1/2", "--rollout-part needs --rl-phase rollout, but the phase is update"),
        ("--trajectories a", "--trajectories needs --rl-phase update, but the phase is both"),
        ("--rl-phase rollout --partial-batch", "--partial-batch needs --rl-phase update, but the phase is rollout"),
        (
            "--rl-phase rollout --eval-only",
            "--eval-only and --rl-phase rollout exclude each other; write --rl-phase rollout --rollout-split eval-only",
        ),
        ("--rl-phase update --dry-run", "--dry-run and --rl-phase update exclude each other; leave one out"),
        (
            "--rl-phase rollout --rollout-part 3/2",
            "--rollout-part: got '3/2'; it must be K/N with K from 1 to N, such as 1/2",
        ),
        (
            "--rl-phase rollout --rollout-split eval-only --rollout-part 1/2",
            "--rollout-part divides a batch of training prompts; leave it out with eval-only",
        ),
        (
            "--rl-phase rollout --rollout-part 1/33",
            "--rl-phase rollout: --rollout-part: got 33 parts, but a batch has train.num_prompts_per_step = 32 groups; "
            "make at most as many parts",
        ),
        (
            "--rl-phase rollout --rollout-split eval-only data.eval= eval.interval=0",
            "eval-only has nothing to evaluate on: data.eval is empty; give held-out prompts",
        ),
    ],
)
def test_options_that_do_not_fit(arguments: str, message: str) -> None:
    assert refusal("run.name=x", *arguments.split()) == message


def test_eval_only_evaluates_whatever_the_interval() -> None:
    arguments = ["--rl-phase", "rollout", "--rollout-split", "eval-only", "run.name=x", "eval.interval=0"]
    assert load_settings(parse(*arguments))[0].eval.interval == 1


def test_ranks_keep_the_roles_of_a_phase() -> None:
    spec = {"rollout": "0-1", "inference": "2", "actor": "3-4", "actor,rollout": "5"}
    rollout = plan(spec, 1, 6, phase="rollout")
    assert [",".join(roles) for roles in rollout.roles] == ["rollout", "rollout", "idle", "idle", "idle", "rollout"]
    assert (rollout.leader, rollout.actors, rollout.owners, rollout.scorers) == (0, [0], [0], [])
    assert rollout.engines == ((0,), (1,), (5,))
    update = plan(spec, 1, 6, phase="update")
    assert [",".join(roles) for roles in update.roles] == ["idle", "idle", "inference", "actor", "actor", "actor"]
    assert (update.leader, update.actors, update.scorers, update.engines) == (3, [3, 4, 5], [2], ())


def test_the_first_engine_of_several_ranks_leads_with_its_first() -> None:
    placement = plan({"rollout": "all"}, 2, 2, tensor_parallel_size=2, num_replicas=3, phase="rollout")
    assert placement.engines == ((0, 1), (2, 3))
    assert (placement.actors, placement.num_replicas) == ([0], 1)


@pytest.mark.parametrize(("phase", "role", "other"), [("rollout", "rollout", "actor"), ("update", "actor", "rollout")])
def test_a_phase_needs_its_role(phase: str, role: str, other: str) -> None:
    plan({role: "all"}, 1, 2, phase=phase)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"no rank has the role '{role}', which the phase {phase} needs"):
        plan({other: "all"}, 1, 2, phase=phase)  # type: ignore[arg-type]
