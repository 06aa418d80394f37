"""Runs with actor.overlap: equal to serial ones, whatever happens while a batch is half trained on.

The runs use the fake engine, whose tokens do not depend on the weights, unless a test says otherwise.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.e2e.test_rounds import FAKE, REAL, Run, learnt, run_forked
from tests.independent_merge import merge_shards
from tests.launcher import Result, command_of, finish, start, train, until
from tests.reference_rounds import TINY, Setting, make_model, prompts_of
from tools.replay import main as replay

pytestmark = pytest.mark.timeout(200)  # the first test waits for the fixture's runs
OVERLAP = "actor.overlap=true"
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 3, 8, 3, 40
# An engine samples two groups at once, unless a placement says otherwise. A part has two groups, in several
# micro-batches. AdamW turns rounding of tiny gradients into large differences, which a large epsilon prevents.
COMMON = [
    *("actor.max_tokens_per_micro_batch=30", "inference.max_tokens_per_micro_batch=64", "actor.eps=1e-3"),
    *("rollout.deterministic=true", "rollout.max_num_seqs=6", "algo.clip_low=0.2"),
]
KL = ["algo.kl_coef=0.1", "algo.entropy_coef=0.01", "algo.mask_truncated=true", "algo.correction=token"]
ONE = ["placement.rollout=0", "placement.actor=1"]
TWO = ["placement.rollout=0", "placement.actor=1-2"]
WITH_INFERENCE = ["placement.rollout=0", "placement.inference=1", "placement.actor=2-3"]
TWO_INFERENCE = ["placement.rollout=0", "placement.inference=1-2", "placement.actor=3-4"]
# Placements of the first test: number of ranks, and overrides.
PLACES = {"1 + 1": (2, [*ONE, "rollout.max_num_seqs=24"]), "2 + 1": (3, TWO), "2 + 1 + 1": (4, WITH_INFERENCE)}
HELD = "2 + 1"
# Further settings: number of ranks, and overrides.
SETTINGS: dict[str, tuple[int, list[str]]] = {
    "KL in the reward": (
        4,
        [
            *(*WITH_INFERENCE, "algo.advantage=dr_grpo", "algo.loss_norm=constant", "algo.overlong_tokens=4"),
            *("algo.kl_coef=0.1", "algo.kl_place=reward", "algo.kl_estimator=k1"),
        ],
    ),
    "local KL in the reward": (
        3,
        [
            *(*TWO, "algo.advantage=rloo", "algo.loss_norm=sequence"),
            *("algo.kl_coef=0.1", "algo.kl_place=reward", "algo.kl_estimator=k2", "algo.kl_target=0.05"),
        ],
    ),
    "full KL, replicas": (3, [*TWO, "actor.num_replicas=2", "algo.kl_coef=0.1", "algo.kl_estimator=full"]),
    "certainty, GSPO, on the host": (
        3,
        [*TWO, "algo.certainty_coef=0.1", "algo.loss=gspo", "actor.offload=always", "algo.old_logprobs=always"],
    ),
    "an actor without groups": (4, ["placement.rollout=0", "placement.actor=1-3", "train.num_prompts_per_step=2"]),
}


def shape(model: Path) -> list[str]:
    setting = Setting(NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, max_new_tokens=MAX_TOKENS, model=model, old_logprobs="auto")
    return [*setting.overrides, *COMMON]


def weights_of(result: Result, step: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    return merge_shards(sorted((result.folder / "checkpoints" / f"step_{step}").glob("model-*.safetensors")))


def assert_equal(overlapped: Result, serial: Result, tolerance: float = 1e-5) -> None:
    """All metrics of all steps, the data that was trained on, and the weights at the end."""
    assert [row["step"] for row in overlapped.metrics] == list(range(1, NUM_STEPS + 1))
    for row, wanted in zip(overlapped.metrics, serial.metrics, strict=True):
        assert learnt(row) == pytest.approx(learnt(wanted), rel=tolerance, abs=tolerance)
        step = int(row["step"])
        batch, expected = overlapped.rollouts(step).tensors(), serial.rollouts(step).tensors()
        assert batch.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(batch[name], tensor, atol=tolerance, rtol=tolerance, msg=name)
    weights, expected = weights_of(overlapped), weights_of(serial)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=tolerance, rtol=0, msg=name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


FUNCTIONS = """
import os, time, zlib
from pathlib import Path
from rl.algo.losses import clipped_ratio

FOLDER, LAST, AWAITED = Path({folder!r}), {last!r}, {awaited!r}
NUM_CALLS = 0


def varied(prompt, response, row):
    while prompt == LAST and not (FOLDER / AWAITED).exists():
        time.sleep(0.01)
    return zlib.crc32(f"{{response}}/{{row['answer']}}".encode()) % 5 / 4


