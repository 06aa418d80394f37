"""Train a real model on sums that it cannot do yet. Prints one JSON line.

    python benchmarks/learn.py MODEL_FOLDER [--steps 100] [--held-out 500] [--picture FILE] [--ranks 1] [key=value ...]

Prompts ask a chat model for the sum of two numbers below 100. A response is right if its last number is the sum.
Training is GRPO. Greedy accuracy on held-out sums is measured before, after every tenth of the steps, and at the end:
    before, after       accuracy, and the ends of its 95 % interval
    seconds             of the whole command, with loading and evaluations
    seconds_per_step    the median
--picture draws rewards and accuracies over the steps. benchmarks/peer_trl_learn.py does the same in TRL.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import run_torchrun
from rl.export.reward_curve import draw_curve

SETTINGS = {  # shared with peer_trl_learn.py
    "num_prompts": 64,
    "num_samples": 16,
    "max_new_tokens": 24,
    "temperature": 1.0,
    "lr": 1e-5,
    "clip": 0.2,
}


def write_sums(folder: Path, num_held_out: int, num_train: int = 6000) -> tuple[Path, Path]:
    """Write sums to train on and held-out sums. No pair of numbers is in both files."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    files = folder / "train.jsonl", folder / "test.jsonl"
    parts = pairs[num_held_out : num_held_out + num_train], pairs[:num_held_out]
    for file, part in zip(files, parts, strict=True):
        rows = [{"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)} for a, b in part]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    train, test = write_sums(folder, args.held_out)
    settings = {
        "run.dir": folder,
        "run.name": "learn",
        "model.path": Path(args.model).resolve(),
        "model.dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "data.train": train,
        "data.eval": f"{{sums: {test}}}",
        "data.chat_template": "true",
        "data.max_prompt_tokens": 64,
        "reward.function": "last_number",
        "rollout.num_samples_per_prompt": SETTINGS["num_samples"],
        "rollout.max_new_tokens": SETTINGS["max_new_tokens"],
        "rollout.temperature": SETTINGS["temperature"],
        "algo.clip_low": SETTINGS["clip"],
        "algo.clip_high": SETTINGS["clip"],
        "actor.lr": SETTINGS["lr"],
        "train.num_prompts_per_step": SETTINGS["num_prompts"],
        "train.num_steps": args.steps,
        "eval.interval": max(1, args.steps // 10),
        "checkpoint.save_interval": 0,
    }
    words = [f"{name}={value}" for name, value in settings.items()] + args.settings
    started = time.perf_counter()
    run_torchrun(args.ranks, "train.py", *words, quiet=True)
    seconds = time.perf_counter() - started
    rows = [json.loads(line) for line in (folder / "learn" / "metrics.jsonl").read_text().splitlines()]
    accuracy = "eval/sums/avg@1"
    evaluated = [row for row in rows if accuracy in row]
    if args.picture:
        rewards = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
        accuracies = [(row["step"], row[accuracy]) for row in evaluated]
        args.picture.write_bytes(draw_curve("sums below 200", rewards, accuracies))
    before, after = (
        [round(row[f"{accuracy}{end}"], 4) for end in ("", "_low", "_high")] for row in (evaluated[0], evaluated[-1])
    )
    return {
        "benchmark": "learn",
        "model": Path(args.model).name,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "steps": args.steps,
        "before": before,
        "after": after,
        "seconds": round(seconds, 1),
        "seconds_per_step": round(statistics.median(row["time/step"] for row in rows if "time/step" in row), 3),
    }


def arguments(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=500, help="number of sums to evaluate on")
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(args, Path(name))), flush=True)


if __name__ == "__main__":
    main()
