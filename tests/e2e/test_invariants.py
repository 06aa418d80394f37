"""Invariants of whole runs, on the fake engine. test_placement_equality.py has the real one."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_phases import Command, run_all
from tests.launcher import Result, finish, start, train

pytestmark = pytest.mark.timeout(150)
SETTINGS = ["rollout.engine=fake", "train.num_steps=2", "train.num_prompts_per_step=7", "eval.interval=0"]
SETTINGS += ["rollout.max_num_seqs=16", "debug.save_rollouts=true"]
LONGER = ["train.num_steps=3", "rollout.max_new_tokens=24"]  # enough decode steps to measure the speed of engines
DISAGGREGATED = ["placement.rollout=0-1", "placement.actor=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Result]:
    """A run with two engines on ranks of their own, one of which is slow: in the last step, that is known. And one with
    a single engine."""
    folder = tmp_path_factory.mktemp("runs")
    settings = [*SETTINGS, *LONGER]
    commands = [
        Command(folder / "uneven", 3, [*settings, *DISAGGREGATED], broken="slow engine"),
        Command(folder / "alone", 1, settings),
    ]
    uneven, alone = (Result(output, each.folder) for each, output in zip(commands, run_all(commands)))
    return uneven, alone


@pytest.fixture(scope="module")
def uneven(runs: tuple[Result, Result]) -> Result:
    return runs[0]


def test_a_slow_engine_is_named_with_its_speed_and_cost(uneven: Result) -> None:
    """Rank 0 sleeps in every decode step."""
    names = ("perf/slowest_engine", "perf/slowest_engine_speed", "perf/slowest_engine_s", "time/rollout")
    *_, (engine, speed, cost_s, rollout_s) = [[row[name] for name in names] for row in uneven.metrics]
    assert engine == 0 and speed < 0.5
    assert 0 < cost_s <= rollout_s / 2, "it gets no groups any more, so two engines would take half of the time"


def test_timing_never_changes_the_data(runs: tuple[Result, Result]) -> None:
    """A slow engine samples fewer of the groups, and nothing else changes: the batches are those of one engine."""
    uneven, alone = runs
    for step in (1, 2, 3):
        expected, got = alone.rollouts(step), uneven.rollouts(step)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.group_ids.tolist() == expected.group_ids.tolist()
        assert got.rewards.tolist() == expected.rewards.tolist()


def test_version_on_every_token(uneven: Result) -> None:
    for step in (1, 2):
        batch = uneven.rollouts(step)
        assert batch.versions[batch.loss_mask].unique().tolist() == [step]
        assert batch.versions[~batch.loss_mask].unique().tolist() == [-1]


@pytest.mark.parametrize(
    ("old_logprobs", "stage"),
    [
        ("auto", "update"),
        pytest.param("always", "logprobs", marks=pytest.mark.slow),
        pytest.param("rollout", "update", marks=pytest.mark.slow),
    ],
)
def test_engine_logprobs_are_data_not_truth(old_logprobs: str, stage: str, tmp_path: Path) -> None:
    """The fake engine's logprobs differ from the learner's. With a limit on the mismatch nothing is learnt from them,
    whether the learner computes its own in a separate pass or in the update's forward."""
    limits = ["rollout.max_mismatch_kl=0.5", f"algo.old_logprobs={old_logprobs}"]
    run = [f"run.dir={tmp_path}", "run.name=run", *SETTINGS, *limits]
    process = start("--nproc-per-node=2", "train.py", *run)
    output = finish(process, 100)
    assert process.returncode != 0
    assert f"stage {stage}, step 1: RuntimeError: engine and learner disagree: policy/mismatch_kl is " in output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["train.num_prompts_per_step=1"],  # fewer groups than actors
        ["rollout.max_num_seqs=3"],  # an engine smaller than a group
        [
            *("eval.interval=1", "eval.num_prompts=1", "algo.num_mini_batches=7", "algo.num_epochs=2"),
            *("algo.kl_coef=0.1", "actor.offload=rollout", "debug.profile_step=2"),
        ],
        ["placement.inference,rollout=0-1", "placement.actor=2", "algo.old_logprobs=always"],  # sample and score
    ],
    ids=["one prompt", "small engine", "one eval prompt, a group a mini-batch, offload", "inference and rollout share"],
)
def test_batches_need_not_divide_by_anything(overrides: list[str], tmp_path: Path) -> None:
    result = train(tmp_path / "run", 3, *SETTINGS, *overrides)
    assert [row["step"] for row in result.metrics] == [1, 2]
    prompts = 1 if "train.num_prompts_per_step=1" in overrides else 7
    assert result.rollouts(2).num_sequences == prompts * 8
    profiles = sorted(path.name for path in tmp_path.glob("run/profile/*.txt"))
    assert profiles == [f"step_2.rank_{rank}.txt" for rank in range(3)] * ("debug.profile_step=2" in overrides)
