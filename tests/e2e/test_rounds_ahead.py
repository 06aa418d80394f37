"""Runs with rollout.ahead=1: engines sample the next round while the actors train.

They are compared with a plain single-process reference (tests/reference_rounds.py), which samples and trains in turns.
The runs use the fake engine, unless a test says otherwise.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.reward_functions import varied
from tests.launcher import Result
from tests.reference_rounds import Reference, Setting, Step, fake_engine, make_model
from tests.rounds_runs import (
    FUNCTIONS,
    SAVES,
    Run,
    assert_same_data,
    assert_same_metrics,
    run_forked,
    setting_of,
)

pytestmark = pytest.mark.timeout(330)  # the first test waits for the fixture's runs
LIMITS = (0, 3, 5)  # tokens per round; 0: no limit
DECOUPLED = ["placement.rollout=0", "placement.inference=1", "placement.actor=2-3"]
# Number of ranks, overrides, and what is broken. The inference rank computes the old logprobs of decoupled PPO.
PLACEMENTS: dict[str, Run] = {
    "1 actor, 2 engines": (3, ["placement.rollout=0-1", "placement.actor=2", *SAVES], "slow engine"),
    "2 actors, inference, engine": (4, DECOUPLED, "slow engine"),
}
ALL = [(placement, limit) for placement in PLACEMENTS for limit in LIMITS]
DYNAMIC = [f"reward.function={FUNCTIONS}:mostly_equal"]
ELSEWHERE: dict[str, Run] = {
    "same ranks": (3, ["placement.rollout=0-1", "placement.actor=2"], "slow engine"),
    "engine, 2 actors": (3, ["placement.rollout=0", "placement.actor=1-2"], "slow engine"),
    "2 actors, 2 engines": (4, ["placement.actor=0-1", "placement.rollout=2-3"], ""),
    "engine, actor": (2, ["placement.rollout=0", "placement.actor=1"], ""),
}
RESUMED = {"same ranks": 2, "engine, 2 actors": 4}  # by placement, the step after which the run is forked


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def setting_in(placement: str, limit: int, model: Path) -> Setting:
    setting = setting_of(limit, model, ahead=1)
    return replace(setting, old_logprobs="always") if "inference" in placement else setting


def fork_after(step: int, place: str, whole: Result, setting: Setting) -> Run:
    """Return a run that forks another one after this step, in this placement."""
    num_ranks, overrides, broken = ELSEWHERE[place]
    resume = f"checkpoint.resume={whole.folder / 'checkpoints' / f'step_{step}'}"
    return num_ranks, [*setting.overrides, *overrides, resume], broken


@pytest.fixture(scope="module")
def references(model: Path) -> dict[tuple[str, int], list[Step]]:
    """What the definition of rounds says."""
    return {key: Reference(setting_in(*key, model), fake_engine, varied).run() for key in ALL}


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Result]:
    """A run for each placement and limit. The first placement saves every step."""
    folders = {key: tmp_path_factory.mktemp("runs") / "run" for key in ALL}
    described = {}
    for (placement, limit), folder in folders.items():
        num_ranks, overrides, broken = PLACEMENTS[placement]
        described[folder] = (num_ranks, [*setting_in(placement, limit, model).overrides, *overrides], broken)
    results = run_forked(described)
    return {key: results[folder] for key, folder in folders.items()}


def test_the_reference_has_carried_queued_and_late_groups(references: dict[tuple[str, int], list[Step]]) -> None:
    """Otherwise the comparisons with it would show little."""
    for (placement, limit), steps in references.items():
        assert {max(step.lags) for step in steps[1:]} == {1} if not limit else max(max(step.lags) for step in steps) > 2
        assert bool(limit) == any(step.num_carried for step in steps), placement
        assert bool(limit) == any(step.num_queued for step in steps), placement


@pytest.mark.parametrize(("placement", "limit"), ALL)
def test_a_run_equals_the_reference(
    placement: str,
    limit: int,
    runs: dict[tuple[str, int], Result],
    references: dict[tuple[str, int], list[Step]],
    model: Path,
) -> None:
    """Groups, tokens, versions, lags, rewards and losses, whoever samples and trains, and however slowly."""
    result, steps, setting = runs[placement, limit], references[placement, limit], setting_in(placement, limit, model)
    for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
        assert_same_data(result.rollouts(number), step, setting)
        assert_same_metrics(row, step, setting)
