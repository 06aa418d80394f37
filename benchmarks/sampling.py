"""Compare our kernel for sampling with those of vLLM. Prints one JSON line.

    python benchmarks/sampling.py [--sequences 512] [--vocab 151936]

A round samples one token for each row of bfloat16 logits, and computes its logprob. Both ways take turns on the same
logits, which are larger than the GPU's caches. Figures are medians:
    microseconds    of a round, by way; `read` is one pass over the logits at --bandwidth TB/s
Needs a GPU.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.decode_attention import seconds_of
from benchmarks.program import gpu_name, need_gpu

CACHE_BYTES = 1 << 28  # several times what a GPU caches


def ways_of(num_sequences: int, vocab: int) -> dict[str, Callable[[], Any]]:
    from rl.rollout.vllm import sampling

    num_copies = max(2, -(-CACHE_BYTES // (2 * num_sequences * vocab)))
    copies = [2 * torch.randn(num_sequences, vocab, device="cuda") for _ in range(num_copies)]
    logits = cycle([each.bfloat16() for each in copies])
    slots = torch.arange(num_sequences, device="cuda")
    inputs = (slots.int(), torch.ones(num_sequences, device="cuda"), 7919 * slots, slots)
    ours = sampling.TokenSampler()
    has_drafts = "is_drafting" in inspect.signature(sampling.vllms_sample).parameters  # not in vLLM 0.26
    options = {"apply_temperature": False} | ({"is_drafting": False} if has_drafts else {})

    def round_of(sample: Callable[..., Any], score: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            rows = next(logits)
            score(rows, 0, sample(rows, *inputs, **options))

        return run

    vllms = round_of(sampling.vllms_sample, sampling.vllms_scores)
    return {"ours": round_of(ours.sample, ours.score), "vllm": vllms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--bandwidth", type=float, default=4.0, help="of the GPU's memory, in TB/s")
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    seconds = seconds_of(ways_of(args.sequences, args.vocab))
    seconds["read"] = 2 * args.sequences * args.vocab / args.bandwidth / 1e12
    figures = {"microseconds": {name: round(1e6 * each, 1) for name, each in seconds.items()}}
    print(json.dumps({"benchmark": "sampling", "gpu": gpu_name()} | vars(args) | figures), flush=True)


if __name__ == "__main__":
    main()
