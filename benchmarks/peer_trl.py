"""Measure the steps of benchmarks/step.py in TRL's GRPO trainer with a collocated vLLM. Prints one JSON line.

    python benchmarks/peer_trl.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--mean-new-tokens 0]
                                  [--steps 5] [--warm-up 2] [--batch 32] [--gpu-memory 0] [--dtype float32]
                                  [--attention sdpa] [--recompute] [--no-liger] [--compile] [--no-correction]

Model, prompts and lengths are the same: with --mean-new-tokens, each response ends at the length that train.py draws
for it. There is one optimizer step per batch, no KL term, sleep mode, and importance correction, for which TRL needs a
pass over the batch. Weights and optimizer state are float32 with bfloat16 arithmetic. --dtype bfloat16 keeps them in
bfloat16; `weights_moved` tells what share of a layer's weights such a run changes at all. --batch is the micro-batch
size in sequences: give the largest that fits. TRL pads all sequences to the longest of the batch, so long responses
need a small one. --gpu-memory is the engine's share of the memory; 0 gives it what all sequences need. --liger uses
Liger's kernels, --compile torch.compile, and --attention an implementation of attention, like the settings of TRL with
these names. Figures are those of benchmarks/step.py. `update` is everything except generation, sync and the pass for
logprobs, so it includes rewards and padding. Needs a GPU, trl and liger-kernel, which the project itself does not
require.
"""

import argparse
import copy
import itertools
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import need_gpu, need_packages
from benchmarks.work import (
    MAX_PROMPT_TOKENS,
    Lengths,
    MemoryWatch,
    Work,
    check_lengths,
    drawn_lengths,
    engine_share,
    figures_of,
    middle_of,
    step_arguments,
    write_inputs,
)

PACKAGES = {"trl": "trl", "datasets": "datasets", "liger_kernel": "liger-kernel"}
STAGES = ("rollout", "logprobs", "sync")
SWITCHES = {"recompute": False, "liger": True, "compile": False, "correction": True}
SLACK = 0.03  # of the memory, for what TRL's engine holds beyond its cache


class Clock(TrainerCallback):
    """Measure the seconds of each step, and of the stages that were given to `watch`."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(defaultdict(float))
        self._started = now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        step = self.steps[-1]
        step["step"] = now() - self._started
        step["update"] = step["step"] - sum(step[stage] for stage in STAGES)

    def watch(self, owner: Any, method: str, stage: str) -> None:
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if stage == "logprobs" and torch.is_grad_enabled():  # part of the update
                return function(*args, **kwargs)
            started = now()
            result = function(*args, **kwargs)
            self.steps[-1][stage] += now() - started
            return result

        setattr(owner, method, timed)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def limit_lengths(llm: Any, prompts: Sequence[Sequence[int]], lengths: Lengths) -> None:
    """Let each call of `llm.generate` end its responses at the lengths of the next step. `prompts` are token ids."""
    generate, steps = llm.generate, itertools.count()
    row_of = {tuple(prompt): row for row, prompt in enumerate(prompts)}

    def limited(requests: list[dict[str, Any]], sampling_params: Any, **kwargs: Any) -> Any:
        drawn, seen, params = lengths[next(steps)], Counter[int](), []
        for request in requests:
            row = row_of[tuple(request["prompt_token_ids"])]
            params.append(copy.copy(sampling_params))
            params[-1].max_tokens = drawn[row][seen[row]]
            seen[row] += 1
        return generate(requests, sampling_params=params, **kwargs)

    llm.generate = limited


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    inputs, lengths = write_inputs(folder, args), drawn_lengths(args, args.warm_up + args.steps)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    sequences = args.prompts * args.samples
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=len(lengths),
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=sequences // args.batch,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=args.gpu_memory,
        vllm_importance_sampling_correction=args.correction,
        vllm_max_model_length=MAX_PROMPT_TOKENS + args.new_tokens,
        generation_kwargs={"ignore_eos": True, "detokenize": False},  # TRL decodes the tokens itself
        beta=0.0,
        bf16=True,
        gradient_checkpointing=args.recompute,
        use_liger_kernel=args.liger,
        torch_compile=args.compile,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": args.dtype, "attn_implementation": args.attention},
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **kwargs: [float(len(text) % 7) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in inputs.prompts]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    limit_lengths(trainer.vllm_generation.llm, [tokenizer(prompt).input_ids for prompt in inputs.prompts], lengths)
    clock.watch(trainer.vllm_generation, "generate", "rollout")
    clock.watch(trainer.vllm_generation, "sync_weights", "sync")
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "logprobs")
    weight = trainer.model.model.layers[0].mlp.down_proj.weight.detach()
    before = weight.clone()
    trainer.train()
    means = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    check_lengths(means, lengths)
    steps, middle = clock.steps[args.warm_up :], middle_of(args)
    seconds = {stage: middle([step[stage] for step in steps]) for stage in (*STAGES, "update")}
    step_s = middle([step["step"] for step in steps])
    own = {name: getattr(args, name) for name in ("batch", "gpu_memory", "dtype", "attention", *SWITCHES)}
    own["weights_moved"] = round((weight != before).float().mean().item(), 4)
    own["steps_s"] = [round(step["step"], 2) for step in steps]
    work = Work.of(inputs, lengths[args.warm_up :])
    return {"benchmark": "peer_trl"} | figures_of(args, inputs.num_parameters, work, step_s, seconds) | own


def main() -> None:
    parser = step_arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gpu-memory", type=float, default=0.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention", choices=["sdpa", "flash_attention_2"], default="sdpa")
    for name, default in SWITCHES.items():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
    args = parser.parse_args()
    need_packages(**PACKAGES)
    need_gpu()
    args.gpu_memory = args.gpu_memory or round(engine_share(args) + SLACK, 2)
    with tempfile.TemporaryDirectory() as name, MemoryWatch() as memory:
        row = run(args, Path(name))
        print(json.dumps(row | {"peak_memory_gib": round(memory.peak_gib, 1)}), flush=True)


if __name__ == "__main__":
    main()
