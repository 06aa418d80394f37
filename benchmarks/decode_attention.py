"""Compare our attention kernel for decoding with those of vLLM, for one layer. Prints one JSON line.

    python benchmarks/decode_attention.py [--sequences 512] [--heads 16] [--kv-heads 8] [--head-size 128] [--sweep]

Each sequence has one new token. The paged bfloat16 KV cache is larger than the GPU's own caches. Rounds of all kernels
take turns, and figures are medians; TB/s counts the keys and values read. --sweep leaves vLLM out and tries settings of
our kernel. Needs a GPU.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import need_gpu

BLOCK_SIZE = 16
LENGTHS = (128, 320, 544, 2048)
ROUNDS, REPEATS = 7, 8


def seconds_of(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 2):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPEATS):
                way()
            end.record()
            end.synchronize()
            if number >= 2:  # the first two rounds compile
                taken[name].append(start.elapsed_time(end) / 1000 / REPEATS)
    return {name: statistics.median(values) for name, values in taken.items()}


def ours(tensors: tuple[Tensor, ...], scale: float, tile: int, num_warps: int, num_stages: int) -> Callable[[], None]:
    from rl.rollout.vllm import decode_attention

    def way() -> None:
        decode_attention.TILE, decode_attention.NUM_WARPS, decode_attention.NUM_STAGES = tile, num_warps, num_stages
        queries, keys, values, table, lengths, outputs = tensors
        decode_attention.attend(queries, keys, values, table, lengths, scale, outputs, BLOCK_SIZE * table.shape[1])

    return way


def vllms(tensors: tuple[Tensor, ...], scale: float, length: int) -> dict[str, Callable[[], Any]]:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    queries, keys, values, table, lengths, outputs = tensors
    starts = torch.arange(len(queries) + 1, dtype=torch.int32, device="cuda")
    shared: dict[str, Any] = {
        "q": queries,
        "k": keys,
        "v": values,
        "out": torch.empty_like(outputs),
        "cu_seqlens_q": starts,
        "max_seqlen_q": 1,
        "seqused_k": lengths,
        "max_seqlen_k": length,
        "softmax_scale": scale,
        "causal": True,
        "block_table": table,
    }
    flash = shared | {"fa_version": 3, "num_splits": 32}
    unified = shared | {
        "window_size": (-1, -1),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }
    return {
        "flash_attention_3": lambda: flash_attn_varlen_func(**flash),
        "triton": lambda: unified_attention(**unified),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    need_gpu()
    from rl.rollout.vllm import decode_attention  # here, since CPU installations have no Triton

    torch.manual_seed(0)
    best = (decode_attention.TILE, decode_attention.NUM_WARPS, decode_attention.NUM_STAGES)
    settings = [best, *itertools.product((16, 32, 64), (1, 2, 4), (1, 3))] if args.sweep else [best]
    results = {}
    for length in LENGTHS:
        blocks_each = -(-length // BLOCK_SIZE)
        num_blocks = args.sequences * blocks_each
        shape = (num_blocks, BLOCK_SIZE, args.kv_heads, 2 * args.head_size)
        keys, values = torch.randn(shape, dtype=torch.bfloat16, device="cuda").split(args.head_size, dim=-1)
        table = torch.randperm(num_blocks, device="cuda").view(args.sequences, blocks_each).int()
        lengths = torch.full((args.sequences,), length, dtype=torch.int32, device="cuda")
        queries = torch.randn(args.sequences, args.heads, args.head_size, dtype=torch.bfloat16, device="cuda")
        scale = args.head_size**-0.5
        tensors = (queries, keys, values, table, lengths, torch.empty_like(queries))
        ways: dict[str, Callable[[], Any]] = {
            "ours" if each == best else "ours {}x{}x{}".format(*each): ours(tensors, scale, *each) for each in settings
        }
        if not args.sweep:
            ways |= vllms(tensors, scale, length)
        num_bytes = 2 * args.sequences * length * args.kv_heads * args.head_size * 2
        seconds = seconds_of(ways)
        for name, value in sorted(seconds.items(), key=lambda item: item[1])[:8]:
            results[f"{length} {name}"] = {"ms": round(1000 * value, 4), "tb_per_s": round(num_bytes / value / 1e12, 2)}
    row = vars(args) | {"benchmark": "decode_attention", "gpu": torch.cuda.get_device_name(), "results": results}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
