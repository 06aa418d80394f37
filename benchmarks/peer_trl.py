"""Measure the steps of benchmarks/step.py in TRL's GRPO trainer with a collocated vLLM. Prints one JSON line.

    python benchmarks/peer_trl.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--batch 32]
                                  [--gpu-memory 0.45] [--dtype bfloat16] [--recompute] [--no-liger] [--compile]
                                  [--no-correction]

Model, prompts and lengths are the same. Every response has --new-tokens tokens; there is one optimizer step per batch,
no KL term, sleep mode, and importance correction, for which TRL needs a pass over the batch. Weights and optimizer
state are float32 with bfloat16 arithmetic. --dtype bfloat16 keeps them in bfloat16; `weights_moved` tells what share of
a layer's weights such a run changes at all. --batch is the micro-batch size in sequences, and --gpu-memory the engine's
share of the memory: give the best values that fit. --liger uses Liger's kernels, and --compile torch.compile, like the
settings of TRL with these names. Figures are those of benchmarks/step.py. `update` is everything except generation,
sync and the pass for logprobs, so it includes rewards and padding. Needs a GPU, trl and liger-kernel, which the project
itself does not require.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import need_gpu, need_packages
from benchmarks.step import WARM_UP_STEPS, MemoryWatch, arguments, figures_of, write_inputs

PACKAGES = {"trl": "trl", "datasets": "datasets", "liger_kernel": "liger-kernel"}
STAGES = ("rollout", "logprobs", "sync")
SWITCHES = {"recompute": False, "liger": True, "compile": False, "correction": True}


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


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    num_parameters, prompt_tokens = write_inputs(folder, args)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    sequences = args.prompts * args.samples
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=WARM_UP_STEPS + args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=sequences // args.batch,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=args.gpu_memory,
        vllm_importance_sampling_correction=args.correction,
        vllm_max_model_length=128 + args.new_tokens,
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
        model_init_kwargs={"dtype": args.dtype},
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **kwargs: [float(len(text) % 7) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    clock.watch(trainer.vllm_generation, "generate", "rollout")
    clock.watch(trainer.vllm_generation, "sync_weights", "sync")
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "logprobs")
    weight = trainer.model.model.layers[0].mlp.down_proj.weight.detach()
    before = weight.clone()
    trainer.train()
    steps = clock.steps[WARM_UP_STEPS:]
    seconds = {stage: statistics.median(step[stage] for step in steps) for stage in (*STAGES, "update")}
    step_s = statistics.median(step["step"] for step in steps)
    own = {name: getattr(args, name) for name in ("batch", "gpu_memory", "dtype", *SWITCHES)}
    own["weights_moved"] = round((weight != before).float().mean().item(), 4)
    own["steps_s"] = [round(step["step"], 2) for step in steps]
    return {"benchmark": "peer_trl"} | figures_of(args, num_parameters, prompt_tokens, step_s, seconds) | own


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gpu-memory", type=float, default=0.45)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, default in SWITCHES.items():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
    args = parser.parse_args()
    need_packages(**PACKAGES)
    need_gpu()
    with tempfile.TemporaryDirectory() as name, MemoryWatch() as memory:
        row = run(args, Path(name))
        print(json.dumps(row | {"peak_memory_gib": round(memory.peak_gib, 1)}), flush=True)


if __name__ == "__main__":
    main()
