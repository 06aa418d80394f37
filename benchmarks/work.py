"""The work of a step that several trainers are measured on: a model, prompts, lengths, and the figures of a run.

benchmarks/step.py, benchmarks/peer_trl.py and benchmarks/peer_verl.py share it, so that all of them do the same.
"""

import argparse
import json
import random
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from benchmarks.program import fail, gpu_name
from benchmarks.random_model import SHAPES, save_random_model
from rl.config.schema import ROOT, RunConfig
from rl.data.prompts import Prompt
from rl.model.flops import peak_flops
from rl.rollout.dispatch import Sampling

WARM_UP_STEPS = 2
MAX_PROMPT_TOKENS = 128
ENGINE = "build engine"
FIRST = ("torchrun", "imports", "join", "find models", "wait for rewards", "connect", "read data", "resume")
NESTED = "compile"  # happens inside of other parts
Lengths = list[list[list[int]]]  # of the responses, by step, prompt and sample


def arguments(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that describe a batch."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "any size"], default="1.7b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.set_defaults(mean_new_tokens=0)
    return parser


def step_arguments(description: str) -> argparse.ArgumentParser:
    """Make a parser with the options that describe the steps of a run."""
    parser = arguments(description)
    parser.add_argument("--mean-new-tokens", type=int, default=0, help="0: every response has --new-tokens tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_STEPS, help="steps that are not measured")
    return parser


class Inputs(NamedTuple):
    """What a run trains."""

    num_parameters: int
    prompts: list[str]
    prompt_tokens: list[int]  # number of tokens of each prompt


def write_inputs(folder: Path, args: argparse.Namespace) -> Inputs:
    """Write a model, a tokenizer for its whole vocabulary, and prompts as long as those of GSM8K."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_parameters = save_random_model(folder / "model", args.model, 0, "bfloat16", device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # otherwise memory of this process would count as the run's
    write_tokenizer(folder / "model", SHAPES[args.model].vocab)
    generator = random.Random(0)
    lengths = [generator.randint(30, 90) for _ in range(args.prompts)]
    prompts = ["".join(generator.choices("0123456789", k=length)) for length in lengths]
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return Inputs(num_parameters, prompts, [len(tokenizer(prompt).input_ids) for prompt in prompts])


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write the tokenizer of configs/tiny, with further entries up to this vocabulary.

    No text is encoded to a further entry, because the tokenizer splits texts into characters. But sampled tokens are
    decoded to them. So decoding costs what it costs in a real run, and no trainer takes a sampled token for invalid.
    """
    tiny = ROOT / "configs" / "tiny"
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    entries = tokenizer["model"]["vocab"]
    assert sorted(entries.values()) == list(range(len(entries)))
    # In the tokenizer of a Qwen model, verl looks for a newline, which Qwen2's tokenizer calls "Ċ", and <|im_end|>.
    # <|endoftext|> would be added behind the vocabulary.
    further = ["\n", "Ċ", "<|im_end|>", "<|endoftext|>"]
    further += [f" {number:x}" for number in range(vocab - len(entries) - len(further))]
    entries |= dict(zip(further, range(len(entries), vocab), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 32768}))


def drawn_lengths(args: argparse.Namespace, num_steps: int) -> Lengths:
    """Return the lengths that train.py draws for each step, if a step takes all prompts once."""
    sampling = Sampling(
        args.samples, 1.0, args.new_tokens, mean_tokens=args.mean_new_tokens, length_seed=RunConfig().seed
    )
    return [
        [
            [sampling.length(Prompt(row, epoch, "", "", []), sample) for sample in range(args.samples)]
            for row in range(args.prompts)
        ]
        for epoch in range(num_steps)
    ]


def check_lengths(means: Sequence[float], lengths: Lengths) -> None:
    """End the program if a trainer's responses do not have the drawn lengths. `means` has their mean in each step."""
    for step, (measured, drawn) in enumerate(zip(means, lengths, strict=False), 1):
        wanted = statistics.mean(length for row in drawn for length in row)
        if abs(measured - wanted) > 0.01:
            fail(
                f"the responses of step {step} have {measured:.2f} tokens on average, but {wanted:.2f} were asked for; "
                "so the steps are no measurement of this work. Check that the trainer ignores stop tokens"
            )


def middle_of(args: argparse.Namespace) -> Callable[[Sequence[float]], float]:
    """Return how to combine steps: the median, or the mean if steps differ in their work."""
    return statistics.mean if args.mean_new_tokens else statistics.median


def engine_share(args: argparse.Namespace) -> float:
    """Return the share of the GPU's memory in which an engine can hold all sequences at once.

    With different lengths, there is room for twice the mean: with a token limit per round, responses that are carried
    over run beside those of the next batch.
    """
    if not torch.cuda.is_available():
        return 0.4  # a CPU engine does not read it
    shape, sequences = SHAPES[args.model], args.prompts * args.samples
    num_tokens = 2 * args.mean_new_tokens if args.mean_new_tokens else args.new_tokens
    head = shape.vocab * shape.hidden
    layer = (2 * shape.heads + 2 * shape.kv_heads) * shape.size_of_head + 3 * shape.intermediate
    weights = 2 * (head * (1 if shape.tied else 2) + shape.layers * layer * shape.hidden)
    cache = sequences * (num_tokens + 64) * shape.kv_bytes_per_token
    logits = 32 * sequences * shape.vocab  # sampling holds several copies in float32
    total = torch.cuda.get_device_properties(0).total_memory
    return min(0.9, round((weights + cache + logits + 1.4 * 2**30) / total, 2))


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


class Work(NamedTuple):
    """The sequences of the measured steps."""

    num_steps: int
    lengths: torch.Tensor  # of prompts and responses
    response_lengths: torch.Tensor

    @staticmethod
    def of(inputs: Inputs, lengths: Lengths) -> "Work":
        """Return the work of steps whose responses have these lengths."""
        responses = torch.tensor(lengths)  # (steps, prompts, samples)
        whole = responses + torch.tensor(inputs.prompt_tokens)[:, None]
        return Work(len(lengths), whole.flatten(), responses.flatten())


def figures_of(
    args: argparse.Namespace,
    num_parameters: int,
    work: Work,
    step_s: float,
    seconds: dict[str, float],
    ranks: int = 1,
) -> dict[str, Any]:
    """Return the figures of steps that take `step_s` seconds, and of their stages."""
    shape, lengths, responses = SHAPES[args.model], work.lengths.double(), work.response_lengths.double()
    num_new_tokens, num_tokens, squares = (
        float(total) / work.num_steps for total in (responses.sum(), lengths.sum(), lengths.square().sum())
    )
    update, attention = 6 * num_parameters * num_tokens, 6 * shape.layers * shape.heads * shape.size_of_head * squares
    peak = peak_flops(gpu_name())

    def mfu(flops: float, stage: str) -> float | None:
        time_s = seconds.get(stage, 0.0)
        return round(flops / time_s / peak / ranks, 4) if peak and time_s > 0.1 else None

    figures = {
        "model": args.model,
        "parameters": num_parameters,
        "sequences": args.prompts * args.samples,
        "prompt_tokens": round(float((lengths - responses).mean()), 1),
        "new_tokens": args.new_tokens,
        "gpu": gpu_name(),
        "ranks": ranks,
        "steps": work.num_steps,
        "seconds_per_step": round(step_s, 3),
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
        "tokens_per_s": round(num_new_tokens / step_s),
        "mfu_update": mfu(update, "update"),
        "mfu_update_with_attention": mfu(update + attention, "update"),
        "mfu_logprobs": mfu(update / 3, "logprobs"),
        "mfu_logprobs_with_attention": mfu((update + attention) / 3, "logprobs"),
    }
    if args.mean_new_tokens:
        figures |= {
            "mean_new_tokens": args.mean_new_tokens,
            "tokens_per_step": round(num_new_tokens),
            "length_mean": round(float(responses.mean()), 1),
            "length_max": int(responses.max()),
        }
    return figures


def start_figures(rows: list[dict[str, Any]], started: float) -> dict[str, Any]:
    """Return the seconds of a start and of each part, from the rows of the steps 0 and 1 in metrics.jsonl. `started` is
    the time at which torchrun was started."""
    total_s = rows[1]["at"] - started
    start, step = ({name[5:]: row[name] for name in row if name.startswith("time/")} for row in rows[:2])
    compile_s = start.pop(NESTED, 0.0) + step.pop(NESTED, 0.0)
    inside = {name: seconds for name, seconds in start.items() if name.startswith(f"{ENGINE}/")}
    if ENGINE in start:
        start[ENGINE] -= sum(inside.values())
    step.pop("step")
    start = {name: start[name] for name in sorted(start, key=lambda name: (name not in FIRST, name.split("/")[0]))}
    parts = start | {f"first {name}": seconds for name, seconds in step.items()}
    parts["other"] = total_s - sum(parts.values())
    shown = {name: round(seconds, 2) for name, seconds in parts.items() if round(seconds, 2)}
    return {"seconds": round(total_s, 2), "parts": shown, "compile": round(compile_s, 2)}
