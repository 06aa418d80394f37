"""Start runs of train.py, and compare them with the reference of rounds (tests/reference_rounds.py)."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from rl.data.batch import Batch
from tests.launcher import Result, command_of, run_forked_runs
from tests.reference_rounds import Setting, Step, flat, prompts_of

FUNCTIONS = "tests/e2e/reward_functions.py"
FAKE, REAL = "rollout.engine=fake", "rollout.engine=vllm"
COMMON = ["eval.interval=0", "debug.save_rollouts=true", f"reward.function={FUNCTIONS}:varied"]
SAVES = ["checkpoint.save_interval=1", "checkpoint.keep_last=99"]
SHAPE = {"num_steps": 6, "num_prompts": 4, "num_samples": 3, "max_new_tokens": 12}
REAL_SHAPE = {"num_steps": 4, "num_prompts": 4, "num_samples": 4, "max_new_tokens": 6, "temperature": 2.0}
REAL_SHAPE |= {"lr": 3e-4, "clip_low": 0.2}
Name = TypeVar("Name")
Run = tuple[int, Sequence[str], str]  # number of ranks, overrides, and what is broken


def run_forked(runs: dict[Path, Run], engine: str = FAKE, timeout_s: float = 300) -> dict[Path, Result]:
    """Run train.py for each folder."""
    described = [
        {
            "num_ranks": num_ranks,
            "overrides": [f"run.dir={folder.parent}", f"run.name={folder.name}", engine, *COMMON, *overrides],
            "broken": broken,
        }
        for folder, (num_ranks, overrides, broken) in runs.items()
    ]
    output = run_forked_runs(described, timeout_s)
    return {folder: Result(output, folder) for folder in runs}


def run_named(runs: dict[Name, Run], folder: Path, timeout_s: float = 300) -> dict[Name, Result]:
    """Run train.py for each name, in folders of their own."""
    folders = {name: folder / str(number) / "run" for number, name in enumerate(runs)}
    results = run_forked({folders[name]: run for name, run in runs.items()}, timeout_s=timeout_s)
    return {name: results[folders[name]] for name in runs}


def learnt(row: dict[str, Any]) -> dict[str, float]:
    """Return all metrics of a step but those of time, machines and engines. Each bin of a histogram has a name."""
    others = ("rollout/kv_use", "rollout/kv_use_max", "rollout/prefix_hit_rate", "health/waiting")
    kinds = ("at", "time", "perf", "host", "gpu")
    kept = {name: value for name, value in row.items() if name.partition("/")[0] not in kinds and name not in others}
    edges, counts = kept.pop("rollout/lengths", {"edges": [], "counts": []}).values()
    return kept | {f"rollout/lengths/{edge}": count for edge, count in zip(edges[1:], counts)}


def assert_same_data(batch: Batch, step: Step, setting: Setting, tolerance: float = 1e-6) -> None:
    """The groups, in the order of the update: tokens, versions, lags, rewards, and logprobs within the tolerance."""
    mask, responses = batch.loss_mask, step.responses
    assert batch.tokens.tolist() == flat(step.sequences)
    assert batch.group_ids.tolist() == [
        place for place in range(setting.num_prompts) for _ in range(setting.num_samples)
    ]
    assert batch.versions[mask].tolist() == flat(response.versions for response in responses)
    assert batch.versions[~mask].unique().tolist() == [-1]
    assert (batch.lags is not None) == setting.is_stale
    if batch.lags is not None:
        assert batch.lags[mask].tolist() == step.lags
        assert not batch.lags[~mask].any()
    assert batch.rewards.tolist() == pytest.approx(step.rewards, abs=1e-7)
    assert batch.truncated.tolist() == [response.is_truncated(setting) for response in responses]
    logprobs = [logprob for response in responses for logprob in response.logprobs]
    assert batch.rollout_logprobs[mask].tolist() == pytest.approx(logprobs, abs=tolerance)
    assert batch.ended is None and batch.noise is None


def assert_same_metrics(row: dict[str, float], step: Step, setting: Setting, tolerance: float = 1e-6) -> None:
    assert row["version"] == step.version + 1  # after the update
    assert row["loss/policy"] == pytest.approx(step.loss, abs=tolerance)
    assert row["optim/grad_norm"] == pytest.approx(step.grad_norm, rel=100 * tolerance)
    assert row["reward/mean"] == pytest.approx(sum(step.rewards) / len(step.rewards), abs=1e-6)
    assert row["rollout/tokens"] == len(step.lags)
    if setting.is_stale:
        assert row["rollout/lag_mean"] == pytest.approx(sum(step.lags) / len(step.lags), abs=1e-6)
        assert row["rollout/lag_max"] == max(step.lags)
        assert (row["rollout/carried"], row["rollout/queue"]) == (step.num_carried, step.num_queued)
    else:
        assert not {"rollout/lag_max", "rollout/carried", "rollout/queue"} & row.keys()


def assert_same_run(result: Result, steps: list[Step], setting: Setting) -> None:
    """Groups, tokens, versions, lags, rewards and losses are those of the reference."""
    for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
        assert_same_data(result.rollouts(number), step, setting)
        assert_same_metrics(row, step, setting)


def setting_of(limit: int, model: Path, ahead: int = 0) -> Setting:
    return Setting(**SHAPE, max_tokens_per_round=limit, model=model, ahead=ahead)


def responses_of(result: Result, steps: Sequence[int] = ()) -> dict[tuple[int, ...], list[list[int]]]:
    """Return the responses of all groups of a run, or of some of its steps, by their prompt."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for step in steps or [int(row["step"]) for row in result.metrics]:
        batch = result.rollouts(step)
        sequences = batch.tokens.split(batch.lengths.tolist())
        for tokens, length in zip(sequences, batch.prompt_lengths.tolist(), strict=True):
            found.setdefault(tuple(tokens[:length].tolist()), []).append(tokens[length:].tolist())
    return found


