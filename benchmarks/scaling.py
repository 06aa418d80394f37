"""Measure how a step's time grows with ranks and batch size, in the default run. Prints one JSON line.

    python benchmarks/scaling.py [--ranks 2 4 6 8] [--prompts 32 64 128 256] [--steps 8]

Each point is a whole run of train.py with a real engine on every rank. More ranks share the same cores here, so the
best that can be expected is a straight line: in the batch size at a fixed number of ranks (the middle one), and in the
ranks at a fixed batch per rank. `*_fit` gives the line's seconds at 0, its seconds per prompt (rank), and its R^2.
Figures are medians of the steps after the first three.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import run_torchrun

WARM_UP_STEPS = 3


def seconds_per_step(ranks: int, prompts: int, steps: int, folder: Path) -> float:
    name = f"{ranks}-{prompts}"
    settings = [
        f"run.dir={folder}",
        f"run.name={name}",
        "eval.interval=0",
        "checkpoint.save_interval=0",
        f"train.num_steps={WARM_UP_STEPS + steps}",
        f"train.num_prompts_per_step={prompts}",
    ]
    run_torchrun(ranks, "train.py", *settings, quiet=True)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["time/step"] for row in rows[-steps:])


def fit(points: dict[int, float]) -> dict[str, float]:
    xs, ys = list(points), list(points.values())
    slope, offset = statistics.linear_regression(xs, ys)
    return {
        "at_0_s": round(offset, 4),
        "slope_s": round(slope, 5),
        "r2": round(statistics.correlation(xs, ys) ** 2, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    middle = args.ranks[len(args.ranks) // 2 - 1]
    per_rank = args.prompts[0] // middle
    with tempfile.TemporaryDirectory() as name:
        by_prompts = {n: seconds_per_step(middle, n, args.steps, Path(name)) for n in args.prompts}
        by_ranks = {n: seconds_per_step(n, n * per_rank, args.steps, Path(name)) for n in args.ranks if n != middle}
    by_ranks = dict(sorted({**by_ranks, middle: by_prompts[args.prompts[0]]}.items()))
    row = {
        "benchmark": "scaling",
        "cores": os.cpu_count(),
        "ranks_at_each_batch": middle,
        "seconds_by_prompts": {n: round(s, 4) for n, s in by_prompts.items()},
        "prompts_fit": fit(by_prompts),
        "prompts_per_rank": per_rank,
        "seconds_by_ranks": {n: round(s, 4) for n, s in by_ranks.items()},
        "ranks_fit": fit(by_ranks),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
