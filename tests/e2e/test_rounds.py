"""Runs whose responses take several rounds, compared with a plain single-process reference (tests/reference_rounds.py).

The runs use the fake engine, unless a test says otherwise.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.environment import activated_environment
from rl.data.batch import Batch
from tests.e2e.reward_functions import varied
from tests.launcher import Result, finish, spawn
from tests.reference_rounds import Reference, Setting, Step, fake_engine, flat, make_model

pytestmark = pytest.mark.timeout(200)  # the first test waits for the fixture's runs
FUNCTIONS = "tests/e2e/reward_functions.py"
COMMON = ["rollout.engine=fake", "eval.interval=0", "debug.save_rollouts=true", f"reward.function={FUNCTIONS}:varied"]
SHAPE = {"num_steps": 6, "num_prompts": 4, "num_samples": 3, "max_new_tokens": 12}
LIMITS = (0, 3, 5)  # tokens per round; 0: no limit
# Number of ranks, overrides, and what is broken.
PLACEMENTS: dict[str, tuple[int, list[str], str]] = {
    "collocated": (2, [], ""),
    "disaggregated": (3, ["placement.rollout=0-1", "placement.actor=2"], "slow engine"),
    "tensor parallel, 2 replicas": (2, ["rollout.tensor_parallel_size=2", "actor.num_replicas=2"], ""),
}


def run_forked(runs: dict[Path, tuple[int, Sequence[str], str]], timeout_s: float = 150) -> dict[Path, Result]:
    """Run train.py for each folder: with this number of ranks, these overrides, and something broken."""
    described = [
        {
            "num_ranks": num_ranks,
            "overrides": [f"run.dir={folder.parent}", f"run.name={folder.name}", *COMMON, *overrides],
            "broken": broken,
        }
        for folder, (num_ranks, overrides, broken) in runs.items()
    ]
    process = spawn([sys.executable, "tests/forked_runs.py", json.dumps(described)], activated_environment())
    output = finish(process, timeout_s)
    assert process.returncode == 0, output[-6000:]
    return {folder: Result(output, folder) for folder in runs}


def learnt(row: dict[str, float]) -> dict[str, float]:
    """Return all metrics of a step but those of time."""
    return {name: value for name, value in row.items() if name.partition("/")[0] not in ("time", "perf")}


def assert_same_data(batch: Batch, step: Step, setting: Setting) -> None:
    """The groups, in the order of the update: tokens, versions, lags, rewards."""
    mask, responses = batch.loss_mask, step.responses
    assert batch.tokens.tolist() == flat(step.sequences)
    assert batch.group_ids.tolist() == [
        place for place in range(setting.num_prompts) for _ in range(setting.num_samples)
    ]
    assert batch.versions[mask].tolist() == flat(response.versions for response in responses)
    assert batch.versions[~mask].unique().tolist() == [-1]
    assert (batch.lags is not None) == bool(setting.max_tokens_per_round)
    if batch.lags is not None:
        assert batch.lags[mask].tolist() == step.lags
        assert not batch.lags[~mask].any()
    assert batch.rewards.tolist() == pytest.approx(step.rewards, abs=1e-7)
    assert batch.truncated.tolist() == [response.is_truncated(setting) for response in responses]
    logprobs = [logprob for response in responses for logprob in response.logprobs]
    assert batch.rollout_logprobs[mask].tolist() == pytest.approx(logprobs, abs=1e-7)
    assert batch.ended is None and batch.noise is None


def assert_same_metrics(row: dict[str, float], step: Step, setting: Setting) -> None:
    assert row["version"] == step.version + 1  # after the update
    assert row["loss/policy"] == pytest.approx(step.loss, abs=1e-6)
    assert row["optim/grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
    assert row["reward/mean"] == pytest.approx(sum(step.rewards) / len(step.rewards), abs=1e-6)
    assert row["rollout/tokens"] == len(step.lags)
    if setting.max_tokens_per_round:
        if "rollout/lag_mean" in row: assert row["rollout/lag_mean"] == pytest.approx(sum(step.lags) / len(step.lags), abs=1e-6)
        assert row["rollout/lag_max"] == max(step.lags)
        assert (row["rollout/carried"], row["rollout/queue"]) == (step.num_carried, step.num_queued)
    else:
        assert not {"rollout/lag_max", "rollout/carried", "rollout/queue"} & row.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def setting_of(limit: int, model: Path) -> Setting:
    return Setting(**SHAPE, max_tokens_per_round=limit, model=model)


@pytest.fixture(scope="module")
def references(model: Path) -> dict[int, list[Step]]:
    """What the definition of rounds says, by the limit of tokens."""
    return {limit: Reference(setting_of(limit, model), fake_engine, varied).run() for limit in LIMITS}


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Result]:
    """A run for each placement and limit."""
    base = tmp_path_factory.mktemp("runs")
    folders = {(name, limit): base / f"{name} {limit}" for name in PLACEMENTS for limit in LIMITS}
    results = run_forked(
        {
            folder: (
                PLACEMENTS[name][0],
                [*setting_of(limit, model).overrides, *PLACEMENTS[name][1]],
                PLACEMENTS[name][2],
            )
            for (name, limit), folder in folders.items()
        }
    )
    return {key: results[folder] for key, folder in folders.items()}


def test_the_reference_has_carried_queued_and_late_groups(references: dict[int, list[Step]]) -> None:
    """Otherwise the comparisons with it would show little."""
    orders = {limit: [group.number for step in steps for group in step.groups] for limit, steps in references.items()}
    assert orders[0] == list(range(24))
    assert len({tuple(order) for order in orders.values()}) == 3
    for limit in LIMITS[1:]:
        assert max(max(step.lags) for step in references[limit]) >= 2
        assert any(step.num_queued for step in references[limit])
        assert any(len(set(response.versions)) > 2 for step in references[limit] for response in step.responses)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_equals_the_reference(
    placement: str, limit: int, runs: dict[tuple[str, int], Result], references: dict[int, list[Step]], model: Path
) -> None:
    """Groups, tokens, versions, lags, rewards and losses, whoever samples and trains, and however slowly."""
    result, steps, setting = runs[placement, limit], references[limit], setting_of(limit, model)
    for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
        assert_same_data(result.rollouts(number), step, setting)
        assert_same_metrics(row, step, setting)