def assert_same_responses(results: Sequence[Result], num_groups: int) -> None:
    """Every group that several runs have trained on has the same responses in all of them."""
    first, *others = (responses_of(result) for result in results)
    for other in others:
        common = first.keys() & other.keys()
        assert len(common) >= num_groups
        assert {prompt: first[prompt] for prompt in common} == {prompt: other[prompt] for prompt in common}


def assert_continues(
    resumed: Result, after: int, is_same_place: bool, steps: list[Step], whole: Result, setting: Setting
) -> None:
    """The steps of a resumed run are those of the whole one. On the same ranks, all numbers are equal."""
    assert [row["step"] for row in resumed.metrics] == list(range(after + 1, len(steps) + 1))
    for row in resumed.metrics:
        number = int(row["step"])
        assert_same_data(resumed.rollouts(number), steps[number - 1], setting)
        assert_same_metrics(row, steps[number - 1], setting)
        if is_same_place:
            assert learnt(row) == learnt(whole.metrics[number - 1])
        else:
            assert learnt(row) == pytest.approx(learnt(whole.metrics[number - 1]), rel=1e-4, abs=1e-5)


def assert_trains_once(fork: Result, whole: Result, step: int, setting: Setting) -> None:
    """A fork of a run after this step trains on what was in flight, and no prompt is skipped or repeated."""
    before, after, last = responses_of(whole, range(1, step + 1)).keys(), responses_of(fork), fork.metrics[-1]["step"]
    assert all(len(samples) == setting.num_samples for samples in after.values()), fork.folder
    assert not before & after.keys(), fork.folder
    manifest = json.loads((fork.folder / "checkpoints" / f"step_{last}" / "manifest.json").read_text())
    schedule, num_started = manifest["state"]["schedule"], manifest["state"]["position"]
    num_left = len(schedule["carried"]) + len(schedule["queue"]) + sum(map(len, schedule["batches"]))
    assert len(before | after.keys()) + num_left == num_started, fork.folder
    assert before | after.keys() <= {tuple(prompt.tokens) for prompt in prompts_of(setting, num_started)}, fork.folder


def kill_a_rank(process: subprocess.Popen[str], source: random.Random) -> bool:
    """Kill a random rank of torchrun's world, if it has one now."""
    ranks = [
        child for child in psutil.Process(process.pid).children() if "tests/e2e/broken_train.py" in command_of(child)
    ]
    if ranks:
        os.kill(source.choice(ranks).pid, signal.SIGKILL)
    return bool(ranks)


def last_step(result: Result) -> int:
    """Return the last step in the metrics of a running run."""
    file = result.folder / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)