def traced(new_logprobs, old_logprobs, advantages, clip_low, clip_high):
    global NUM_CALLS
    NUM_CALLS += 1
    (FOLDER / f"forward {{NUM_CALLS}}").touch()
    with open(FOLDER / "trace", "a") as trace:
        trace.write(f"{{os.getpid()}} {{time.time()}}\\n")
    return clipped_ratio(new_logprobs, old_logprobs, advantages, clip_low, clip_high)
"""


def held_functions(folder: Path, model: Path, step: int, awaited: str) -> list[str]:
    """Write a reward function like `varied`, which scores the last group of a step when the awaited file exists, and a
    loss that leaves a trace: a file for each forward pass, and a line with process and time."""
    setting = Setting(NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, max_new_tokens=MAX_TOKENS, model=model)
    texts = [prompt.text for prompt in prompts_of(setting, step * NUM_PROMPTS)]
    assert texts.count(texts[-1]) == 1
    folder.mkdir(exist_ok=True)
    file = folder / "functions.py"
    file.write_text(FUNCTIONS.format(folder=str(folder), last=texts[-1], awaited=awaited))
    return [f"reward.function={file}:varied", f"algo.loss={file}:traced"]


def run_all(folder: Path, described: dict[str, Run]) -> dict[str, Result]:
    results = run_forked({folder / name: run for name, run in described.items()})
    return {name: results[folder / name] for name in described}


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Rank 0 has the engine. In the placement HELD, the last group of the first step waits for a second forward pass
    of an actor, which follows the backward pass of its first one."""
    folder, common = tmp_path_factory.mktemp("overlap"), shape(model)
    held = [*held_functions(folder / "trace", model, 1, awaited="forward 2"), "reward.timeout_s=60"]
    described: dict[str, Run] = {"serial": (2, [*common, *KL, *ONE], "")}
    for place, (num_ranks, overrides) in PLACES.items():
        functions = held if place == HELD else []
        described[place] = (num_ranks, [*common, *KL, *overrides, *functions, OVERLAP], "slow engine")
    waiting = ["algo.advantage=reinforce_pp", "train.num_steps=1"]
    described["whole batch"] = (3, [*common, *TWO, *waiting, OVERLAP], "")
    return run_all(folder, described)


@pytest.mark.parametrize("place", PLACES)
def test_an_overlapped_run_equals_a_serial_one(place: str, runs: dict[str, Result]) -> None:
    assert_equal(runs[place], runs["serial"])
    assert all(0 < row["perf/overlap"] < 1 for row in runs[place].metrics), "nothing was trained on early"


def test_a_step_of_an_overlapped_run_is_replayed(runs: dict[str, Result]) -> None:
    assert replay([str(runs["2 + 1"].folder), "--step", "1"]) == 0


def test_actors_train_before_the_last_group_is_scored(runs: dict[str, Result]) -> None:
    """Otherwise its reward function would wait in vain."""
    assert [row["reward/timeouts"] for row in runs[HELD].metrics] == [0] * NUM_STEPS


@pytest.mark.slow
def test_actors_of_a_serial_run_do_not(model: Path, tmp_path: Path) -> None:
    functions = held_functions(tmp_path / "trace", model, 1, awaited="forward 2")
    overrides = [*shape(model), *TWO, *functions, "reward.timeout_s=0.5", "train.num_steps=1"]
    (row,) = run_all(tmp_path, {"serial": (3, overrides, "")})["serial"].metrics
    assert (row["reward/timeouts"], "perf/overlap" in row) == (NUM_SAMPLES, False)


def test_an_update_that_needs_the_whole_batch_waits_and_says_so(runs: dict[str, Result]) -> None:
    (row,), output = runs["whole batch"].metrics, runs["whole batch"].output
    assert row["optim/grad_norm"] > 0
    assert "perf/overlap" not in row
    said = "every update waits for its whole batch, because algo.advantage=reinforce_pp standardizes the advantages"
    assert output.count(said) == 1, "the leader says it, in this run only"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_fails_while_a_batch_is_half_trained_on(model: Path, runs: dict[str, Result], tmp_path: Path) -> None:
    """The new engine gets the same version again, between two parts and between two pieces of work of the inference
    ranks."""
    trace = tmp_path / "trace"
    functions = held_functions(trace, model, NUM_STEPS + 1, awaited="nothing, since there is no such step")
    broken = f"engine, once there is {trace / 'forward 1'}"
    overrides = [*shape(model), *KL, *TWO_INFERENCE, *functions, OVERLAP, "rollout.max_num_seqs=24"]
    described: dict[str, Run] = {"run": (5, overrides, broken)}
    result = run_all(tmp_path, described)["run"]
    assert "will be sampled again" in result.output
    assert_equal(result, runs["serial"])


def ranks_of(launcher: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher).children() if "train.py" in command_of(child)]


def launch(folder: Path, num_ranks: int, overrides: Sequence[str]) -> Any:
    arguments = [f"run.dir={folder}", "run.name=run", FAKE, "eval.interval=0", "debug.save_rollouts=true"]
    return start(f"--nproc-per-node={num_ranks}", "train.py", *arguments, *overrides)


