"""Measure whole steps of train.py on a model with random weights. Prints one JSON line.

    python benchmarks/step.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--ranks 1]
                              [--profile FILE] [key=value ...]

It writes a model of that shape and prompts as long as those of GSM8K, and starts torchrun. Engines, loop, update and
weight sync are those of a run. Every response has --new-tokens tokens. Figures are medians of --steps steps after two
warm-up steps. With --profile, one more step is profiled, and FILE tells where each of its stages spent its time. The
default settings suit an H200, with less memory than benchmarks/peer_trl.py takes. The line repeats the given settings
as `settings`:
    seconds_per_step, seconds       a whole step, and its stages
    tokens_per_s                    sampled tokens over the whole step
    mfu_update, mfu_logprobs        6 N (2 N) x tokens of prompts and responses, over the stage's seconds and the
                                    GPU's peak in bfloat16; *_with_attention adds 6 (2) x layers x hidden size x
                                    sequence length for each token
    peak_memory_gib                 device memory in use by all processes, sampled ten times a second
    mismatch_kl                     the largest of all steps; near 0 if engine and learner compute the same
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, peak_flops, run_torchrun
from benchmarks.random_model import SHAPES, save_random_model
from rl.config.schema import ROOT

WARM_UP_STEPS = 2
STAGES = ("handover", "rollout", "logprobs", "advantages", "update", "sync")


def write_inputs(folder: Path, args: argparse.Namespace) -> tuple[int, float]:
    """Write a model and prompts. Return its number of parameters and the mean number of tokens of a prompt."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_parameters = save_random_model(folder / "model", args.model, 0, "bfloat16", device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # otherwise memory of this process would count as the run's
    for path in (ROOT / "configs" / "tiny").glob("tokenizer*"):
        shutil.copy(path, folder / "model")
    generator = random.Random(0)
    lengths = [generator.randint(30, 90) for _ in range(args.prompts)]
    rows = [{"prompt": "".join(generator.choices("0123456789", k=length)), "answer": "1"} for length in lengths]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return num_parameters, statistics.mean(len(tokenizer(row["prompt"]).input_ids) for row in rows)


class MemoryWatch:
    """Measure the peak of the first device's memory, in use by all processes."""

    def __init__(self) -> None:
        self.peak_gib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            used_gib = (total - free) / 2**30
            if int(used_gib) > int(self.peak_gib):
                print(f"{used_gib:.1f} GiB in use", file=sys.stderr, flush=True)  # among the run's own output
            self.peak_gib = max(self.peak_gib, used_gib)

    def __enter__(self) -> "MemoryWatch":
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()


def settings_of(folder: Path, args: argparse.Namespace) -> list[str]:
    """Return the settings of a run on what `write_inputs` wrote."""
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'prompts.jsonl'}",
        "data.max_prompt_tokens=128",
        "eval.interval=0",
        "model.dtype=bfloat16",
        f"train.num_prompts_per_step={args.prompts}",
        f"rollout.num_samples_per_prompt={args.samples}",
        f"rollout.max_new_tokens={args.new_tokens}",
        f"rollout.max_num_seqs={args.prompts * args.samples}",
        "rollout.deterministic=false",
        "rollout.gpu_memory_fraction=0.42",  # on an H200 the cache then holds all sequences
        f"rollout.engine_options={{max_num_batched_tokens: {max(4096, args.prompts * args.samples)}}}",
        "debug.ignore_stop_tokens=true",
        "algo.correction=sequence_mask",  # as TRL does by default
        "algo.correction_limit=3",
        "actor.max_tokens_per_micro_batch=20480",
        "checkpoint.save_interval=0",
        "run.name=step",
        f"run.dir={folder}",
    ]


def run(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    end = WARM_UP_STEPS + args.steps
    settings = [*settings_of(folder, args), *args.settings, f"train.num_steps={end + bool(args.profile)}"]
    if args.profile:
        settings.append(f"debug.profile_step={end + 1}")
    run_torchrun(args.ranks, "train.py", *settings, quiet=True)
    if args.profile:
        shutil.copy(folder / "step" / "profile" / f"step_{end + 1}.rank_0.txt", args.profile)
    rows = [json.loads(line) for line in (folder / "step" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if WARM_UP_STEPS < row["step"] <= end]


def summary(
    rows: list[dict[str, Any]], args: argparse.Namespace, num_parameters: int, prompt_tokens: float
) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    seconds = {stage: median(f"time/{stage}") for stage in STAGES}
    figures = figures_of(args, num_parameters, prompt_tokens, median("time/step"), seconds, args.ranks)
    mismatch = max(row["policy/mismatch_kl"] for row in rows)
    return {"benchmark": "step"} | figures | {"mismatch_kl": mismatch, "settings": args.settings}


def figures_of(
    args: argparse.Namespace,
    num_parameters: int,
    prompt_tokens: float,
    step_s: float,
    seconds: dict[str, float],
    ranks: int = 1,
) -> dict[str, Any]:
    """Return the figures of a step of `step_s` seconds, and of its stages."""
    shape = SHAPES[args.model]
    length = prompt_tokens + args.new_tokens
    num_tokens = args.prompts * args.samples * length
    width = shape.heads * (shape.head_dim or shape.hidden // shape.heads)
    attention = 6 * shape.layers * width * length
    peak = peak_flops()

    def mfu(per_token: float, stage: str) -> float | None:
        time_s = seconds.get(stage, 0.0)
        return round(per_token * num_tokens / time_s / peak / ranks, 4) if peak and time_s > 0.01 else None

    return {
        "model": args.model,
        "parameters": num_parameters,
        "sequences": args.prompts * args.samples,
        "prompt_tokens": round(prompt_tokens, 1),
        "new_tokens": args.new_tokens,
        "gpu": gpu_name(),
        "ranks": ranks,
        "seconds_per_step": round(step_s, 3),
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
        "tokens_per_s": round(args.prompts * args.samples * args.new_tokens / step_s),
        "mfu_update": mfu(6 * num_parameters, "update"),
        "mfu_update_with_attention": mfu(6 * num_parameters + attention, "update"),
        "mfu_logprobs": mfu(2 * num_parameters, "logprobs"),
        "mfu_logprobs_with_attention": mfu(2 * num_parameters + attention / 3, "logprobs"),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that describe a step, which several benchmarks share."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "any size"], default="1.7b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of train.py")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, MemoryWatch() as memory:
        folder = Path(name)
        num_parameters, prompt_tokens = write_inputs(folder, args)
        row = summary(run(folder, args), args, num_parameters, prompt_tokens) | {
            "peak_memory_gib": round(memory.peak_gib, 1)
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
