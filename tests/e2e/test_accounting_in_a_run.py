"""The accounting of whole runs: every rank's ledger adds up, and planted sleeps are booked where they belong."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.report.accounting import ACCOUNTING
from tests.launcher import Result, finish, start

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
NUM_STEPS = 3
COMMON = [
    *("rollout.engine=fake", f"train.num_steps={NUM_STEPS}", "train.num_prompts_per_step=4", "eval.interval=0"),
    *("rollout.num_samples_per_prompt=4", "rollout.max_new_tokens=8", "checkpoint.save_interval=0"),
    *("reward.stop_if_all_fail=false", "debug.mean_response_tokens=8"),  # all responses have 8 tokens
]
NUM_DECODE_STEPS = 8
SLOW_REWARD = """
import time

def slow(prompt, response, row):
    time.sleep(0.1)
    return 0.0
"""


@dataclass(frozen=True)
class Accounted:
    result: Result
    rows: list[dict]  # of accounting.jsonl, without the first step, which includes start-up work
    windows: list[dict[int, float]]  # by rank: when the sync of each version began

    def seconds(self, rank: int) -> list[dict[str, float]]:
        """Return a rank's seconds of each account, by step."""
        return [next(one["seconds"] for one in row["ranks"] if one["rank"] == rank) for row in self.rows]

    def least(self, rank: int, account: str) -> float:
        return min(seconds.get(account, 0.0) for seconds in self.seconds(rank))


def run(folder: Path, num_ranks: int, told: dict[str, float], *overrides: str) -> Accounted:
    """Run with planted sleeps, and check that all ledgers add up."""
    script = ["tests/e2e/slow_train.py", json.dumps(told | {"folder": str(folder)})]
    names = [f"run.dir={folder}", "run.name=run"]
    process = start(f"--nproc-per-node={num_ranks}", *script, *names, *COMMON, *overrides)
    output = finish(process, 300)
    assert process.returncode == 0, output[-6000:]
    result = Result(output, folder / "run")
    rows = [json.loads(line) for line in (result.folder / ACCOUNTING).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    windows = []
    for rank in range(num_ranks):
        lines = (folder / f"windows_{rank}.txt").read_text().splitlines()
        windows.append({int(version): float(at) for version, at in map(str.split, lines)})
    found = Accounted(result, rows[1:], windows)
    for rank in range(num_ranks):
        for row, metrics in zip(rows, result.metrics, strict=True):
            version = int(metrics["version"])
            took = windows[rank][version] - windows[rank][version - 1]
            (seconds,) = [one["seconds"] for one in row["ranks"] if one["rank"] == rank]
            assert sum(seconds.values()) == pytest.approx(took, abs=0.02), (rank, row["step"])
    for metrics in result.metrics:
        roles = [name.removeprefix("perf/busy/") for name in metrics if name.startswith("perf/busy/")]
        for role in roles:
            waits = [value for name, value in metrics.items() if name.startswith(f"perf/wait/{role}/")]
            assert metrics[f"perf/busy/{role}"] + sum(waits) == pytest.approx(1.0), (role, metrics)
    return found


def test_separate_ranks(tmp_path: Path) -> None:
    """Rank 0 samples, rank 1 scores, ranks 2 and 3 train. Rank 3 is slow."""
    told = {"engine": 0.2, "update": 1.5, "slow_actor": 3, "logprobs": 0.8}
    placement = ["placement.rollout=0", "placement.inference=1", "placement.actor=2-3", "algo.kl_coef=0.1"]
    found = run(tmp_path, 4, told, *placement)
    sampling = NUM_DECODE_STEPS * 0.2
    assert found.least(0, "busy/rollout") >= sampling and found.least(0, "wait/actor") >= 1.5
    assert found.least(1, "busy/logprobs") >= 0.8 and found.least(1, "wait/actor") >= 0.9 * (sampling + 1.5)
    for actor in (2, 3):
        assert found.least(actor, "wait/rollout") >= 0.9 * sampling
        assert found.least(actor, "wait/inference") >= 0.7
    assert found.least(3, "busy/update") >= 1.5
    assert found.least(2, "wait/actor") >= 1.4, "it waits for the slow actor in a collective"
    assert max(seconds.get("wait/actor", 0.0) for seconds in found.seconds(3)) < 1.0
    assert found.rows[-1]["bound"].endswith(" %") and found.rows[-1]["bound"] in found.result.output
    assert set(found.rows[-1]["roles"]) == {"rollout", "inference", "actor"}


def test_shared_ranks(tmp_path: Path) -> None:
    """Both ranks sample and train. Rank 1 is slow to train."""
    found = run(tmp_path, 2, {"engine": 0.2, "update": 1.5, "slow_actor": 1}, "placement.actor,rollout=all")
    for rank in (0, 1):
        assert found.least(rank, "busy/rollout") >= 0.9 * NUM_DECODE_STEPS * 0.2
    assert found.least(1, "busy/update") >= 1.5 and found.least(0, "wait/actor") >= 1.4
    assert set(found.rows[-1]["roles"]) == {"rollout_actor"}
    assert found.rows[-1]["engine"]["decode"][0] > 0


def test_partly_shared_ranks_with_slow_rewards(tmp_path: Path) -> None:
    """Rank 0 trains too. Rank 1 only samples, so it waits during updates. The scores take longer than the tokens."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    rewards = [f"reward.function={tmp_path / 'slow.py'}:slow", "reward.num_workers=1"]
    placement = ["placement.actor,rollout=0", "placement.rollout=1"]
    found = run(tmp_path, 2, {"engine": 0.02, "update": 1.5}, *placement, *rewards)
    assert found.least(1, "wait/actor") >= 1.4 and found.least(0, "busy/update") >= 1.5
    # Each engine has half of the 16 responses, and one process that takes 0.1 s for each.
    assert found.least(1, "wait/reward") >= 0.5 and found.least(0, "wait/reward") >= 0.5
    assert set(found.rows[-1]["roles"]) == {"rollout", "rollout_actor"}


def test_an_engine_of_two_ranks_with_slow_rewards(tmp_path: Path) -> None:
    """Ranks 0 and 1 are one engine. The second counts its waiting as the first does."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    rewards = [f"reward.function={tmp_path / 'slow.py'}:slow", "reward.num_workers=1"]
    placement = ["placement.rollout=0-1", "placement.actor=2", "rollout.tensor_parallel_size=2"]
    found = run(tmp_path, 3, {"engine": 0.05, "update": 1.0}, *placement, *rewards)
    # One process takes 0.1 s for each of the 16 responses, which end at the same time.
    for rank in (0, 1):
        assert found.least(rank, "busy/rollout") >= 0.9 * NUM_DECODE_STEPS * 0.05
        assert found.least(rank, "wait/reward") >= 1.4 and found.least(rank, "wait/actor") >= 0.9
    for lead, follower in zip(found.seconds(0), found.seconds(1), strict=True):
        for account in ("wait/reward", "wait/actor"):
            assert follower[account] == pytest.approx(lead[account], abs=0.2)
