"""Invariants that a whole world shows, on the fake engine; test_placement_equality has the real one."""

import json
from pathlib import Path

import pytest

from tests.launcher import Result, finish, start, train

pytestmark = pytest.mark.timeout(150)
SETTINGS = ["rollout.engine=fake", "train.num_steps=2", "train.num_prompts_per_step=7", "eval.interval=0"]
SETTINGS += ["rollout.max_num_seqs=16", "debug.save_rollouts=true"]
DISAGGREGATED = ["placement.rollout=0-1", "placement.actor=2"]


def run_with(folder: Path, what: str, rank: int, num_ranks: int, *overrides: str) -> Result:
    script = ["tests/e2e/broken_train.py", what, str(rank)]
    run = [f"run.dir={folder.parent}", f"run.name={folder.name}", *SETTINGS, *overrides]
    process = start(f"--nproc-per-node={num_ranks}", *script, *run)
    output = finish(process, 120)
    assert process.returncode == 0, output[-4000:]
    return Result(output, folder)


def test_timing_never_changes_the_data(tmp_path: Path) -> None:
    """A slow engine samples fewer of the groups, and nothing else changes."""
    even = train(tmp_path / "even", 3, *SETTINGS, *DISAGGREGATED)
    slow = run_with(tmp_path / "slow", "slow engine", 0, 3, *DISAGGREGATED)
    alone = train(tmp_path / "alone", 1, *SETTINGS)
    for step in (1, 2):
        expected = even.rollouts(step)
        for other in (slow, alone):
            got = other.rollouts(step)
            assert got.tokens.tolist() == expected.tokens.tolist()
            assert got.group_ids.tolist() == expected.group_ids.tolist()
            assert got.rewards.tolist() == expected.rewards.tolist()


def test_version_on_every_token(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 2, *SETTINGS, "placement.rollout=0", "placement.actor=1")
    for step in (1, 2):
        batch = result.rollouts(step)
        assert batch.versions[batch.response_mask].unique().tolist() == [step]
        assert batch.versions[~batch.response_mask].unique().tolist() == [-1]


@pytest.mark.parametrize(
    ("old_logprobs", "stage"), [("auto", "update"), pytest.param("always", "logprobs", marks=pytest.mark.slow)]
)
def test_engine_logprobs_are_data_not_truth(old_logprobs: str, stage: str, tmp_path: Path) -> None:
    """The fake engine's logprobs are not the learner's; with a limit on the mismatch, nothing is learnt from them,
    whether the learner's come from a pass of their own or from the update's own forward."""
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
