"""Measure whole steps of train.py on a model with random weights. Prints one JSON line.

    python benchmarks/step.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--mean-new-tokens 0]
                              [--ranks 1] [--steps 5] [--warm-up 2] [--profile FILE] [key=value ...]

It writes a model of that shape and prompts as long as those of GSM8K, and starts torchrun. Engines, loop, update and
weight sync are those of a run. Every response has --new-tokens tokens. Figures are medians of --steps steps after
--warm-up steps. With --profile, one more step is profiled, and FILE tells where each of its stages spent its time. The
default settings suit an H200, with less memory than benchmarks/peer_trl.py takes. The line repeats the given settings
as `settings`:
    seconds_per_step, seconds       a whole step, and its stages
    tokens_per_s                    sampled tokens over the whole step
    mfu_update, mfu_logprobs        6 N (2 N) x tokens of prompts and responses, over the stage's seconds and the
                                    GPU's peak in bfloat16; *_with_attention adds 6 (2) x layers x hidden size x
                                    sequence length for each token
    peak_memory_gib                 device memory in use by all processes, sampled ten times a second
    mismatch_kl                     the largest of all steps; near 0 if engine and learner compute the same

With --mean-new-tokens, responses have different lengths: lognormal (sigma 1) with this mean, and cut at --new-tokens.
They are the same in every run, so runs with different settings can be compared:

    python benchmarks/step.py --model qwen2.5-1.5b --new-tokens 8192 --mean-new-tokens 1000
    python benchmarks/step.py --model qwen2.5-1.5b --new-tokens 8192 --mean-new-tokens 1000 --warm-up 4 \\
        rollout.max_tokens_per_round=2048

Steps then differ in their work, so all seconds are means, and rates are totals over all measured steps. Each run saves
the groups that it trains on, and their lengths are the work in the figures. algo.correction is none: with a limit per
round, a correction would cost a pass for old logprobs, which it does not cost without. Engines have slots for twice as
many sequences as start in a round, because carried responses need slots too. The line also has:
    steps, rounds                   measured steps, and the rounds of sampling in them
    tokens_per_step, length_mean, length_max        of the responses that were trained on
    lag_mean, lag_max               of their tokens
    carried                         mean number of groups that a step leaves unfinished
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, run_torchrun
from benchmarks.random_model import SHAPES, save_random_model
from rl.config.schema import ROOT
from rl.data.batch import Batch
from rl.data.group_file import groups_from_bytes
from rl.model.flops import peak_flops

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
        f"debug.mean_response_tokens={args.new_tokens}",
        "algo.correction=sequence_mask",  # as TRL does by default
        "algo.correction_limit=3",
        "actor.max_tokens_per_micro_batch=20480",
        "checkpoint.save_interval=0",
        "run.name=step",
        f"run.dir={folder}",
    ]


def settings_of_different_lengths(args: argparse.Namespace) -> list[str]:
    """Return what --mean-new-tokens changes in the settings."""
    num_slots = 2 * args.prompts * args.samples
    options = {
        "max_num_batched_tokens": max(4096, num_slots),
        # By default, vLLM captures no CUDA graphs for more than 512 sequences.
        "compilation_config": {"max_cudagraph_capture_size": num_slots},
    }
    return [
        f"debug.mean_response_tokens={args.mean_new_tokens}",
        "debug.save_rollouts=true",
        f"rollout.max_num_seqs={num_slots}",
        f"rollout.engine_options={json.dumps(options)}",
        "algo.correction=none",
    ]


def run(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all steps, and return the metrics of those that are not profiled."""
    end = args.warm_up + args.steps
    lengths = settings_of_different_lengths(args) if args.mean_new_tokens else []
    settings = [*settings_of(folder, args), *lengths, *args.settings]
    settings.append(f"train.num_steps={end + bool(args.profile)}")
    if args.profile:
        settings.append(f"debug.profile_step={end + 1}")
    run_torchrun(args.ranks, "train.py", *settings, quiet=True)
    if args.profile:
        shutil.copy(folder / "step" / "profile" / f"step_{end + 1}.rank_0.txt", args.profile)
    rows = [json.loads(line) for line in (folder / "step" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if 0 < row["step"] <= end]


class Work(NamedTuple):
    """The work of a step, or its mean over several steps."""

    num_new_tokens: float
    num_tokens: float  # of prompts and responses
    squares: float  # sum of the squared lengths of all sequences, for attention

    @staticmethod
    def of_equal_lengths(args: argparse.Namespace, prompt_tokens: float) -> "Work":
        count, length = args.prompts * args.samples, prompt_tokens + args.new_tokens
        return Work(count * args.new_tokens, count * length, count * length**2)


class Trained(NamedTuple):
    """The lengths of all sequences that the measured steps trained on."""

    lengths: torch.Tensor  # of prompts and responses
    response_lengths: torch.Tensor

    @staticmethod
    def read(folder: Path, steps: Sequence[int]) -> "Trained":
        """Read the files of debug.save_rollouts."""
        files = [file for step in steps for file in folder.glob(f"step_{step}.rank_*.safetensors")]
        batch = Batch.concat([group.batch for file in files for group in groups_from_bytes(file.read_bytes())])
        return Trained(batch.lengths, batch.response_lengths)

    def work(self, num_steps: int) -> Work:
        """Return the mean work of a step."""
        lengths = self.lengths.double()
        totals = (self.response_lengths.sum(), lengths.sum(), lengths.square().sum())
        return Work(*(float(total) / num_steps for total in totals))


def summary(
    rows: list[dict[str, Any]], args: argparse.Namespace, num_parameters: int, prompt_tokens: float
) -> dict[str, Any]:
    """Return the figures of a run whose responses are equally long. `rows` are those of the measured steps."""

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    seconds = {stage: median(f"time/{stage}") for stage in STAGES}
    return figures_of(args, num_parameters, prompt_tokens, median("time/step"), seconds, args.ranks)


def summary_of_different_lengths(
    rows: list[dict[str, Any]], args: argparse.Namespace, num_parameters: int, trained: Trained
) -> dict[str, Any]:
    """Return the figures of a run with --mean-new-tokens. `rows` are those of all steps."""
    measured, num_steps = rows[args.warm_up :], args.steps

    def mean(name: str) -> float:
        return statistics.mean(row.get(name, 0.0) for row in measured)

    def num_rounds(step: int) -> float:
        """Return the number of rounds by the end of a step. Each has started --prompts groups."""
        row = rows[step - 1] if step else {}
        return step + (row.get("rollout/carried", 0.0) + row.get("rollout/queue", 0.0)) / args.prompts

    seconds, work = {stage: mean(f"time/{stage}") for stage in STAGES}, trained.work(num_steps)
    responses = trained.response_lengths.double()
    prompt_tokens = float((trained.lengths - trained.response_lengths).double().mean())
    lag = sum(row.get("rollout/lag_mean", 0.0) * row["rollout/tokens"] for row in measured)
    return figures_of(args, num_parameters, prompt_tokens, mean("time/step"), seconds, args.ranks, work) | {
        "mean_new_tokens": args.mean_new_tokens,
        "steps": num_steps,
        "rounds": round(num_rounds(len(rows)) - num_rounds(args.warm_up), 2),
        "tokens_per_step": round(work.num_new_tokens),
        "length_mean": round(float(responses.mean()), 1),
        "length_max": int(responses.max()),
        "lag_mean": round(lag / sum(row["rollout/tokens"] for row in measured), 3),
        "lag_max": int(max(row.get("rollout/lag_max", 0) for row in measured)),
        "carried": round(mean("rollout/carried"), 1),
    }


def figures_of(
    args: argparse.Namespace,
    num_parameters: int,
    prompt_tokens: float,
    step_s: float,
    seconds: dict[str, float],
    ranks: int = 1,
    work: Work | None = None,  # None: every response has --new-tokens tokens
) -> dict[str, Any]:
    """Return the figures of a step of `step_s` seconds, and of its stages."""
    work = work or Work.of_equal_lengths(args, prompt_tokens)
    shape = SHAPES[args.model]
    width = shape.heads * (shape.head_dim or shape.hidden // shape.heads)
    update, attention = 6 * num_parameters * work.num_tokens, 6 * shape.layers * width * work.squares
    peak = peak_flops(gpu_name())

    def mfu(flops: float, stage: str) -> float | None:
        time_s = seconds.get(stage, 0.0)
        return round(flops / time_s / peak / ranks, 4) if peak and time_s > 0.1 else None

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
        "tokens_per_s": round(work.num_new_tokens / step_s),
        "mfu_update": mfu(update, "update"),
        "mfu_update_with_attention": mfu(update + attention, "update"),
        "mfu_logprobs": mfu(update / 3, "logprobs"),
        "mfu_logprobs_with_attention": mfu((update + attention) / 3, "logprobs"),
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
    parser.add_argument("--mean-new-tokens", type=int, default=0, help="0: every response has --new-tokens tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_STEPS, help="steps that are not measured")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of train.py")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, MemoryWatch() as memory:
        folder = Path(name)
        num_parameters, prompt_tokens = write_inputs(folder, args)
        rows = run(folder, args)
        measured = rows[args.warm_up :]
        if args.mean_new_tokens:
            trained = Trained.read(folder / "step" / "rollouts", [row["step"] for row in measured])
            figures = summary_of_different_lengths(rows, args, num_parameters, trained)
        else:
            figures = summary(measured, args, num_parameters, prompt_tokens)
        mismatch = max(row["policy/mismatch_kl"] for row in measured)
        ends = {"mismatch_kl": mismatch, "settings": args.settings, "peak_memory_gib": round(memory.peak_gib, 1)}
        print(json.dumps({"benchmark": "step"} | figures | ends), flush=True)


if __name__ == "__main__":
    main()
