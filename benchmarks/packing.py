"""Compare the update on packed rows with the same update on padded rows. Prints one JSON line.

    python benchmarks/packing.py [--model 10m] [--sequences 64] [--max-tokens 4096] [--rounds 5]

Lengths resemble those of sampled GSM8K answers: prompts of 45 to 200 tokens, responses log-normal with a median of 130,
cut at 512. Both padded ways use the same model, tokens, optimizer and chunks of the output head. A padded micro-batch
has as many sequences as fit the token budget if each is as long as the longest:
    padded          all sequences are padded to the longest prompt and response of the batch, as TRL does, and verl
                    unless it is told to remove padding
    padded_each     every micro-batch is padded to its own longest prompt and response
All three ways take turns after a warm-up round, and their gradient norms must agree.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import join_alone
from benchmarks.random_batch import random_batch
from benchmarks.random_model import SHAPES, save_random_model
from rl.algo.losses import clipped_ratio
from rl.config.schema import ActorConfig, AlgoConfig, Config
from rl.data.batch import Batch
from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedModel
from rl.model.head import token_scores
from rl.model.load import load_model
from rl.report.metrics import Measures

WARM_UP_ROUNDS = 1
MAX_PROMPT, MAX_RESPONSE = 200, 512


def sampled_batch(num_sequences: int, vocab: int) -> Batch:
    generator = random.Random(0)
    prompts = [min(MAX_PROMPT, max(45, round(generator.lognormvariate(4.5, 0.35)))) for _ in range(num_sequences)]
    responses = [min(MAX_RESPONSE, max(10, round(generator.lognormvariate(4.87, 0.5)))) for _ in range(num_sequences)]
    return random_batch(torch.tensor(prompts) + torch.tensor(responses), torch.tensor(prompts), vocab)


class Padded:
    """A learner on padded rows with the attention of transformers: prompts on the left, responses on the right. With
    `whole` every micro-batch is padded to the batch's longest prompt and response, otherwise to its own."""

    def __init__(self, folder: Path, max_tokens: int, actor: ActorConfig, algo: AlgoConfig, whole: bool):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self._actor, self._algo, self._max_tokens, self._whole = actor, algo, max_tokens, whole
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=actor.lr, weight_decay=actor.weight_decay)

    def update(self, batch: Batch) -> float:
        """Take one optimizer step, and return the norm of the gradient."""
        total, size = int(batch.response_lengths.sum()), longest(batch)
        count = max(1, self._max_tokens // sum(size))
        for first in range(0, batch.num_sequences, count):
            part = batch.select(list(range(first, min(first + count, batch.num_sequences))))
            self._accumulate(part, size if self._whole else longest(part), total)
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._actor.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _accumulate(self, part: Batch, size: tuple[int, int], total: int) -> None:
        tokens, mask, is_trained = padded_rows(part, *size)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        decoder, weight = self._model.get_decoder(), self._model.get_output_embeddings().weight
        output = decoder(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden = output.last_hidden_state[:, size[0] - 1 : -1]
        logprobs = token_scores(hidden.flatten(0, 1), weight, tokens[:, size[0] :].flatten(), 1.0).logprobs
        assert part.advantages is not None
        advantages = part.advantages[part.loss_mask]
        kept = logprobs[is_trained[:, size[0] :].flatten()]
        policy = clipped_ratio(kept, kept.detach(), advantages, self._algo.clip_low, self._algo.clip_high)
        (policy.loss.sum() / total).backward()


def longest(batch: Batch) -> tuple[int, int]:
    return int(batch.prompt_lengths.max()), int(batch.response_lengths.max())


def padded_rows(part: Batch, prompt_size: int, response_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens, a mask of those that are not padding, and a mask of those that are trained on."""
    tokens = torch.zeros(part.num_sequences, prompt_size + response_size, dtype=torch.int64)
    first = (prompt_size - part.prompt_lengths).unsqueeze(1)
    places = torch.arange(tokens.shape[1])
    mask = (places >= first) & (places < first + part.lengths.unsqueeze(1))
    tokens[mask] = part.tokens
    is_trained = torch.zeros_like(mask)
    is_trained[mask] = part.loss_mask
    return tokens, mask.long(), is_trained


def run(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    device = torch.device("cpu")
    pg = join_alone(device)
    num_parameters = save_random_model(folder, args.model, 2e7, "float32", device)
    actor, algo = ActorConfig(max_tokens_per_micro_batch=args.max_tokens, offload="none"), AlgoConfig()
    model = load_model(folder, DeviceMesh.from_group(pg, "cpu"), device, "float32", trainable=True)
    rounds = WARM_UP_ROUNDS + args.rounds
    learner = PolicyTrainer(ShardedModel(model, pg, device), Config(actor=actor, algo=algo), rounds)
    ways = {name: Padded(folder, args.max_tokens, actor, algo, name == "padded") for name in ("padded", "padded_each")}
    batch = sampled_batch(args.sequences, SHAPES[args.model].vocab)
    seconds: dict[str, list[float]] = {"packed": [], "padded": [], "padded_each": []}
    for _ in range(rounds):
        start = time.perf_counter()
        learner.update(batch, args.sequences, measures := Measures())
        norm = measures.reduce(pg)["optim/grad_norm"]
        seconds["packed"].append(time.perf_counter() - start)
        for name, padded in ways.items():
            start = time.perf_counter()
            padded_norm = padded.update(batch)
            seconds[name].append(time.perf_counter() - start)
            assert abs(norm - padded_norm) < 1e-3 * padded_norm, (norm, padded_norm)
    medians = {name: statistics.median(values[WARM_UP_ROUNDS:]) for name, values in seconds.items()}
    return {
        "benchmark": "packing",
        "model": args.model,
        "parameters": num_parameters,
        "sequences": args.sequences,
        "tokens": batch.num_tokens,
        "longest": int(batch.lengths.max()),
        "max_tokens": args.max_tokens,
        "seconds": {name: round(median, 2) for name, median in medians.items()},
        "speedup": round(medians["padded"] / medians["packed"], 2),
        "speedup_each": round(medians["padded_each"] / medians["packed"], 2),
        "rounds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="10m")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(args, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
