"""Measure the learner's update on random tokens, without an engine. Prints one JSON line.

    python benchmarks/learner.py [--model 1.7b] [--sequences 512] [--length 572] [--prompt 60] [--samples 1]
                                 [--max-tokens 16384] [--recompute none] [--no-compile] [--dtype bfloat16] [--rounds 5]
                                 [--profile FILE]

Loading, packing, loss, backward and optimizer are those of a run, on one rank. `seconds_per_step` is the median of the
rounds after two warm-up rounds. MFU counts 6 N per token, where N is the number of parameters. With attention it also
counts 6 x layers x heads x head size x sequence length per token (causal: half of all pairs, times 2 products).

With --samples, so many sequences begin with the same prompt, which is computed once. Then `alone` has the figures of
updates in which each sequence has a prompt of its own. Both take turns. MFU counts the tokens of all sequences.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, join_alone
from benchmarks.random_batch import random_batch
from benchmarks.random_model import SHAPES, save_random_model
from rl.config.schema import ActorConfig, Config
from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedModel
from rl.model.flops import ModelFlops, peak_flops
from rl.model.load import Compute, load_model
from rl.report.metrics import Measures

WARM_UP_ROUNDS = 2


def run(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    pg = join_alone(device)
    num_parameters = save_random_model(folder, args.model, 2e7, "bfloat16", device)
    compute = Compute(args.compile and device.type == "cuda", args.recompute, shares_prompts=args.samples > 1)
    mesh = DeviceMesh.from_group(pg, device.type)
    model = load_model(folder, mesh, device, args.dtype, trainable=True, compute=compute)
    config = Config(actor=ActorConfig(max_tokens_per_micro_batch=args.max_tokens, offload="none"))
    learner = PolicyTrainer(ShardedModel(model, pg, device), config, args.rounds + WARM_UP_ROUNDS)
    shape = SHAPES[args.model]
    lengths, prompts = (torch.full((args.sequences,), length) for length in (args.length, args.prompt))
    counts = dict.fromkeys((args.samples, 1))
    batches = {count: random_batch(lengths, prompts, shape.vocab, count) for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    peaks_gib = dict.fromkeys(counts, 0.0)
    for count, batch in [*batches.items()] * (WARM_UP_ROUNDS + args.rounds):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        learner.update(batch, args.sequences, measures := Measures())
        measures.reduce(pg)
        if device.type == "cuda":
            torch.cuda.synchronize()
            peaks_gib[count] = max(peaks_gib[count], torch.cuda.max_memory_allocated() / 2**30)
        seconds[count].append(time.perf_counter() - start)
    if args.profile:
        with torch.profiler.profile() as profile:
            learner.update(batches[args.samples], args.sequences, Measures())
            torch.cuda.synchronize()
        table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
        Path(args.profile).write_text(table)
    peak, tokens = peak_flops(gpu_name()), args.sequences * args.length
    flops = ModelFlops.of(model).of_update(lengths.tolist())

    def figures(count: int) -> dict[str, object]:
        step_s = statistics.median(seconds[count][WARM_UP_ROUNDS:])
        return {
            "seconds_per_step": round(step_s, 3),
            "tokens_per_s": round(tokens / step_s),
            "mfu": round(6 * num_parameters * tokens / step_s / peak, 4) if peak else None,
            "mfu_with_attention": round(flops / step_s / peak, 4) if peak else None,
            "peak_allocated_gib": round(peaks_gib[count], 1),
        }

    return {
        "benchmark": "learner",
        "model": args.model,
        "parameters": num_parameters,
        "gpu": gpu_name(),
        "sequences": args.sequences,
        "length": args.length,
        "prompt": args.prompt,
        "samples": args.samples,
        "max_tokens": args.max_tokens,
        "recompute": args.recompute,
        "compile": args.compile,
        "first_s": round(seconds[args.samples][0], 2),
        **figures(args.samples),
        "alone": figures(1) if args.samples > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="1.7b")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--length", type=int, default=572)
    parser.add_argument("--prompt", type=int, default=60)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--recompute", choices=["none", "head", "selective", "full"], default="head")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", help="write a table of the kernels of one more update to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(args, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
