"""After an exception inside an engine its unfinished groups are sampled again, and nothing else changes."""

import re
from pathlib import Path

import pytest

from rl.report.events import read_events
from tests.e2e.test_proven_weights import make_qwen3
from tests.launcher import Result, finish, start, train

pytestmark = [pytest.mark.alone, pytest.mark.timeout(200)]
SETTINGS = [
    "train.num_steps=2",
    "train.num_prompts_per_step=6",
    "eval.interval=0",
    "debug.save_rollouts=true",
    "rollout.deterministic=true",
    "rollout.max_num_seqs=24",  # three groups, so that no engine takes all of them
]
FAKE = "rollout.engine=fake"
PROMISE = "It is being rebuilt, and its unfinished groups"


def broken(
    folder: Path, num_ranks: int, what: str, rank: int, *overrides: str, restarts: bool = False
) -> tuple[int, Result]:
    run = [f"run.dir={folder.parent}", f"run.name={folder.name}", *SETTINGS, *overrides]
    program = ["tests/e2e/broken_train.py", what, str(rank)]
    process = start(f"--nproc-per-node={num_ranks}", *program, *run, restarts=restarts)
    output = finish(process, 150)
    return process.returncode, Result(output, folder)


def assert_same(one: Result, other: Result) -> None:
    assert len(one.metrics) == len(other.metrics)
    for step in range(1, len(one.metrics) + 1):
        first, second = one.rollouts(step), other.rollouts(step)
        assert first.tokens.tolist() == second.tokens.tolist()
        assert first.versions.tolist() == second.versions.tolist()
        assert first.rollout_logprobs.tolist() == pytest.approx(second.rollout_logprobs.tolist(), abs=1e-5)
    losses = [[row["loss/policy"] for row in result.metrics] for result in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(
    ("num_ranks", "rank", "overrides"),
    [
        (2, 1, [FAKE]),
        pytest.param(1, 0, [FAKE], marks=pytest.mark.slow),
        pytest.param(3, 0, [FAKE, "placement.rollout=0-1", "placement.actor=2"], marks=pytest.mark.slow),
        pytest.param(2, 0, [FAKE, "actor.offload=rollout"], marks=pytest.mark.slow),
        pytest.param(2, 1, [], marks=pytest.mark.slow),  # vLLM
        pytest.param(2, -1, ["rollout.tensor_parallel_size=2"], marks=pytest.mark.slow),  # both ranks of one engine
    ],
    ids=["two engines", "one engine", "disaggregated", "offload", "vllm", "vllm, tensor parallel"],
)
def test_an_engine_is_rebuilt(num_ranks: int, rank: int, overrides: list[str], tmp_path: Path) -> None:
    """Tokens and losses are the same as without the exception: nothing is lost and nothing is counted twice."""
    code, result = broken(tmp_path / "broken", num_ranks, "engine, once", rank, *overrides)
    assert code == 0, result.output
    assert result.output.count(PROMISE) == 1, result.output
    (event,) = (event for event in read_events(result.folder) if event.kind == "warning")
    lead, name = max(rank, 0), "fake" if FAKE in overrides else r"vllm [\d.]+"
    text = rf"engine {lead} \({name}\) of rank {lead} failed: \w*Error: .*planted.*\. It was rebuilt in \d+ s, and its "
    assert re.fullmatch(text + r"unfinished groups \(\d\) are sampled again", event.text), event
    assert event.step in (1, 2)
    assert_same(result, train(tmp_path / "whole", num_ranks, *SETTINGS, *overrides))


AHEAD = [
    "rollout.ahead=1",
    "train.num_steps=4",
    "placement.actor=0",
]  # version 3 is sampled from while the actors train the next one


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_samples_ahead_gets_its_version_from_another_one(tp: int, tmp_path: Path) -> None:
    """The actor has changed its weights since then, so logprobs and loss would differ if it published again."""
    num_ranks, rank = 2 * tp + 1, tp + 1
    overrides = [*AHEAD, f"placement.rollout=1-{2 * tp}", f"rollout.tensor_parallel_size={tp}"]
    code, result = broken(tmp_path / "broken", num_ranks, "last engine", rank, *overrides)
    assert code == 0, result.output
    assert result.output.count(PROMISE) == 1, result.output
    came = f"oneworld: the rebuilt engine of rank {rank} (engine 1) got version 3 of the weights from rank 1 (engine 0)"
    assert result.output.count(came) == 1, result.output
    assert all(row["optim/grad_norm"] > 0 for row in result.metrics), "every version differs from the one before"
    assert_same(result, train(tmp_path / "whole", num_ranks, *SETTINGS, *overrides))


@pytest.mark.slow
def test_the_only_engine_that_samples_ahead_cannot_be_rebuilt_so_the_world_restarts(tmp_path: Path) -> None:
    overrides = [*AHEAD, "placement.rollout=1", "checkpoint.save_interval=1"]
    code, result = broken(tmp_path / "broken", 2, "last engine", 1, *overrides, restarts=True)
    assert code == 0, result.output
    assert PROMISE not in result.output
    place, cause = (
        "stage rollout, step 3",
        "the engine of rank 1 failed (ZeroDivisionError: planted), and it is the only",
    )
    assert result.output.count(f"{place}: DonationError: {cause} engine") == 1, result.output
    assert "resumes after step " in result.output
    assert_same(result, train(tmp_path / "whole", 2, *SETTINGS, *overrides))


@pytest.mark.slow
def test_a_second_exception_in_a_row_ends_the_rank(tmp_path: Path) -> None:
    code, result = broken(tmp_path / "run", 2, "engine, twice", 1, FAKE)
    assert code != 0
    assert result.output.count(PROMISE) == 1
    assert "oneworld: rank 1 (rollout,actor) on " in result.output
    assert re.search("stage rollout, step [12]: ZeroDivisionError: planted", result.output)  # rank 0 may do step 1


@pytest.mark.slow
def test_an_exception_on_one_rank_of_a_tensor_parallel_engine_ends_the_world(tmp_path: Path) -> None:
    """The other rank is in a step that cannot end."""
    code, result = broken(tmp_path / "run", 2, "engine, once", 1, "rollout.tensor_parallel_size=2")
    assert code != 0
    assert PROMISE not in result.output
    assert "ZeroDivisionError: planted" in result.output


@pytest.mark.slow
def test_an_engine_that_cannot_be_read_back_is_rebuilt(tmp_path: Path) -> None:
    """Its layers are packed, so its weights go through vLLM's loader again, and it is probed."""
    options = [f"model.path={make_qwen3(tmp_path, tied=False)}", "sync.probe_interval=0"]
    code, result = broken(tmp_path / "run", 1, "engine, once + packed layers", 0, *options)
    assert code == 0, result.output
    assert "computes with a packed copy of its weight, so what it holds cannot be read back exactly" in result.output
    assert result.output.count(PROMISE) == 1
    assert max(row["policy/mismatch_kl"] for row in result.metrics) < 1e-6


@pytest.mark.slow
def test_an_untested_vllm_samples_the_same_and_says_so_once(tmp_path: Path) -> None:
    code, result = broken(tmp_path / "untested", 2, "untested vLLM", 0)
    assert code == 0, result.output
    assert result.output.count("is outside the tested versions") == 1, result.output
    assert_same(result, train(tmp_path / "whole", 2, *SETTINGS))
