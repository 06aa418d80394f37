"""Loss and gradient of the sharded learner against a plain single-process reference, written here."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl.data.batch import Batch
from tests.launcher import finish, start

TEMPERATURE = 0.8
NUM_PROMPTS = 5
ACTOR = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05, "warmup_steps": 2, "lr_schedule": "linear"}
ALGO = {"clip_low": 0.1, "clip_high": 0.3, "kl_coef": 0.2, "kl_estimator": "k3", "num_mini_batches": 2, "num_epochs": 2}
SHAPE = {
    "vocab_size": 37,  # divides by no number of ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def make_model(folder: Path, kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "llama, tied":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False))
    model.save_pretrained(folder)
    return model.train()


def make_batch() -> Batch:
    """5 groups of 3 rollouts with lengths from 3 to 20; old logprobs are off by enough to reach both clips."""
    torch.manual_seed(1)
    lengths = torch.randint(3, 21, (NUM_PROMPTS * 3,))
    num_tokens = int(lengths.sum())
    return Batch(
        tokens=torch.randint(0, SHAPE["vocab_size"], (num_tokens,)),
        lengths=lengths,
        prompt_lengths=torch.minimum(torch.randint(1, 6, lengths.shape), lengths - 1),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
        rewards=torch.zeros(lengths.shape),
        group_ids=torch.arange(NUM_PROMPTS).repeat_interleave(3),
        truncated=torch.zeros(lengths.shape, dtype=torch.bool),
        old_logprobs=-math.log(SHAPE["vocab_size"]) + 0.3 * torch.randn(num_tokens),
        ref_logprobs=-math.log(SHAPE["vocab_size"]) + 0.3 * torch.randn(num_tokens),
        advantages=torch.randn(lengths.shape),
    )


def token_logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Of tokens[1:], one sequence at a time."""
    logits = model(tokens.unsqueeze(0)).logits[0, :-1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1)


