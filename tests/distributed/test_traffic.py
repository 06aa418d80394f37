"""benchmarks/traffic.py says what real runs send: process groups, bytes of updates, and bytes of weight syncs."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.traffic import UpdateTraffic, broadcasts, process_groups, tensors_of
from rl.placement.roles import Placement, plan
from rl.sync.plan import make_plan
from tests.launcher import ROOT, run_program

NUM_STEPS = 3
NUM_PROBED = 2  # the probe of the first two versions may leave the root's weights gathered for the update that follows
MIN_BYTES = 1000  # smaller collectives carry counts and norms
COMMON = [
    *("rollout.engine=fake", f"train.num_steps={NUM_STEPS}", "train.num_prompts_per_step=8", "eval.interval=0"),
    *("rollout.num_samples_per_prompt=4", "rollout.max_new_tokens=8", "checkpoint.save_interval=0"),
    *("reward.stop_if_all_fail=false", "debug.mean_response_tokens=8", "actor.max_tokens_per_micro_batch=32"),
    *("metrics.writers=[]", "sync.bucket_mb=1"),
]


@dataclass(frozen=True)
class Job:
    num_ranks: int
    placement: dict[str, str]
    num_replicas: int = 1
    dtype: str = "float32"

    def overrides(self, folder: Path, number: int) -> list[str]:
        own = [f"placement={json.dumps(self.placement)}", f"actor.num_replicas={self.num_replicas}"]
        return [*COMMON, *own, f"model.dtype={self.dtype}", f"run.dir={folder}", f"run.name=run{number}"]

    def plan(self) -> Placement:
        return plan(self.placement, 1, self.num_ranks, num_replicas=self.num_replicas)


SHARED = {"actor,rollout": "all"}
QUICK = [Job(4, {"rollout": "0-1", "actor": "2-3"}, dtype="bfloat16")]
SLOW = [
    Job(2, SHARED),
    Job(8, SHARED, num_replicas=2),
    Job(8, {"rollout": "0-2", "inference": "3", "actor": "4-7"}),
    Job(8, {"rollout": "0-3", "actor": "4-7"}, num_replicas=2, dtype="bfloat16"),
    Job(5, SHARED),  # rows do not divide by 5
]


def recorded(folder: Path, jobs: list[Job]) -> list[list[list[dict[str, Any]]]]:
    """Run the jobs; return what each rank has recorded, by job and rank."""
    described = [{"num_ranks": job.num_ranks, "overrides": job.overrides(folder, n)} for n, job in enumerate(jobs)]
    program = ("tests/distributed/counted_train.py", str(folder), json.dumps(described))
    code, output = run_program(*program, timeout_s=300)
    assert code == 0, output[-6000:]
    return [
        [[json.loads(line) for line in (folder / f"{number}.{rank}").read_text().splitlines()] for rank in range(size)]
        for number, size in enumerate(job.num_ranks for job in jobs)
    ]


def between(rows: list[dict[str, Any]], what: str) -> list[list[dict[str, Any]]]:
    """Return the rows between each `begin` and `end`."""
    parts: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["kind"] == f"begin {what}":
            parts.append([])
            is_open = True
        elif row["kind"] == f"end {what}":
            is_open = False
        elif parts and is_open:
            parts[-1].append(row)
    return parts


def counts(rows: list[dict[str, Any]], *kinds: str) -> Counter:
    large = [row for row in rows if row["kind"] in kinds and row["bytes"] >= MIN_BYTES]
    return Counter((row["kind"], len(row["ranks"]), row["bytes"]) for row in large)


def check(job: Job, ranks: list[list[dict[str, Any]]]) -> None:
    placement = job.plan()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "configs" / "tiny"))
    size = getattr(torch, job.dtype).itemsize
    tensors = tensors_of(model, job.dtype)
    update = UpdateTraffic.of(tensors, placement, weight_bytes=size, gradient_bytes=4)
    sent = broadcasts(make_plan(tensors, placement, 1, torch.device("cpu")), placement)
    for rank, rows in enumerate(ranks):
        made = [tuple(row["ranks"]) for row in rows if row["kind"] == "group"]
        assert Counter(made) == Counter(process_groups(placement))
        updates, syncs = between(rows, "update"), between(rows, "sync")
        assert len(updates) == (NUM_STEPS if rank in placement.actors else 0)
        for own in updates[NUM_PROBED:]:
            (number,) = [row["number"] for row in own if row["kind"] == "micro_batches"]
            assert number > 1
            modelled = Counter((one.kind, len(one.ranks), one.num_bytes) for one in update.collectives(number))
            assert counts(own, "all_gather", "reduce_scatter", "all_reduce") == modelled
        expected = Counter(("broadcast", len(one.ranks), one.num_bytes) for one in sent if rank in one.ranks)
        assert len(syncs) >= NUM_STEPS
        for own in syncs:
            assert (
                Counter((r["kind"], len(r["ranks"]), r["bytes"]) for r in own if r["kind"] == "broadcast") == expected
            )


@pytest.mark.timeout(120)
def test_a_small_world_sends_what_is_modelled(tmp_path: Path) -> None:
    for job, ranks in zip(QUICK, recorded(tmp_path, QUICK), strict=True):
        check(job, ranks)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_other_worlds_send_what_is_modelled(tmp_path: Path) -> None:
    for job, ranks in zip(SLOW, recorded(tmp_path, SLOW), strict=True):
        check(job, ranks)
