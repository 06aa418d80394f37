"""Measure how long it takes to name the culprit of each fault, and to train again. The last line is JSON.

    python benchmarks/recovery.py [--faults N]

Four nodes with two ranks each are network namespaces of this machine, with the fake engine: see tests/chaos. Needs root
and iproute2. A clean start is measured first: from the start of the agents to the end of the first step. Then faults
come one after the other in that run. A recovery lasts from the fault (for the head: from its return) to the end of the
first step after it. Its overhead is how much longer that is than the clean start. `worst_named_s` counts from the
deadline of silence where a fault has one (4 s for a process, 10 s for a host). The last fault is a node that does not
come back, in a run of its own with --nnodes 3:4 and two copies of each file. --faults N runs only the first N others.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import need_cluster
from tests.chaos.faults import FAULTS, Fault, lose_node
from tests.chaos.harness import Cluster, running

STEPS_BETWEEN = 3


def time_start(world: Cluster, started: float) -> float:
    world.wait_for_step(1)
    return time.monotonic() - started


def time_recovery(world: Cluster, fault: Fault, clean_s: float) -> dict[str, Any]:
    world.wait_for_step(world.last_step() + STEPS_BETWEEN)
    num_starts = world.output().count("resumes after step ")
    started = time.monotonic()
    named_s = fault.happen(world)
    if fault.mend is not None:
        fault.mend(world)
    if fault.is_of_head:
        started = time.monotonic()
    world.wait_until("restart", lambda: world.output().count("resumes after step ") > num_starts)
    num_steps = world.num_steps_told()
    world.wait_until("step", lambda: world.num_steps_told() > num_steps)
    training_s = time.monotonic() - started
    seconds = {"named_s": named_s, "training_s": training_s, "overhead_s": training_s - clean_s}
    row = {"fault": fault.name} | {name: round(value, 1) for name, value in seconds.items()}
    print(json.dumps(row), flush=True)
    return row


def measure(faults: list[Fault], *settings: str, **options: Any) -> tuple[float, list[dict[str, Any]]]:
    num_steps = (len(faults) + 1) * (STEPS_BETWEEN + 3)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        with running(Path(folder), f"train.num_steps={num_steps}", *settings, loop=True, **options) as world:
            clean_s = time_start(world, started)
            print(f"clean start: {clean_s:.1f} s", flush=True)
            rows = [time_recovery(world, fault, clean_s) for fault in faults]
            assert set(world.finish()) == {0}, world.output()[-6000:]
    return clean_s, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=len(FAULTS))
    args = parser.parse_args()
    need_cluster()
    clean_s, rows = measure(FAULTS[: args.faults])
    _, last = measure([lose_node(3)], "checkpoint.copies=2", nnodes="3:4")
    rows += last
    result = {
        "benchmark": "recovery",
        "cores": os.cpu_count(),
        "clean_start_s": round(clean_s, 1),
        "worst_named_s": max(row["named_s"] for row in rows),
        "worst_overhead_s": max(row["overhead_s"] for row in rows),
        "faults": {row["fault"]: [row["named_s"], row["training_s"]] for row in rows},
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