def reference_update(model: torch.nn.Module, batch: Batch) -> list[tuple[float, float, int]]:
    """Two epochs of two optimizer steps; returns policy loss, KL and number of tokens of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=ACTOR["lr"], weight_decay=ACTOR["weight_decay"])
    starts = batch.cu_lengths.tolist()
    # warm-up over 2 of 4 steps, then linearly to 0
    rates = iter([ACTOR["lr"] * factor for factor in (0.5, 1.0, 1.0, 0.5)])
    losses = []
    for mini_batch in [(0, 1, 2), (3, 4)] * 2:  # position * 2 // 5
        policy_terms, kl_terms = [], []
        for s in range(batch.num_sequences):
            if int(batch.group_ids[s]) not in mini_batch:
                continue
            first, end, prompt = starts[s], starts[s + 1], int(batch.prompt_lengths[s])
            new = token_logprobs(model, batch.tokens[first:end])[prompt - 1 :]
            old, ref = batch.old_logprobs[first + prompt : end], batch.ref_logprobs[first + prompt : end]
            for n, o, r in zip(new, old, ref, strict=True):
                ratio, advantage = torch.exp(n - o), batch.advantages[s]
                clipped = min(max(ratio, torch.tensor(0.9)), torch.tensor(1.3))
                policy_terms.append(-min(ratio * advantage, clipped * advantage))
                kl_terms.append(torch.exp(r - n) - 1 - (r - n))
        policy, kl = torch.stack(policy_terms).mean(), torch.stack(kl_terms).mean()
        (policy + ALGO["kl_coef"] * kl).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR["max_grad_norm"])
        optimizer.param_groups[0]["lr"] = next(rates)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((policy.item(), kl.item(), len(policy_terms)))
    return losses


MODELS = ("llama, tied", "qwen3, untied")
SPLITS = {
    1: [(10_000, False, "none"), (25, False, "full")],
    2: [(25, False, "selective")],
    4: [(40, False, "full"), (1, True, "none")],
}  # tokens a micro-batch, idle, which activations are recomputed


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory):
    folder, batch = tmp_path_factory.mktemp("learner"), make_batch()
    save_file(batch._tensors(), folder / "batch.safetensors")
    expected = {}
    for kind in MODELS:
        model = make_model(folder / kind, kind)
        losses = reference_update(model, batch)
        expected[kind] = dict(model.named_parameters()), losses
    return folder, expected


def run_jobs(folder: Path, num_ranks: int, jobs: list[dict]) -> None:
    fixed = {"algo": ALGO, "temperature": TEMPERATURE, "num_prompts": NUM_PROMPTS, "old_logprobs": "given"}
    arguments = [str(folder), json.dumps([fixed | job for job in jobs])]
    process = start(f"--nproc-per-node={num_ranks}", "tests/distributed/update_worker.py", *arguments)
    output = finish(process, 100)
    assert process.returncode == 0, output[-4000:]


def check_losses(values: dict[str, float], losses: list[tuple[float, float, int]], tolerance: float) -> None:
    count = sum(n for _, _, n in losses)
    policy, kl = sum(policy * n for policy, _, n in losses) / count, sum(kl * n for _, kl, n in losses) / count
    assert values["loss/policy"] == pytest.approx(policy, abs=tolerance)
    assert values["loss/kl"] == pytest.approx(kl, abs=tolerance)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ranks", SPLITS)
def test_one_denominator_and_equal_micro_batch_counts(references, num_ranks: int) -> None:
    """The update equals the reference for any number of ranks and any split, with uneven and empty work."""
    folder, expected = references
    jobs = [
        {
            "name": f"{kind} {num_ranks} {max_tokens} {idle}",
            "model": kind,
            "dtype": "float32",
            "actor": ACTOR | {"max_tokens_per_micro_batch": max_tokens, "recompute": recompute},
            "idle": idle,
        }
        for kind in MODELS
        for max_tokens, idle, recompute in SPLITS[num_ranks]
    ]
    run_jobs(folder, num_ranks, jobs)
    for job in jobs:
        weights, losses = expected[job["model"]]
        check_losses(json.loads((folder / f"{job['name']}.json").read_text()), losses, tolerance=1e-5)
        got = load_file(folder / f"{job['name']}.safetensors")
        assert got.keys() == weights.keys()
        for name, tensor in weights.items():
            difference = (got[name] - tensor.detach()).abs().max().item()
            assert difference < 2e-5, f"{name} of {job['name']} is off by {difference}"  # a step moves it by up to 1e-3


@pytest.mark.timeout(120)
def test_on_policy_data_need_no_pass_for_old_logprobs(references) -> None:
    """One update: the same weights and losses as with old logprobs from a pass of their own, and without any the update
    itself measures how far the engine is from the learner."""
    folder, _ = references
    algo = ALGO | {"num_mini_batches": 1, "num_epochs": 1, "kl_coef": 0.0}
    jobs = [
        {
            "name": f"old logprobs {source}",
            "model": MODELS[0],
            "dtype": "float32",
            "actor": ACTOR | {"max_tokens_per_micro_batch": 25},
            "algo": algo,
            "idle": False,
            "old_logprobs": source,
        }
        for source in ("none", "by a pass of their own")
    ]
    run_jobs(folder, 2, jobs)
    none, passed = (json.loads((folder / f"{job['name']}.json").read_text()) for job in jobs)
    for name in ("loss/policy", "optim/grad_norm", "policy/entropy", "policy/clip_fraction"):
        assert none[name] == pytest.approx(passed[name], abs=1e-5), name
    assert none["policy/clip_fraction"] == 0.0
    assert none["policy/mismatch_kl"] > 1 and "policy/mismatch_kl" not in passed  # the batch has no engine's logprobs
    without, with_pass = (load_file(folder / f"{job['name']}.safetensors") for job in jobs)
    for name, tensor in without.items():
        assert (tensor - with_pass[name]).abs().max() < 2e-5, name


@pytest.mark.timeout(120)
def test_bfloat16_keeps_float32_masters(references) -> None:
    """Passes in bfloat16 come close to the float32 losses, and updates smaller than its precision are not lost."""
    folder, expected = references
    actor = ACTOR | {"max_tokens_per_micro_batch": 25}
    job = {"name": "bf16", "model": MODELS[0], "dtype": "bfloat16", "actor": actor, "idle": False}
    run_jobs(folder, 2, [job])
    weights, losses = expected[MODELS[0]]
    check_losses(json.loads((folder / "bf16.json").read_text()), losses, tolerance=2e-2)
    for name, tensor in load_file(folder / "bf16.safetensors").items():
        assert tensor.dtype == torch.float32
        assert (tensor - weights[name].detach()).abs().max() < 4e-3, name
        assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name} was rounded to bfloat16"