def has_passes(trace: Path, since: float) -> bool:
    """Return whether an actor has begun a forward pass since this time. It executes no order before its end."""
    return any(float(line.split()[1]) > since for line in trace.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_actors", [2, 4])
def test_a_save_and_a_stop_while_a_batch_is_half_trained_on(
    model: Path, runs: dict[str, Result], tmp_path: Path, num_actors: int
) -> None:
    """The checkpoint holds the step before, exactly: a fork and the resumed run equal an undisturbed one."""
    functions, serial = held_functions(tmp_path, model, 2, awaited="go"), runs["serial"]
    # Each of two replicas holds the sum of its own gradients until the last part. If it has two shards, its weights
    # stay gathered, and the ranks that write a checkpoint belong to different replicas.
    num_ranks, place = num_actors + 1, ["placement.rollout=0", "placement.actor=rest", "actor.num_replicas=2"]
    overrides = [*shape(model), *KL, *place, *functions, OVERLAP, "reward.timeout_s=100"]
    process = launch(tmp_path, num_ranks, overrides)
    metrics, committed = tmp_path / "run/metrics.jsonl", tmp_path / "run/checkpoints/step_1/COMMITTED"
    until(lambda: metrics.exists() and '"step": 1,' in metrics.read_text(), "step 1 ends")
    until(lambda: has_passes(tmp_path / "trace", metrics.stat().st_mtime), "step 2 is half trained on")
    os.kill(ranks_of(process.pid)[2].pid, signal.SIGUSR1)
    until(committed.exists, "step 1 is saved")
    assert '"step": 2,' not in metrics.read_text()
    process.send_signal(signal.SIGTERM)
    output = finish(process, 60)
    assert "step 1 is saved" in output, output[-3000:]
    (tmp_path / "go").touch()
    fork = tmp_path / "fork"
    saved = tmp_path / "run/checkpoints/step_1"
    forked = run_forked({fork: (num_ranks, [*overrides, f"checkpoint.resume={saved}"], "")})[fork]
    for row, wanted in zip(forked.metrics, serial.metrics[1:], strict=True):
        assert learnt(row) == pytest.approx(learnt(wanted), rel=1e-5, abs=1e-5)
    resumed = launch(tmp_path, num_ranks, overrides)
    output = finish(resumed, 100)
    assert resumed.returncode == 0, output[-3000:]
    assert_equal(Result(output, tmp_path / "run"), serial)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_setting_is_overlapped(model: Path, tmp_path: Path) -> None:
    described: dict[Path, Run] = {}
    for name, (num_ranks, overrides) in SETTINGS.items():
        described[tmp_path / f"{name}, serial"] = (num_ranks, [*shape(model), *overrides], "")
        described[tmp_path / name] = (num_ranks, [*shape(model), *overrides, OVERLAP], "slow engine")
        described[tmp_path / f"{name}, quick"] = (num_ranks, [*shape(model), *overrides, OVERLAP], "")
    results = run_forked(described, timeout_s=500)
    for name in SETTINGS:
        assert_equal(results[tmp_path / name], results[tmp_path / f"{name}, serial"])
        early = [row["perf/overlap"] for row in results[tmp_path / name].metrics]
        assert all(early) or name == "an actor without groups", (name, early)
        # How many parts were trained on early changes no bit.
        assert_equal(results[tmp_path / name], results[tmp_path / f"{name}, quick"], tolerance=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_engines(tmp_path: Path) -> None:
    """Weights that differ would change the tokens of the next step."""
    setting = Setting(NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, max_new_tokens=12, model=TINY, old_logprobs="auto", lr=1e-4)
    described: dict[Path, Run] = {
        tmp_path / str(is_overlapped): (3, [*setting.overrides, *COMMON, *TWO, f"actor.overlap={is_overlapped}"], "")
        for is_overlapped in (False, True)
    }
    results = run_forked(described, REAL, timeout_s=500)
    assert_equal(results[tmp_path / "True"], results[tmp_path / "False"])
    assert any(row["perf/overlap"] > 0 for row in results[tmp_path / "True"].metrics)


@pytest.mark.slow
def test_a_checkpoint_with_groups_in_flight_is_refused(model: Path, tmp_path: Path) -> None:
    rounds = [*shape(model), *TWO, "algo.old_logprobs=rollout", "rollout.max_tokens_per_round=3", "train.num_steps=1"]
    train(tmp_path / "run", 3, FAKE, "eval.interval=0", *rounds)
    process = launch(tmp_path, 3, [*shape(model), *TWO, OVERLAP])
    output = finish(process, 100)
    assert process.returncode != 0
    assert "actor.overlap: got true, but the checkpoint of step 1 holds" in output
    assert "Set actor.overlap=false, or resume from a run without rollout.max_tokens_per_round" in output
