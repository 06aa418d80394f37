"""Train on the sums of benchmarks/learn.py with TRL's GRPO trainer and a collocated vLLM. Prints one JSON line.

    python benchmarks/peer_trl_learn.py MODEL_FOLDER [--steps 100] [--held-out 500]

Sums, samples, learning rate and number of steps are the same. Greedy accuracy is measured with transformers before and
after training, and `seconds` does not include that. Needs a GPU and trl, which the project itself does not require.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.learn import SETTINGS, arguments, write_sums
from benchmarks.peer_trl import Clock
from benchmarks.program import need_gpu, need_packages
from rl.evaluation.estimates import estimate


def is_right(text: str, answer: str) -> float:
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == answer)


def reward(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    return [is_right(messages[0]["content"], wanted) for messages, wanted in zip(completions, answer, strict=True)]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> list[float]:
    """Return the greedy accuracy and the ends of its 95 % interval."""
    scores = []
    for first in range(0, len(rows), 100):
        part = rows[first : first + 100]
        chats = [[{"role": "user", "content": row["prompt"]}] for row in part]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        output = model.generate(**inputs, max_new_tokens=SETTINGS["max_new_tokens"], do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores += [is_right(text, row["answer"]) for text, row in zip(texts, part, strict=True)]
    found = estimate(scores)
    return [round(value, 4) for value in (found.mean, found.low, found.high)]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    train, test = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in write_sums(folder, args.held_out)
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda()
    before = accuracy(model, tokenizer, test)
    del model
    torch.cuda.empty_cache()
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=args.steps,
        per_device_train_batch_size=SETTINGS["num_prompts"] * SETTINGS["num_samples"],
        num_generations=SETTINGS["num_samples"],
        max_completion_length=SETTINGS["max_new_tokens"],
        temperature=SETTINGS["temperature"],
        epsilon=SETTINGS["clip"],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        beta=0.0,
        bf16=True,
        learning_rate=SETTINGS["lr"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in train]
    clock = Clock()
    started = time.perf_counter()
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    seconds = time.perf_counter() - started
    return {
        "benchmark": "peer_trl_learn",
        "model": Path(args.model).name,
        "gpu": torch.cuda.get_device_name(),
        "steps": args.steps,
        "before": before,
        "after": accuracy(trainer.model.eval(), tokenizer, test),
        "seconds": round(seconds, 1),
        "seconds_per_step": round(statistics.median(step["step"] for step in clock.steps), 3),
    }


def main() -> None:
    args = arguments(__doc__).parse_args()
    need_packages(trl="trl", datasets="datasets")
    need_gpu()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(args, Path(name))), flush=True)


if __name__ == "__main__":
    main()
