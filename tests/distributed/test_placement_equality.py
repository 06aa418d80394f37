"""Placement equality: 4 ranks, real vLLM, float32; who does what must not change a token, a reward or a loss."""

from pathlib import Path

import pytest
import torch

from tests.e2e.test_phases import Command, run_all
from tests.launcher import Result, train
from tests.rounds_runs import REAL, learnt

NUM_STEPS = 3
# 10 prompts for 4 ranks, 2 optimizer steps per batch, and small micro-batches: nothing divides evenly.
SETTINGS = (
    f"train.num_steps={NUM_STEPS}",
    "train.num_prompts_per_step=10",
    "rollout.num_samples_per_prompt=4",
    "algo.num_mini_batches=2",
    "algo.kl_coef=0.05",
    "actor.lr=3e-4",
    "actor.max_tokens_per_micro_batch=100",
    "inference.max_tokens_per_micro_batch=120",
    "eval.interval=3",
    "eval.num_prompts=30",
    "debug.save_rollouts=true",
)
PLACEMENTS = {
    "rollout 2, inference 1, actor 1": ("placement.rollout=0-1", "placement.inference=2", "placement.actor=3"),
    "rollout 2, actor 2": ("placement.rollout=0-1", "placement.actor=2-3"),
    "tensor parallel 2, 2 replicas": ("rollout.tensor_parallel_size=2", "actor.num_replicas=2"),
    "hybrid, inference 2": ("placement.inference=0-1", "placement.rollout=2", "placement.actor,rollout=3"),
    "hybrid, 2 actors without engines": ("placement.rollout=0", "placement.actor,rollout=1", "placement.actor=2-3"),
}
SLOW = tuple(name for name in PLACEMENTS if name != "rollout 2, inference 1, actor 1")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """The collocated run, and those in the placements that are not slow, forked from one process that imports vLLM."""
    places = {"collocated": ()} | {name: place for name, place in PLACEMENTS.items() if name not in SLOW}
    folder = tmp_path_factory.mktemp("runs")
    commands = [Command(folder / f"run_{n}", 4, [*SETTINGS, *place]) for n, place in enumerate(places.values())]
    outputs = run_all(commands, REAL)
    return {name: Result(output, each.folder) for name, each, output in zip(places, commands, outputs, strict=True)}


@pytest.fixture(scope="module")
def collocated(quick: dict[str, Result]) -> Result:
    return quick["collocated"]


def assert_engines_match_learner(result: Result) -> None:
    """After every sync the engines' logprobs are those of the learner's weights."""
    for step in range(1, NUM_STEPS + 1):
        batch = result.rollouts(step)
        mask = batch.loss_mask
        assert batch.old_logprobs is not None
        torch.testing.assert_close(batch.rollout_logprobs[mask], batch.old_logprobs[mask], atol=1e-4, rtol=0)
        assert batch.versions[mask].unique().tolist() == [step]
        assert batch.versions[~mask].unique().tolist() == [-1]


@pytest.mark.timeout(330)  # waits for the fixture's runs
def test_collocated_engines_match_the_learner(collocated: Result) -> None:
    assert_engines_match_learner(collocated)
    assert "engine vllm" in collocated.output


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PLACEMENTS],
)
def test_placement_equality(name: str, quick: dict[str, Result], tmp_path: Path) -> None:
    assert_same_run(quick.get(name) or train(tmp_path / "run", 4, *SETTINGS, *PLACEMENTS[name]), quick["collocated"])


