"""Measure tools/report.py on runs of many steps: time, memory, and the size of the page. Prints one JSON line.

    python benchmarks/report.py [--steps 20000 100000] [--metrics 120] [--runs 1]

Makes runs with random values, evaluations every 100 steps and checkpoints every 200, and writes their report. By the
number of steps:
    wall_s    from the start of the command to its end
    cpu_s     time of the processor in it, which other work on the machine changes less
    peak_mb   peak memory of the command
    page_mb   size of report.html
    rows_mb   size of metrics.jsonl, of one run
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from rl.common.events import EVENTS, Event

ROOT = Path(__file__).resolve().parent.parent
BEGAN = 1_700_000_000.0
STEP_S = 10.0
STAGES = ("rollout", "logprobs", "advantages", "update", "sync", "handover")
NAMES = ["reward/mean", "reward/std", "reward/no_signal", "policy/entropy", "policy/kl_old_new", "optim/grad_norm"]
NAMES += ["rollout/length_mean", "rollout/tokens", "perf/tokens_per_s", "perf/busy/actor", "perf/wait/actor/rollout"]
EVALUATED, SAVED = 100, 200  # steps between two evaluations, and between two checkpoints
NUM_BINS = 32


def make_row(step: int, others: list[str], random_numbers: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "version": step + 1, "at": BEGAN + STEP_S * step, "time/step": STEP_S}
    row |= {name: random_numbers.random() for name in others}
    row |= {f"time/{stage}": random_numbers.random() for stage in STAGES}
    if step % EVALUATED == 0:
        value = random_numbers.random()
        row |= {"eval/accuracy": value, "eval/sums/avg@1": value}
        row |= {"eval/sums/avg@1_low": value - 0.1, "eval/sums/avg@1_high": value + 0.1}
    counts = [random_numbers.randrange(100) for _ in range(NUM_BINS)]
    return row | {"rollout/lengths": {"edges": [128 * place for place in range(NUM_BINS + 1)], "counts": counts}}


def make_run(folder: Path, num_steps: int, num_metrics: int) -> Path:
    """Write the files of a run that a report reads, apart from responses and settings."""
    folder.mkdir(parents=True)
    others = [*NAMES, *(f"reward/part_{number}" for number in range(num_metrics - len(NAMES) - len(STAGES) - 1))]
    random_numbers = random.Random(num_steps)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps(make_row(step, others, random_numbers)) + "\n")
    events = [Event(BEGAN, 0, "start", "attempt 1", "world")]
    events += [
        Event(BEGAN + STEP_S * step, step, "checkpoint", f"step {step} is saved")
        for step in range(SAVED, num_steps + 1, SAVED)
    ]
    events.append(Event(BEGAN + STEP_S * num_steps, num_steps, "end", f"step {num_steps} of {num_steps} is done"))
    (folder / EVENTS).write_text("".join(json.dumps(event._asdict()) + "\n" for event in events))
    return folder


def measure(num_steps: int, args: argparse.Namespace, place: Path) -> dict[str, float]:
    """Make runs of so many steps, write their report, and return the figures."""
    runs = [make_run(place / f"run{number}", num_steps, args.metrics) for number in range(1, args.runs + 1)]
    page = place / "report.html"
    command = [sys.executable, str(ROOT / "tools" / "report.py"), *map(str, runs), "--output", str(page)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"benchmarks/report.py: {' '.join(command)} ended with {process.returncode}; its messages are above")
    return {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6),
        "page_mb": round(page.stat().st_size / 1e6, 2),
        "rows_mb": round((runs[0] / "metrics.jsonl").stat().st_size / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[20_000, 100_000])
    parser.add_argument("--metrics", type=int, default=120, help="metrics of a row, besides those of evaluations")
    parser.add_argument("--runs", type=int, default=1, help="runs in the report")
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for num_steps in args.steps:
        with tempfile.TemporaryDirectory() as place:
            figures[str(num_steps)] = measure(num_steps, args, Path(place))
    line: dict[str, Any] = {"benchmark": "report", "metrics": args.metrics, "runs": args.runs}
    for name in ("wall_s", "cpu_s", "peak_mb", "page_mb", "rows_mb"):
        line[name] = {steps: figure[name] for steps, figure in figures.items()}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
