"""Compare ways to compute logprobs and entropies of a batch with the head. Prints one JSON line.

    python benchmarks/head.py [--rows 16384] [--hidden 1024] [--vocab 151936]

A round is a forward and a backward pass from hidden states, in bfloat16. The ways take turns: our kernels, with logits
that are computed again (`ours`) or kept (`kept`), and torch.compile's. Figures are medians:
    seconds         of a round
    peak_gb         memory above that of inputs and weights
    products        seconds of the four matrix products alone; `kept` needs three of them
Needs a GPU.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, need_gpu
from rl.model import head

ROUNDS = 5


def time_of(way: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    way()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    hidden = torch.randn(args.rows, args.hidden, **options).requires_grad_()
    weight = torch.randn(args.vocab, args.hidden, **options).mul_(0.05).requires_grad_()
    targets = torch.randint(0, args.vocab, (args.rows,), device="cuda")
    factors = torch.randn(2, args.rows, device="cuda")

    def ours(keeps_logits: bool = False) -> None:
        scores = head.token_scores(hidden, weight, targets, 0.9, keeps_logits=keeps_logits)
        torch.autograd.grad((scores.logprobs * factors[0] + scores.entropy * factors[1]).sum(), [hidden, weight])

    def compiled() -> None:
        find = head._kernels_for
        head._kernels_for = lambda hidden, reference: None
        try:
            ours()
        finally:
            head._kernels_for = find

    def products() -> None:
        with torch.no_grad():
            for part in head._chunks(hidden, weight, 1):
                logits = hidden[part] @ weight.t()
                _ = hidden[part] @ weight.t(), logits @ weight, logits.t() @ hidden[part]

    ways = {"ours": ours, "kept": lambda: ours(keeps_logits=True), "compiled": compiled, "products": products}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for number in range(ROUNDS + 2):
        for name, way in ways.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            taken = time_of(way)
            if number >= 2:  # the first rounds compile
                seconds[name].append(taken)
                peaks[name] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)
    row = vars(args) | {"benchmark": "head", "gpu": gpu_name(), "peak_gb": peaks}
    row["seconds"] = {name: round(statistics.median(each), 5) for name, each in seconds.items()}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
