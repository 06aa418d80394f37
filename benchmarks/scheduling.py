"""Measure vLLM's CPU work in a decode step of many sequences, with and without our fast path. Prints one JSON line.

    python benchmarks/scheduling.py [--sequences 512] [--new-tokens 200] [--rounds 3]

The model runner is replaced by one that answers at once, so a step consists of scheduling and of processing outputs.
The scheduler is vLLM's asynchronous one, with prefix caching. Groups of 8 sequences share a prompt. Rounds of both take
turns after a warm-up round of each. Printed are medians of a step, and of a round with requests, prompts and ends.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rl.config.schema import ROOT
from rl.model.activations import MAX_BATCHED_TOKENS
from rl.rollout.dispatch import Sampling
from rl.rollout.engine import Request
from rl.rollout.vllm.engine import VllmEngine, vllm
from rl.rollout.vllm.fast_decode import install_fast_decode

PROMPT_TOKENS, GROUP = 63, 8
BLOCK_SIZE = 16  # as on GPUs; attention on CPUs would need at least 32, but is not computed


class InstantExecutor:
    """An executor that returns the same token for every sequence whose prompt is complete."""

    def __init__(self, executor: Any, scheduler: Any):
        self._executor, self._scheduler = executor, scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        from concurrent.futures import Future

        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        ids = list(scheduled.num_scheduled_tokens)
        logprobs = LogprobsLists(
            np.zeros((len(ids), 1), np.int32), np.zeros((len(ids), 1), np.float32), np.zeros(len(ids), np.int32)
        )
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: number for number, name in enumerate(ids)},
            sampled_token_ids=[[] if self._scheduler.requests[name].is_prefill_chunk else [5] for name in ids],
            logprobs=logprobs,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future


def build_engine(num_sequences: int, max_model_len: int) -> tuple[Any, Any, dict[str, list[Any]]]:
    """Return an engine, the owners and names of the methods that we replace, and these methods: vLLM's and ours."""
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [BLOCK_SIZE])
    llm = vllm.LLM(
        model=str(ROOT / "configs" / "tiny"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=num_sequences,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        scheduler_cls="vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    )
    core = llm.llm_engine.engine_core.engine_core
    core.model_executor = InstantExecutor(core.model_executor, core.scheduler)
    seat = SimpleNamespace(stop_token_ids=[], sleeps=False, device=torch.device("cpu"))
    places = [(core.scheduler, name) for name in ("schedule", "update_from_output")]
    places.append((core.scheduler.kv_cache_manager, "allocate_slots"))
    methods = {"vllm": [getattr(owner, name) for owner, name in places]}
    group = SimpleNamespace(entered=nullcontext)
    engine = VllmEngine(llm, group, seat)  # type: ignore[arg-type]
    install_fast_decode(core.scheduler, engine.responses, are_continued=False)
    methods["ours"] = [getattr(owner, name) for owner, name in places]
    engine.version = 1
    return engine, places, methods


def sample(engine: Any, num_sequences: int, new_tokens: int) -> dict[str, float]:
    """Return the milliseconds of the median step, and of everything."""
    prompts = [list(range(first, first + PROMPT_TOKENS)) for first in range(-(-num_sequences // GROUP))]
    sampling = Sampling(num_samples=1, temperature=1.0, max_new_tokens=new_tokens)
    requests = [
        Request(str(number), prompts[number // GROUP], sampling, new_tokens, seed=None)
        for number in range(num_sequences)
    ]
    times = [time.perf_counter()]
    engine.add(requests)
    while engine.num_unfinished:
        engine.step()
        times.append(time.perf_counter())
    step = statistics.median(later - earlier for earlier, later in pairwise(times[1:]))
    return {"step": 1000 * step, "round": 1000 * (times[-1] - times[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # nothing is computed
    engine, places, methods = build_engine(args.sequences, PROMPT_TOKENS + args.new_tokens)
    taken: dict[str, list[float]] = {f"{name}_{part}_ms": [] for name in methods for part in ("step", "round")}
    for number in range(1 + args.rounds):
        for name, functions in methods.items():
            for (owner, method), function in zip(places, functions, strict=True):
                setattr(owner, method, function)
            for part, value in sample(engine, args.sequences, args.new_tokens).items():
                if number:
                    taken[f"{name}_{part}_ms"].append(value)
    medians = {name: round(statistics.median(values), 2) for name, values in taken.items()}
    versions = {"vllm": vllm.__version__}
    print(json.dumps({"benchmark": "scheduling"} | vars(args) | versions | medians), flush=True)


if __name__ == "__main__":
    main()
