"""Time `python train.py --plan` with mistakes and without. Prints one JSON line.

    python benchmarks/plan.py [--rounds 5]

Commands run one after the other. Figures are medians by command, after a warm-up round, in seconds:
    wall_s    from the start of the command to its end
    cpu_s     time of the processor in it, which other work on the machine changes less
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {  # by what is wrong; the exit code is 2 unless nothing is
    "key": ["actor.lrr=1"],
    "value": ["actor.lr=fast"],
    "placement": ["placement.rollout=0-7"],
    "reward": ["reward.function=exact_mach"],
    "model": ["model.path=no/such/model"],
    "data": ["data.train=no/such.jsonl"],
    "column": ["data.answer_key=anser"],
    "nothing": [],
}


def measure(arguments: list[str]) -> tuple[float, float]:
    """Return the wall time and the processor time of one command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "train.py", "--plan", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != (2 if arguments else 0):
        sys.exit(f"benchmarks/plan.py: {' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds = [{name: measure(arguments) for name, arguments in COMMANDS.items()} for _ in range(args.rounds + 1)][1:]
    line: dict[str, object] = {"benchmark": "plan", "rounds": args.rounds}
    for index, figure in enumerate(("wall_s", "cpu_s")):
        line[figure] = {name: round(statistics.median(one[name][index] for one in rounds), 2) for name in COMMANDS}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