def assert_same_run(other: Result, collocated: Result) -> None:
    assert_engines_match_learner(other)
    for step in range(1, NUM_STEPS + 1):
        expected, got = collocated.rollouts(step), other.rollouts(step)
        assert got.num_sequences == 40
        assert got.tokens.tolist() == expected.tokens.tolist(), f"step {step} sampled other tokens"
        assert got.rewards.tolist() == expected.rewards.tolist()
        assert got.group_ids.tolist() == expected.group_ids.tolist()
    for expected_row, row in zip(collocated.metrics, other.metrics, strict=True):
        for metric in ("reward/mean", "loss/policy", "loss/kl", "policy/entropy", "optim/grad_norm"):
            assert row[metric] == pytest.approx(expected_row[metric], abs=1e-5), (metric, row["step"])
    assert other.metrics[-1]["eval/accuracy"] == collocated.metrics[-1]["eval/accuracy"]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_adapters_have_placement_equality(tmp_path: Path) -> None:
    """Adapters of rank 2 on 4 actors, so that two hold no row of A, then on one and on two replicas of 2. Engines and
    inference ranks get merged weights, and the reference is inside the policy or on an inference rank."""
    lora = (*SETTINGS, "model.lora.rank=2", "model.lora.alpha=8", "actor.lr=3e-3")
    collocated = train(tmp_path / "collocated", 4, *lora)
    assert_engines_match_learner(collocated)
    assert collocated.metrics[-1]["loss/kl"] > 1e-6, "the adapters have not moved"
    for number, name in enumerate(("rollout 2, inference 1, actor 1", "tensor parallel 2, 2 replicas")):
        assert_same_run(train(tmp_path / str(number), 4, *lora, *PLACEMENTS[name]), collocated)


# A critic, self-certainty as a reward, a reference that rewards pay for, a batch that grows, and sampling from a cut
# distribution, all at once.
ALGORITHM = (
    *("train.num_steps=2", "train.num_prompts_per_step=5", "rollout.num_samples_per_prompt=4", "actor.lr=3e-4"),
    *("algo.advantage=gae", "algo.lam=0.9", "critic.lr=1e-3", "algo.num_mini_batches=2", "algo.dynamic_sampling=true"),
    *("algo.certainty_coef=0.1", "algo.kl_coef=0.05", "algo.kl_place=reward", "rollout.top_p=0.8", "rollout.top_k=5"),
    *("algo.correction=token", "inference.max_tokens_per_micro_batch=60", "eval.interval=0"),
    "debug.save_rollouts=true",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_algorithm_with_everything_has_placement_equality(tmp_path: Path) -> None:
    """2 ranks that do it all, and an actor with an engine and inference ranks apart: who judges, who scores and who
    decides how many prompts to draw must not change a token, a certainty or a loss."""
    collocated = train(tmp_path / "collocated", 2, *ALGORITHM)
    apart = ("placement.rollout=0", "placement.inference=1", "placement.actor=2")
    other = train(tmp_path / "apart", 3, *ALGORITHM, *apart)
    for step in (1, 2):
        expected, got = collocated.rollouts(step), other.rollouts(step)
        assert got.tokens.tolist() == expected.tokens.tolist(), f"step {step} sampled other tokens"
        assert got.rewards.tolist() == expected.rewards.tolist()
        assert got.group_ids.tolist() == expected.group_ids.tolist()
        for name in ("certainty", "values", "returns", "advantages", "old_logprobs", "ref_logprobs"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), atol=1e-4, rtol=1e-4, msg=name)
        mask = got.loss_mask
        assert got.certainty is not None and got.values is not None and got.old_logprobs is not None
        assert got.certainty[mask].min() > 0 and not got.certainty[~mask].any()
        assert got.values.any() == (step > 1)
        # What was cut off was given to the tokens that are left, so the engine's logprobs are above the learner's.
        kept = torch.exp(got.old_logprobs[mask] - got.rollout_logprobs[mask])
        assert kept.max() < 1.001 and 0.75 < kept.min() < 0.99
        groups = got.rewards.view(-1, 4)
        assert (groups.amax(1) > groups.amin(1)).all()
        assert other.metrics[step - 1]["policy/correction_mean"] == pytest.approx(kept.mean().item(), abs=1e-3)
    for expected_row, row in zip(collocated.metrics, other.metrics, strict=True):
        assert learnt(row) == pytest.approx(learnt(expected_row), rel=1e-4, abs=1e-5), row["step"]
        assert row["rollout/sampled_prompts"] >= row["rollout/informative_prompts"] >= 5
        assert 0.8 < row["policy/correction_mean"] < 0.999
