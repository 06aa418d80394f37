"""Measure whole steps of train.py on a model with random weights. Prints one JSON line.

    python benchmarks/step.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--mean-new-tokens 0]
                              [--ranks 1] [--steps 5] [--warm-up 2] [--profile FILE] [key=value ...]

It writes a model of that shape and prompts as long as those of GSM8K, and starts torchrun. Engines, loop, update and
weight sync are those of a run. Every response has --new-tokens tokens. Figures are medians of --steps steps after
--warm-up steps. With --profile, one more step is profiled, and FILE tells where each of its stages spent its time.
benchmarks/peer_trl.py and benchmarks/peer_verl.py measure the same work in other trainers. Slots and memory of the
engine, micro-batches, offload and recomputation are those that a run derives. Main shapes to compare:

    python benchmarks/step.py --model qwen3-0.6b
    python benchmarks/step.py --model qwen3-1.7b --prompts 32 --new-tokens 2048

The line repeats the given settings as `settings`, and has what the run has derived:
    derived                         by name, from run.json
    seconds_per_step, seconds       a whole step, and its stages
    steps, steps_s                  the number of measured steps, and the seconds of each
    tokens_per_s                    sampled tokens over the whole step
    mfu_update, mfu_logprobs        6 N (2 N) x tokens of prompts and responses, over the stage's seconds and the
                                    GPU's peak in bfloat16; *_with_attention adds 6 (2) x layers x heads x size of
                                    a head x sequence length for each token
    peak_memory_gib                 device memory in use by all processes, sampled ten times a second
    mismatch_kl                     the largest of all steps; near 0 if engine and learner compute the same
    update_memory_gb                device memory of an update by kind; "other" are activations and gathered layers
    start                           seconds from torchrun to the end of the first step, with the parts of
                                    benchmarks/start.py

With --mean-new-tokens, responses have different lengths: lognormal (sigma 1) with this mean, and cut at --new-tokens.
They are the same in every run, so runs with different settings can be compared:

    python benchmarks/step.py --model qwen2.5-1.5b --new-tokens 8192 --mean-new-tokens 1000
    python benchmarks/step.py --model qwen2.5-1.5b --new-tokens 8192 --mean-new-tokens 1000 --warm-up 4 \\
        rollout.max_tokens_per_round=2048 rollout.keep_kv=true

Steps then differ in their work, so all seconds are means, and rates are totals over all measured steps. Each run saves
the groups that it trains on, and their lengths are the work in the figures. algo.correction is none: with a limit per
round, a correction would cost a pass for old logprobs, which it does not cost without. The line also has:
    rounds                          rounds of sampling in the measured steps
    tokens_per_step, length_mean, length_max        of the responses that were trained on
    lag_mean, lag_max               of their tokens
    carried                         mean number of groups that a step leaves unfinished
    kept_kv_tokens                  of carried responses that a step's rounds found in the KV cache, on average
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import run_torchrun
from benchmarks.work import (
    MAX_PROMPT_TOKENS,
    Inputs,
    MemoryWatch,
    Work,
    drawn_lengths,
    figures_of,
    start_figures,
    step_arguments,
    write_inputs,
)
from rl.config.differences import flatten
from rl.data.batch import Batch
from rl.data.group_file import groups_from_bytes
from rl.run.derive import ON_CPU

MISMATCH = "policy/mismatch_kl"  # a step all of whose tokens have a lag has none
STAGES = ("handover", "rollout", "logprobs", "advantages", "update", "sync")


def settings_of(folder: Path, args: argparse.Namespace) -> list[str]:
    """Return the settings of a run on what `write_inputs` wrote."""
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'prompts.jsonl'}",
        f"data.max_prompt_tokens={MAX_PROMPT_TOKENS}",
        "eval.interval=0",
        "model.dtype=bfloat16",
        f"train.num_prompts_per_step={args.prompts}",
        f"rollout.num_samples_per_prompt={args.samples}",
        f"rollout.max_new_tokens={args.new_tokens}",
        "rollout.deterministic=false",
        f"debug.mean_response_tokens={args.new_tokens}",
        "algo.correction=sequence_mask",  # as TRL does by default
        "algo.correction_limit=3",
        "checkpoint.save_interval=-1",  # a checkpoint after the last step would be copied to host memory
        "run.name=step",
        f"run.dir={folder}",
    ]


def settings_of_different_lengths(args: argparse.Namespace) -> list[str]:
    """Return what --mean-new-tokens changes in the settings."""
    return [
        f"debug.mean_response_tokens={args.mean_new_tokens}",
        "debug.save_rollouts=true",
        "algo.correction=none",
    ]


def run(folder: Path, args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run all steps. Return the metrics of those that are not profiled, and the figures of the start."""
    end = args.warm_up + args.steps
    lengths = settings_of_different_lengths(args) if args.mean_new_tokens else []
    settings = [*settings_of(folder, args), *lengths, *args.settings]
    settings.append(f"train.num_steps={end + bool(args.profile)}")
    if args.profile:
        settings.append(f"debug.profile_step={end + 1}")
    started = time.time()
    run_torchrun(args.ranks, "train.py", *settings, quiet=True)
    if args.profile:
        shutil.copy(folder / "step" / "profile" / f"step_{end + 1}.rank_0.txt", args.profile)
    rows = [json.loads(line) for line in (folder / "step" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if 0 < row["step"] <= end], start_figures(rows, started)


def update_memory(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest device memory of these updates by kind. On a CPU there is none."""
    prefix = "gpu/memory_gb/"
    names = sorted({name for row in rows for name in row if name.startswith(prefix)})  # some are sampled by time
    return {name.removeprefix(prefix): round(max(row.get(name, 0.0) for row in rows), 2) for name in names}


def trained_work(folder: Path, steps: Sequence[int]) -> Work:
    """Read the sequences that these steps trained on from the files of debug.save_rollouts."""
    files = [file for step in steps for file in folder.glob(f"step_{step}.rank_*.safetensors")]
    batch = Batch.concat([group.batch for file in files for group in groups_from_bytes(file.read_bytes())])
    return Work(len(steps), batch.lengths, batch.response_lengths)


def summary(rows: list[dict[str, Any]], args: argparse.Namespace, inputs: Inputs) -> dict[str, Any]:
    """Return the figures of a run whose responses are equally long. `rows` are those of the measured steps."""

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    seconds, work = (
        {stage: median(f"time/{stage}") for stage in STAGES},
        Work.of(inputs, drawn_lengths(args, args.steps)),
    )
    return figures_of(args, inputs.num_parameters, work, median("time/step"), seconds, args.ranks)


def summary_of_different_lengths(
    rows: list[dict[str, Any]], args: argparse.Namespace, num_parameters: int, work: Work
) -> dict[str, Any]:
    """Return the figures of a run with --mean-new-tokens. `rows` are those of all steps."""
    measured = rows[args.warm_up :]

    def mean(name: str) -> float:
        return statistics.mean(row.get(name, 0.0) for row in measured)

    def num_rounds(step: int) -> float:
        """Return the number of rounds by the end of a step. Each has started --prompts groups."""
        row = rows[step - 1] if step else {}
        return step + (row.get("rollout/carried", 0.0) + row.get("rollout/queue", 0.0)) / args.prompts

    seconds = {stage: mean(f"time/{stage}") for stage in STAGES}
    lag = sum(row.get("rollout/lag_mean", 0.0) * row["rollout/tokens"] for row in measured)
    return figures_of(args, num_parameters, work, mean("time/step"), seconds, args.ranks) | {
        "rounds": round(num_rounds(len(rows)) - num_rounds(args.warm_up), 2),
        "lag_mean": round(lag / sum(row["rollout/tokens"] for row in measured), 3),
        "lag_max": int(max(row.get("rollout/lag_max", 0) for row in measured)),
        "carried": round(mean("rollout/carried"), 1),
        "kept_kv_tokens": round(mean("rollout/kept_kv_tokens")),
    }


def read_derived(record: Path) -> dict[str, Any]:
    """Return the values of the settings that a run derives if they are not given."""
    settings = flatten(json.loads(record.read_text())["config"])
    return {name: settings[name] for name in ON_CPU}


def main() -> None:
    parser = step_arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of train.py")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, MemoryWatch() as memory:
        folder = Path(name)
        inputs = write_inputs(folder, args)
        rows, start = run(folder, args)
        measured = rows[args.warm_up :]
        if args.mean_new_tokens:
            work = trained_work(folder / "step" / "rollouts", [row["step"] for row in measured])
            figures = summary_of_different_lengths(rows, args, inputs.num_parameters, work)
        else:
            figures = summary(measured, args, inputs)
        ends = {
            "steps_s": [round(row["time/step"], 2) for row in measured],
            "mismatch_kl": max((row[MISMATCH] for row in measured if MISMATCH in row), default=None),
            "settings": args.settings,
            "update_memory_gb": update_memory(measured),
            "start": start,
            "derived": read_derived(folder / "step" / "run.json"),
            "peak_memory_gib": round(memory.peak_gib, 1),
        }
        print(json.dumps({"benchmark": "step"} | figures | ends), flush=True)


if __name__ == "__main__":
    main()
