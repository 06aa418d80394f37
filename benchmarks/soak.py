"""Disturb a long run with a random fault about every ten steps. It must train on the same samples as a clean run.

    python benchmarks/soak.py [--steps 200] [--seed S]

Four nodes with two ranks each are network namespaces of this machine, with the fake engine: see tests/chaos. Needs root
and iproute2. Prints the seed, each fault, and one JSON line at the end. It takes about one minute per fault, and fails
if a fault is not reported in time or training does not go on.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import need_cluster
from tests.chaos.faults import FAULTS
from tests.chaos.harness import assert_same, running

STEPS_BETWEEN = (6, 14)
MAX_STEP_S = 0.5  # a fault comes at a random moment of a step


def clean_run(folder: Path, num_steps: int) -> list[dict[str, float]]:
    with running(folder, f"train.num_steps={num_steps}", "world.silence_floor_s=60") as world:
        assert world.finish(600) == [0, 0, 0, 0], world.output()[-6000:]
        return world.metrics()


def disturbed_run(folder: Path, num_steps: int, seed: int) -> tuple[list[dict[str, float]], list[str]]:
    chance, happened = random.Random(seed), []
    with running(folder, f"train.num_steps={num_steps}", loop=True) as world:
        while (step := world.last_step() + chance.randint(*STEPS_BETWEEN)) < num_steps:
            world.wait_for_step(step)
            time.sleep(chance.uniform(0, MAX_STEP_S))
            fault = chance.choice(FAULTS)
            print(f"step {world.last_step()}: {fault.name}", flush=True)
            fault.happen(world)
            if fault.mend is not None:
                fault.mend(world)
            happened.append(fault.name)
        assert world.finish(300) == [0, 0, 0, 0], world.output()[-6000:]
        return world.metrics(), happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    need_cluster()
    print(f"seed {args.seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        expected = clean_run(Path(folder) / "clean", args.steps)
        clean_s = time.monotonic() - started
        rows, happened = disturbed_run(Path(folder) / "disturbed", args.steps, args.seed)
    assert_same(rows, expected)
    row = {
        "benchmark": "soak",
        "seed": args.seed,
        "steps": args.steps,
        "faults": {name: happened.count(name) for name in sorted(set(happened))},
        "tokens": sum(row["rollout/tokens"] for row in rows),
        "tokens_of_a_clean_run": sum(row["rollout/tokens"] for row in expected),
        "clean_s": round(clean_s),
        "disturbed_s": round(time.monotonic() - started - clean_s),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
