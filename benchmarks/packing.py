"""The update on packed rows against the same update on padded ones. Prints one JSON line.

    python benchmarks/packing.py [--model 10m] [--sequences 128] [--max-tokens 4096] [--rounds 5]

Lengths are like those of sampled GSM8K answers: prompts of 45 to 200 tokens, responses log-normal with a median of 130,
cut at 512. `padded` is what trainers without packing do, on the same model, tokens, chunks of the head and optimizer:
micro-batches in the order of sampling, each padded to its longest sequence, as many sequences in each as keep the
longest possible one within the budget. Both run in turns, after one round that warms up; their gradient norms must
agree.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from random_model import SHAPES, save_random_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from rl.algo.losses import clipped_ratio
from rl.config import ActorConfig, AlgoConfig, RolloutConfig
from rl.data.batch import Batch
from rl.learner import Learner
from rl.metrics import Measures
from rl.model.head import token_scores
from rl.model.load import load_model

WARM_UP_ROUNDS = 1
MAX_PROMPT, MAX_RESPONSE = 200, 512


def sampled_batch(num_sequences: int, vocab: int) -> Batch:
    generator = random.Random(0)
    prompts = [min(MAX_PROMPT, max(45, round(generator.lognormvariate(4.5, 0.35)))) for _ in range(num_sequences)]
    responses = [min(MAX_RESPONSE, max(10, round(generator.lognormvariate(4.87, 0.5)))) for _ in range(num_sequences)]
    lengths = torch.tensor(prompts) + torch.tensor(responses)
    num_tokens = int(lengths.sum())
    tensors = torch.Generator().manual_seed(0)
    return Batch(
        tokens=torch.randint(0, vocab, (num_tokens,), generator=tensors),
        lengths=lengths,
        prompt_lengths=torch.tensor(prompts),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
        rewards=torch.zeros(num_sequences),
        group_ids=torch.arange(num_sequences),
        truncated=torch.zeros(num_sequences, dtype=torch.bool),
        advantages=torch.randn(num_sequences, generator=tensors),
    )


class Padded:
    """One optimizer step by transformers' own attention over padded rows."""

    def __init__(self, folder: Path, device: torch.device, max_tokens: int, actor: ActorConfig, algo: AlgoConfig):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
        self._device, self._actor, self._algo = device, actor, algo
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=actor.lr, weight_decay=actor.weight_decay)
        self._num_sequences = max(1, max_tokens // (MAX_PROMPT + MAX_RESPONSE))

    def update(self, batch: Batch) -> float:
        """Returns the norm of the gradient."""
        total = int(batch.response_lengths.sum())
        for first in range(0, batch.num_sequences, self._num_sequences):
            sequences = range(first, min(first + self._num_sequences, batch.num_sequences))
            self._accumulate(batch.select(list(sequences)), total)
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._actor.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _accumulate(self, part: Batch, total: int) -> None:
        rows = part.tokens.split(part.lengths.tolist())
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
        places = torch.arange(tokens.shape[1])
        mask = (places < part.lengths.unsqueeze(1)).to(self._device)
        hidden = self._model.get_decoder()(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        response = (places >= part.prompt_lengths.unsqueeze(1)) & (places < part.lengths.unsqueeze(1))
        kept: Tensor = response[:, 1:].to(self._device)
        weight = self._model.get_output_embeddings().weight
        logprobs, _ = token_scores(hidden[:, :-1][kept], weight, tokens[:, 1:][kept], 1.0)
        assert part.advantages is not None
        advantages = torch.repeat_interleave(part.advantages, part.response_lengths).to(self._device)
        algo = self._algo
        policy = clipped_ratio(logprobs, logprobs.detach(), advantages, algo.clip_low, algo.clip_high)
        (policy.loss_sum / total).backward()


def run(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    device = torch.device("cpu")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pg = dist.group.WORLD
    assert pg is not None
    num_parameters = save_random_model(folder, args.model, 2e7, "float32", device)
    actor, algo = ActorConfig(max_tokens_per_micro_batch=args.max_tokens), AlgoConfig()
    model = load_model(folder, DeviceMesh.from_group(pg, "cpu"), device, "float32", trainable=True)
    rounds = WARM_UP_ROUNDS + args.rounds
    learner = Learner(model, pg, device, actor, algo, RolloutConfig(), rounds)
    padded = Padded(folder, device, args.max_tokens, actor, algo)
    batch = sampled_batch(args.sequences, SHAPES[args.model].vocab)
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    for _ in range(rounds):
        start = time.perf_counter()
        learner.update(batch, args.sequences, measures := Measures())
        norm = measures.reduce(pg)["optim/grad_norm"]
        seconds["packed"].append(time.perf_counter() - start)
        start = time.perf_counter()
        padded_norm = padded.update(batch)
        seconds["padded"].append(time.perf_counter() - start)
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
        "packed_s": round(medians["packed"], 3),
        "padded_s": round(medians["padded"], 3),
        "speedup": round(medians["padded"] / medians["packed"], 2),
        "rounds": {name: [round(value, 2) for value in values] for name, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="10m")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(args, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
