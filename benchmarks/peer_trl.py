"""The work of benchmarks/step.py in TRL's GRPO trainer with a collocated vLLM. Prints one JSON line.

    python benchmarks/peer_trl.py [--model 1.7b] [--prompts 64] [--samples 8] [--new-tokens 512] [--batch 32]
                                  [--gpu-memory 0.4] [--no-recompute]

The same random model, prompts and lengths: responses go on to their last token, one optimizer step a batch, no KL,
bfloat16, sleep mode. --batch is the micro-batch in sequences, --gpu-memory the engine's share: the best that fit are to
be given. Figures are taken as benchmarks/step.py takes them. Needs trl, which is no requirement of the project.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step import WARM_UP_STEPS, MemoryWatch, arguments, write_inputs
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
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
        generation_kwargs={"ignore_eos": True},
        beta=0.0,
        bf16=True,
        gradient_checkpointing=args.recompute,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "bfloat16"},
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
    trainer.train()
    step_s = statistics.median(clock.seconds[WARM_UP_STEPS:])
    return {
        "benchmark": "peer_trl",
        "model": args.model,
        "parameters": num_parameters,
        "sequences": sequences,
        "prompt_tokens": round(prompt_tokens, 1),
        "new_tokens": args.new_tokens,
        "gpu": torch.cuda.get_device_name(),
        "batch": args.batch,
        "gpu_memory": args.gpu_memory,
        "recompute": args.recompute,
        "seconds_per_step": round(step_s, 3),
        "seconds": [round(value, 2) for value in clock.seconds],
        "tokens_per_s": round(sequences * args.new_tokens / step_s),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, MemoryWatch() as memory:
        row = run(args, Path(name))
        print(json.dumps(row | {"peak_memory_gib": round(memory.peak_gib, 1)}), flush=True)


if __name__ == "__main__":
    main()
