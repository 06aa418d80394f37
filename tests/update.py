"""A plain single-process update as the reference for the sharded trainers, and jobs that run these."""

import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from launch.environment import activated_environment
from rl.data.batch import Batch, batch_of_responses
from rl.data.shared_prompts import repeated_prompts
from rl.model.adapter_names import plain_name
from tests.conversations import Said, Sample, batch_of_conversations
from tests.launcher import finish, spawn

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 20
NUM_PROMPTS = 5
ACTOR = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05, "warmup_steps": 2, "lr_schedule": "linear"}
ALGO = {"clip_low": 0.1, "clip_high": 0.3, "kl_coef": 0.2, "kl_estimator": "k3", "num_mini_batches": 2, "num_epochs": 2}
MIN_LIKENESS = 0.99  # cosine of the changes of weights; 0.9997 in bfloat16
CRITIC = {"lr": 3e-3, "clip": 0.05}
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


def make_model(folder: Path, kind: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    if kind == "llama, tied":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False))
    model.save_pretrained(folder)
    return model.train()


def make_batch(shares_prompts: bool = False) -> Batch:
    """Build 5 groups of 3 rollouts with lengths from 3 to 20. Old logprobs differ enough to reach both clips. With
    `shares_prompts`, the rollouts of four groups begin with the same prompt, as in a run."""
    torch.manual_seed(1)
    lengths = torch.randint(3, 21, (NUM_PROMPTS * 3,))
    num_tokens = int(lengths.sum())
    tokens = torch.randint(0, SHAPE["vocab_size"], (num_tokens,))
    prompt_lengths = torch.minimum(torch.randint(1, 6, lengths.shape), lengths - 1)
    starts = lengths.cumsum(0) - lengths
    for first in (0, 3, 6, 9) if shares_prompts else ():
        prompt_lengths[first : first + 3] = size = int(lengths[first : first + 3].min()) - 1
        for start in starts[first + 1 : first + 3].tolist():
            tokens[start : start + size] = tokens[starts[first] : starts[first] + size]
    return batch_of_responses(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=-math.log(SHAPE["vocab_size"]) + 0.3 * torch.randn(num_tokens),
        rewards=torch.zeros(lengths.shape),
        group_ids=torch.arange(NUM_PROMPTS).repeat_interleave(3),
        truncated=torch.arange(len(lengths)) % 4 == 0,
        old_logprobs=-math.log(SHAPE["vocab_size"]) + 0.3 * torch.randn(num_tokens),
        ref_logprobs=-math.log(SHAPE["vocab_size"]) + 0.3 * torch.randn(num_tokens),
        advantages=torch.randn(lengths.shape).repeat_interleave(lengths),  # those in prompts are never read
        values=0.1 * torch.randn(num_tokens),
        returns=torch.randn(num_tokens),
    )


def token_logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the logprobs of tokens[1:]."""
    logits = model(tokens.unsqueeze(0)).logits[0, :-1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1)


def reference_update(
    model: torch.nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None = None
) -> list[tuple[float, float, float, int]]:
    """Run two epochs of two optimizer steps; return policy loss, KL to the reference, KL from the old to
    the new policy, and number of tokens of each step."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=ACTOR["lr"], weight_decay=ACTOR["weight_decay"])
    starts = batch.cu_lengths.tolist()
    # warm-up over 2 of 4 steps, then linearly to 0
    rates = iter([optimizer.defaults["lr"] * factor for factor in (0.5, 1.0, 1.0, 0.5)])
    losses = []
    for mini_batch in [(0, 1, 2), (3, 4)] * 2:  # position * 2 // 5
        policy_terms, kl_terms, moved_terms = [], [], []
        for s in range(batch.num_sequences):
            if int(batch.group_ids[s]) not in mini_batch:
                continue
            first, end, prompt = starts[s], starts[s + 1], int(batch.prompt_lengths[s])
            new = token_logprobs(model, batch.tokens[first:end])[prompt - 1 :]
            old, ref = batch.old_logprobs[first + prompt : end], batch.ref_logprobs[first + prompt : end]
            for n, o, r in zip(new, old, ref, strict=True):
                ratio, advantage = torch.exp(n - o), batch.advantages[first]
                clipped = min(max(ratio, torch.tensor(0.9)), torch.tensor(1.3))
                policy_terms.append(-min(ratio * advantage, clipped * advantage))
                kl_terms.append(torch.exp(r - n) - 1 - (r - n))
                moved_terms.append(ratio.item() - 1 - (n - o).item())
        policy, kl = torch.stack(policy_terms).mean(), torch.stack(kl_terms).mean()
        (policy + ALGO["kl_coef"] * kl).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR["max_grad_norm"])
        optimizer.param_groups[0]["lr"] = next(rates)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((policy.item(), kl.item(), statistics.mean(moved_terms), len(policy_terms)))
    return losses


# Settings of algo, each with the loss of one sequence by hand: new, old, rollout and reference logprobs, advantages,
# entropies and KLs over the whole vocabulary of its tokens in, losses of these tokens out.
VARIANTS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "gspo": ({"loss": "gspo", "loss_norm": "sequence"}, lambda n, o, p, r, a, e, k: gspo(n, o, a)),
    "cispo": (
        {"loss": "cispo"},
        lambda n, o, p, r, a, e, k: -torch.exp(n - o).clamp(0.9, 1.3).detach() * a * n,
    ),
    "dual clip": (
        {"dual_clip": 1.35, "loss_norm": "constant"},
        lambda n, o, p, r, a, e, k: torch.where(a < 0, torch.minimum(clip(n, o, a), -1.35 * a), clip(n, o, a)),
    ),
    "entropy": ({"entropy_coef": 0.3}, lambda n, o, p, r, a, e, k: clip(n, o, a) - 0.3 * e),
    "full KL": (
        {"kl_coef": 0.7, "kl_estimator": "full", "loss_norm": "sequence"},
        lambda n, o, p, r, a, e, k: clip(n, o, a) + 0.7 * k,
    ),
    "k2": ({"kl_coef": 0.7, "kl_estimator": "k2"}, lambda n, o, p, r, a, e, k: clip(n, o, a) + 0.35 * (r - n) ** 2),
    "token correction": (
        {"correction": "token", "correction_limit": 1.2},
        lambda n, o, p, r, a, e, k: clip(n, o, a) * torch.exp(o - p).clamp(max=1.2),
    ),
    "sequence mask": (
        {"correction": "sequence_mask", "correction_limit": 1.5, "mask_truncated": True},
        lambda n, o, p, r, a, e, k: clip(n, o, a) * mask(torch.exp((o - p).sum()), 0, 1.5),
    ),
    "recorded logprobs": ({"old_logprobs": "rollout"}, lambda n, o, p, r, a, e, k: clip(n, p, a)),
    "recorded logprobs, gspo": (
        {"old_logprobs": "rollout", "loss": "gspo", "loss_norm": "sequence"},
        lambda n, o, p, r, a, e, k: gspo(n, p, a),
    ),
    "recorded logprobs, cispo": (
        {"old_logprobs": "rollout", "loss": "cispo"},
        lambda n, o, p, r, a, e, k: -torch.exp(n - p).clamp(0.9, 1.3).detach() * a * n,
    ),
    "two-sided sequence mask": (
        {"correction": "sequence_mask_two_sided", "correction_limit": 1.5},
        lambda n, o, p, r, a, e, k: clip(n, o, a) * mask(torch.exp((o - p).sum()), 1 / 1.5, 1.5),
    ),
}


def clip(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp(new - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages)


def gspo(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Compute the paper's first form: one ratio, with its gradient."""
    ratio = torch.exp((new - old).mean())
    return torch.stack([-torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a) for a in advantages])


def mask(weight: Tensor, lowest: float, highest: float) -> Tensor:
    return weight if lowest <= weight <= highest else torch.tensor(0.0)


def variant_update(model: torch.nn.Module, reference: torch.nn.Module, batch: Batch, name: str) -> tuple[float, float]:
    """Run one optimizer step over the whole batch, one sequence at a time; return loss and gradient norm."""
    settings, loss_of = VARIANTS[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=ACTOR["lr"] / 2, weight_decay=ACTOR["weight_decay"])
    starts, norm, sums, tokens, sequences = batch.cu_lengths.tolist(), settings.get("loss_norm", "token"), [], 0, 0
    for s in range(batch.num_sequences):
        if settings.get("mask_truncated") and batch.truncated[s]:
            continue
        first, end, prompt = starts[s], starts[s + 1], int(batch.prompt_lengths[s])
        span, places = slice(first + prompt, end), slice(prompt - 1, end - first - 1)
        whole = batch.tokens[first:end]
        log_p = torch.log_softmax(model(whole.unsqueeze(0)).logits[0, places] / TEMPERATURE, -1)
        with torch.no_grad():
            log_q = torch.log_softmax(reference(whole.unsqueeze(0)).logits[0, places] / TEMPERATURE, -1)
        new = log_p.gather(1, whole[prompt:, None]).squeeze(1)
        entropy, kl = -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
        others = (field[span] for field in (batch.old_logprobs, batch.rollout_logprobs, batch.ref_logprobs))
        losses = loss_of(new, *others, batch.advantages[span], entropy, kl)
        sums.append(losses.mean() if norm == "sequence" else losses.sum())
        tokens, sequences = tokens + len(new), sequences + 1
    denominator = {"token": tokens, "sequence": sequences, "constant": sequences * MAX_NEW_TOKENS}[norm]
    loss = torch.stack(sums).sum() / denominator
    loss.backward()
    norm_of_gradient = torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR["max_grad_norm"])
    optimizer.step()
    return loss.item(), norm_of_gradient.item()


# Settings of algo for batches of conversations, whose advantages the worker computes too.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo"},
    "dr_grpo, masked": {"advantage": "dr_grpo", "loss_norm": "constant", "mask_truncated": True},
    "rloo, gspo": {"advantage": "rloo", "loss": "gspo", "loss_norm": "sequence"},
    "reinforce_pp": {"advantage": "reinforce_pp", "gamma": 0.9},
    "gae": {"advantage": "gae", "gamma": 0.95, "lam": 0.8, "loss_norm": "sequence"},
}


def make_samples() -> list[list[Sample]]:
    """Return 5 groups of 3 conversations with 1 to 3 stretches of 1 to 3 turns. One is empty, and some are cut."""
    choose = random.Random(3)

    def tokens(most: int) -> list[int]:
        return [choose.randrange(SHAPE["vocab_size"]) for _ in range(choose.randint(1, most))]

    groups = []
    for group in range(NUM_PROMPTS):
        samples = []
        for number in range(3):
            turn, stretches = 0, []
            for _ in range(choose.randint(1, 3)):
                stretch: list[Said | Sequence[int]] = [tokens(4)]
                for place in range(choose.randint(1, 3)):
                    stretch += [tokens(3)] * (place > 0) + [Said(turn, tokens(3))]
                    turn += 1
                stretches.append(stretch)
            if (group, number) == (2, 1):
                stretches = [[tokens(4)]]
            samples.append(Sample(choose.choice([0.0, 0.5, 1.0, 2.0]), stretches, choose.random() < 0.25))
        groups.append(samples)
    return groups


def make_conversations() -> Batch:
    """Return the samples as a batch, with random logprobs and values."""
    batch = batch_of_conversations(make_samples())
    generator = torch.Generator().manual_seed(4)
    old, rollout, values = torch.randn(3, batch.num_tokens, generator=generator)
    likely = -math.log(SHAPE["vocab_size"])
    return batch.replace(old_logprobs=likely + 0.3 * old, rollout_logprobs=likely + 0.3 * rollout, values=0.5 * values)


def plain_credit(groups: list[list[Sample]], values: list[list[float]], settings: dict[str, Any]) -> list[list[float]]:
    """Return the advantages of the sampled tokens of each conversation, which have these values."""
    advantage, gamma = settings["advantage"], settings.get("gamma", 1.0)
    credit: list[list[float]] = []
    for group in groups:
        rewards = [each.reward for each in group]
        for sample in group:
            steps = values[len(credit)]
            count, mean = len(steps), statistics.mean(rewards)
            if advantage == "grpo":
                deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
                credit.append([(sample.reward - mean) / (deviation + 1e-6)] * count)
            elif advantage == "dr_grpo":
                credit.append([sample.reward - mean] * count)
            elif advantage == "rloo":
                others = (sum(rewards) - sample.reward) / (len(rewards) - 1)
                credit.append([sample.reward - others] * count)
            elif advantage == "reinforce_pp":
                credit.append([sample.reward * gamma ** (count - 1 - step) for step in range(count)])
            else:
                found, later = [], 0.0
                for step in reversed(range(count)):
                    is_last = step == count - 1
                    following = sample.reward if is_last else gamma * steps[step + 1]
                    later = following - steps[step] + gamma * settings["lam"] * later
                    found.append(later)
                credit.append(found[::-1])
    if advantage in ("reinforce_pp", "gae"):
        flat = [each for part in credit for each in part]
        mean, deviation = statistics.mean(flat), statistics.stdev(flat)
        credit = [[(each - mean) / deviation for each in part] for part in credit]
    return credit


def conversation_update(model: torch.nn.Module, settings: dict[str, Any]) -> tuple[float, float]:
    """Run one optimizer step over the samples, one stretch at a time; return loss and gradient norm."""
    batch, place, kept, stretches = make_conversations(), 0, [], []
    assert batch.old_logprobs is not None and batch.values is not None
    values: list[list[float]] = []
    for group in make_samples():
        kept.append([each for each in group if not (each.is_truncated and settings.get("mask_truncated"))])
        for sample in group:
            is_kept = sample in kept[-1]
            values += [[]] * is_kept
            for stretch in sample.stretches:
                tokens, sampled = [], []
                for part in stretch:
                    added = part.tokens if isinstance(part, Said) else part
                    sampled += range(len(tokens), len(tokens) + len(added)) if isinstance(part, Said) else []
                    tokens += added
                if is_kept:
                    places = [place + each for each in sampled]
                    values[-1] = values[-1] + batch.values[places].tolist()
                    stretches.append((len(values) - 1, tokens, sampled, batch.old_logprobs[places]))
                place += len(tokens)
    assert place == batch.num_tokens
    credit = [iter(each) for each in plain_credit(kept, values, settings)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=ACTOR["lr"] / 2, weight_decay=ACTOR["weight_decay"])
    norm, sums, num_tokens, num_sampled = settings.get("loss_norm", "token"), [], 0, 0
    for number, tokens, sampled, old in stretches:
        if not sampled:
            continue
        new = token_logprobs(model, torch.tensor(tokens))[[each - 1 for each in sampled]]
        advantages = torch.tensor([next(credit[number]) for _ in sampled])
        losses = (gspo if settings.get("loss") == "gspo" else clip)(new, old, advantages)
        sums.append(losses.mean() if norm == "sequence" else losses.sum())
        num_tokens, num_sampled = num_tokens + len(sampled), num_sampled + 1
    denominator = {"token": num_tokens, "sequence": num_sampled, "constant": len(stretches) * MAX_NEW_TOKENS}[norm]
    loss = torch.stack(sums).sum() / denominator
    loss.backward()
    norm_of_gradient = torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR["max_grad_norm"])
    optimizer.step()
    return loss.item(), norm_of_gradient.item()


class CriticResult(NamedTuple):
    """Values, metrics and weights of a critic after an update."""

    weights: dict[str, Tensor]
    values: Tensor  # [R]
    loss: float
    num_clipped: int  # of the terms of all its steps
    grad_norm: float


def critic_update(model: torch.nn.Module, batch: Batch) -> CriticResult:
    """Train a head of zeros on the model's layers for two epochs of two optimizer steps, one sequence at a time."""
    model.lm_head = torch.nn.Linear(SHAPE["hidden_size"], 1, bias=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CRITIC["lr"], weight_decay=ACTOR["weight_decay"])
    starts, clip, terms, norms, num_clipped = batch.cu_lengths.tolist(), CRITIC["clip"], [], [], 0

    def values_of_sequence(s: int) -> Tensor:
        """Return the value before each response token."""
        tokens = batch.tokens[starts[s] : starts[s + 1]]
        hidden = model.model(tokens.unsqueeze(0)).last_hidden_state[0]
        return model.lm_head(hidden).squeeze(1)[batch.prompt_lengths[s] - 1 : -1]

    for mini_batch in [(0, 1, 2), (3, 4)] * 2:  # position * 2 // 5
        losses = []
        for s in range(batch.num_sequences):
            if int(batch.group_ids[s]) in mini_batch:
                span = slice(starts[s] + int(batch.prompt_lengths[s]), starts[s + 1])
                new, old, returns = values_of_sequence(s), batch.values[span], batch.returns[span]
                for n, o, r in zip(new, old, returns, strict=True):
                    held = min(max(n, o - clip), o + clip)
                    num_clipped += int((held - r) ** 2 > (n - r) ** 2)
                    losses.append(max((n - r) ** 2, (held - r) ** 2) / 2)
        loss = torch.stack(losses).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR["max_grad_norm"]).item())
        optimizer.step()
        optimizer.zero_grad()
        terms += [term.item() for term in losses]
    weights = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        values = torch.cat([values_of_sequence(s) for s in range(batch.num_sequences)])
    return CriticResult(weights, values, sum(terms) / len(terms), num_clipped, sum(norms) / len(norms))


@torch.no_grad()
def certainties(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logprobs and KL(uniform, policy) of all response tokens."""
    logprobs, found, size = [], [], SHAPE["vocab_size"]
    for s, tokens in enumerate(batch.tokens.split(batch.lengths.tolist())):
        first = int(batch.prompt_lengths[s]) - 1
        logprobs.append(token_logprobs(model, tokens)[first:])
        log_p = torch.log_softmax(model(tokens.unsqueeze(0)).logits[0, first:-1] / TEMPERATURE, -1)
        found.append((1 / size * (math.log(1 / size) - log_p)).sum(-1))
    return torch.cat(logprobs), torch.cat(found)


MODELS = ("llama, tied", "qwen3, untied")
SHARED = "shared.safetensors"  # a batch whose rollouts share prompts


class Reference(NamedTuple):
    folder: Path  # of the models and the batch, and of what jobs write
    # By model: weights, losses. Also those of the first model with the batch SHARED.
    expected: dict[str, tuple[dict[str, Tensor], list[tuple[float, float, float, int]]]]
    variants: dict[str, tuple[dict[str, Tensor], float, float]]  # weights, loss and gradient norm
    conversations: dict[str, tuple[dict[str, Tensor], float, float]]  # the same
    critics: dict[str, CriticResult]  # by model
    critic_without_truncated: CriticResult  # of the first model
    certainties: dict[str, tuple[Tensor, Tensor]]  # by model: logprobs and self-certainty of response tokens


def make_reference(folder: Path) -> Reference:
    batch, expected, variants, conversations, critics, certain = make_batch(), {}, {}, {}, {}, {}
    (folder / "batch.safetensors").write_bytes(batch.to_bytes())
    (folder / "conversations.safetensors").write_bytes(make_conversations().to_bytes())
    shared = make_batch(shares_prompts=True)
    (folder / SHARED).write_bytes(shared.to_bytes())
    model = make_model(folder / MODELS[0], MODELS[0])
    losses = reference_update(model, shared)
    expected[SHARED] = {name: parameter.detach() for name, parameter in model.named_parameters()}, losses
    for kind in MODELS:
        model = make_model(folder / kind, kind)
        certain[kind] = certainties(model, batch)
        losses = reference_update(model, batch)
        expected[kind] = {name: parameter.detach() for name, parameter in model.named_parameters()}, losses
        critics[kind] = critic_update(make_model(folder / kind, kind), batch)
    other = make_model(folder / "reference", MODELS[0], seed=2)
    for name in VARIANTS:
        model = make_model(folder / MODELS[0], MODELS[0])
        results = variant_update(model, other, batch, name)
        variants[name] = {name: parameter.detach() for name, parameter in model.named_parameters()}, *results
    for name, settings in CONVERSATIONS.items():
        model = make_model(folder / MODELS[0], MODELS[0])
        results = conversation_update(model, settings)
        conversations[name] = {name: parameter.detach() for name, parameter in model.named_parameters()}, *results
    kept = batch.select(batch.trained_sequences(mask_truncated=True))
    without_truncated = critic_update(make_model(folder / MODELS[0], MODELS[0]), kept)
    return Reference(folder, expected, variants, conversations, critics, without_truncated, certain)


LORA = {"rank": 2, "alpha": 3}  # on 4 ranks, two of them hold no row of A
LORA_LR = {"sgd": 0.5, "muon": 1e-2}  # of optimizers that move adapters less than AdamW does


class LoraResult(NamedTuple):
    """What an update has made of a model with adapters."""

    weights: dict[str, Tensor]  # of everything that is trained, by their names in files
    gradients: dict[str, Tensor]  # of the first optimizer step, after clipping
    losses: list[tuple[float, float, float, int]]  # see `reference_update`


def make_adapted(folder: Path, kind: str) -> torch.nn.Module:
    """Return a model with peft's adapters. Write their values to a file, from which jobs take them. Both matrices are
    random: if B were 0, as in a new run, A would have no gradient in the first step."""
    import peft  # takes seconds

    model = make_model(folder / kind, kind)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    settings = peft.LoraConfig(
        r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=[name for name in names if name != "lm_head"]
    )
    model = peft.inject_adapter_in_model(settings, model)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.uniform_(-0.3, 0.3, generator=generator)
    save_file(trained_weights(model), folder / f"{kind}.adapters.safetensors")
    return model


def trained_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {plain_name(name): parameter.detach().clone() for name, parameter in named if parameter.requires_grad}


def lora_optimizer(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = ACTOR["weight_decay"]
    if name == "sgd":
        return torch.optim.SGD(trained, LORA_LR[name], momentum=0.9, weight_decay=decay)
    if name == "muon":
        return torch.optim.Muon(trained, LORA_LR[name], decay, 0.9, adjust_lr_fn="match_rms_adamw")
    return torch.optim.AdamW(trained, ACTOR["lr"], weight_decay=decay)


def lora_update(model: torch.nn.Module, batch: Batch, optimizer_name: str = "adamw") -> LoraResult:
    """Train the adapters of a plain model in one process."""
    optimizer, gradients = lora_optimizer(model, optimizer_name), dict[str, Tensor]()

    def keep(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(plain_name(name), parameter.grad.clone())

    optimizer.register_step_pre_hook(keep)
    losses = reference_update(model, batch, optimizer)
    return LoraResult(trained_weights(model), gradients, losses)


def lora_job(name: str, model: str, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    """Build a job that trains adapters, of the policy or of a critic."""
    lr = {"lr": LORA_LR[options["optimizer"]]} if options.get("optimizer") in LORA_LR else {}
    return job(name, model, dtype, **lr, **options) | {"lora": LORA}


def check_lora(
    folder: Path, wanted: LoraResult, job: dict[str, Any], loss_tolerance: float, weight_tolerance: float
) -> None:
    """Compare the gradients, losses and weights of a job with those of a plain model. Nothing else may have changed."""
    check_losses(wanted.losses, values_of(folder, job), loss_tolerance, job)
    begun = load_file(folder / f"{job['model']}.adapters.safetensors")
    got, base = weights_of(folder, job), load_file(folder / job["model"] / "model.safetensors")
    trained = {name: got.pop(name) for name in begun}
    check_weights(trained, wanted.weights, weight_tolerance, job)
    stored = {name: tensor.to(getattr(torch, job["dtype"])) for name, tensor in base.items() if name in got}
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items()), "a frozen weight has changed"
    assert len(stored) == len(got), "the model has other weights than its files"
    num_trained, num_frozen = (sum(tensor.numel() for tensor in of.values()) for of in (trained, got))
    check_flops(values_of(folder, job), 6 * num_trained + 4 * num_frozen, job)
    gradients = load_file(folder / f"{job['name']}.gradients.safetensors")
    least = 0.999999 if job["dtype"] == "float32" else MIN_LIKENESS
    check_likeness(gradients, wanted.gradients, least, job)
    moves, expected = ({name: of[name] - begun[name] for name in begun} for of in (trained, wanted.weights))
    check_likeness(moves, expected, MIN_LIKENESS, job)


def check_likeness(got: dict[str, Tensor], wanted: dict[str, Tensor], least: float, job: dict[str, Any]) -> None:
    """Check the direction of each tensor, and its length."""
    assert got.keys() == wanted.keys()
    length = 1e-3 if least > MIN_LIKENESS else 0.05  # those of gradients in bfloat16 differ by up to 0.024
    for name, tensor in wanted.items():
        likeness = F.cosine_similarity(got[name].flatten().double(), tensor.flatten().double(), 0).item()
        assert likeness > least, f"{name} points elsewhere: {likeness} with {job}"
        assert math.isclose(got[name].norm(), tensor.norm(), rel_tol=length), f"the length of {name} differs with {job}"


def job(name: str, model: str, dtype: str = "float32", max_tokens: int = 25, **options: Any) -> dict[str, Any]:
    """Build a job. `options` are settings of the actor, or `idle` (the last rank owns nothing), or `at_once` (the whole
    model is gathered at once, as small ones are), or the `device`."""
    others = {"idle": options.pop("idle", False), "device": options.pop("device", "cpu")}
    others["at_once"] = options.pop("at_once", False)
    plain = {"max_tokens_per_micro_batch": max_tokens, "compile": False, "offload": "none", "recompute": "none"}
    actor = ACTOR | plain | options
    fixed = {"algo": ALGO, "temperature": TEMPERATURE, "num_prompts": NUM_PROMPTS, "old_logprobs": "given"}
    fixed |= {"max_new_tokens": MAX_NEW_TOKENS, "frozen": [], "edits": {}, "poisoned": "", "all_truncated": False}
    fixed |= {"lags": None, "max_mismatch_kl": 0.0, "batch": "batch.safetensors", "lora": None}
    return {"name": name, "model": model, "dtype": dtype, "actor": actor} | others | fixed


def spoilt_token(batch: Batch, is_truncated: bool) -> int:
    """Return a response token of negative advantage, so that no clip bounds its loss."""
    assert batch.advantages is not None
    is_cut = torch.repeat_interleave(batch.truncated, batch.lengths)
    fitting = batch.loss_mask & (batch.advantages < 0) & (is_cut == is_truncated)
    return int(fitting.nonzero()[0])


def shared_job(name: str, **options: Any) -> dict[str, Any]:
    """A job with rollouts that begin with the same prompts."""
    return job(name, MODELS[0], **options) | {"batch": SHARED}


def variant_job(name: str) -> dict[str, Any]:
    settings = {"clip_low": ALGO["clip_low"], "clip_high": ALGO["clip_high"], **VARIANTS[name][0]}
    return job(name, MODELS[0]) | {"algo": settings}


def conversation_job(name: str, num_ranks: int) -> dict[str, Any]:
    settings = {"clip_low": ALGO["clip_low"], "clip_high": ALGO["clip_high"], **CONVERSATIONS[name]}
    batch = {"batch": "conversations.safetensors"}
    return job(f"conversations, {name}, {num_ranks}", MODELS[0], max_tokens=30) | batch | {"algo": settings}


def mini_batch_jobs(device: str = "cpu") -> list[dict[str, Any]]:
    """Five groups, each in its own mini-batch, without and with empty mini-batches between them."""
    return [
        job(f"{count} mini-batches on {device}", MODELS[0], device=device)
        | {"algo": ALGO | {"num_mini_batches": count}}
        for count in (5, 8)
    ]


def critic_job(name: str, model: str, **options: Any) -> dict[str, Any]:
    return job(name, model, **options) | {"critic": CRITIC}


def run_jobs(folder: Path, jobs: dict[int, list[dict[str, Any]]], timeout_s: float) -> None:
    """Run jobs by number of ranks."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "tests/distributed/update_worker.py", str(folder)]
    # Asked through NVML, whether there is a GPU: otherwise ranks could not use it, since they are forks.
    process = spawn(command, activated_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"))
    output = finish(process, timeout_s)
    assert process.returncode == 0, output[-4000:]


def values_of(folder: Path, job: dict[str, Any]) -> dict[str, float]:
    return json.loads((folder / f"{job['name']}.json").read_text())


def weights_of(folder: Path, job: dict[str, Any]) -> dict[str, Tensor]:
    return load_file(folder / f"{job['name']}.safetensors")


def check(reference: Reference, job: dict[str, Any], loss_tolerance: float, weight_tolerance: float) -> None:
    weights, losses = reference.expected[SHARED if job["batch"] == SHARED else job["model"]]
    values = values_of(reference.folder, job)
    check_losses(losses, values, loss_tolerance, job)
    check_flops(values, 6 * sum(tensor.numel() for tensor in weights.values()), job)
    got = weights_of(reference.folder, job)
    check_weights(got, weights, weight_tolerance, job)
    begun = load_file(reference.folder / job["model"] / "model.safetensors")
    moves, wanted = (torch.cat([(of[name] - begun[name]).flatten() for name in weights]) for of in (got, weights))
    likeness = F.cosine_similarity(moves, wanted, 0).item()
    assert likeness > MIN_LIKENESS, f"weights went another way: {likeness} with {job}"


def check_flops(values: dict[str, float], of_token: int, job: dict[str, Any]) -> None:
    """Check the operations of an update, of which its parameters need so many for a token. A shared prompt counts once
    in each micro-batch that has it."""
    batch = make_batch(shares_prompts=job["batch"] == SHARED)

    def flops(repeated: Tensor) -> float:
        num_tokens, num_pairs = (int((batch.lengths**n).sum() - (repeated**n).sum()) for n in (1, 2))
        width = 2 * 4 * 8  # layers, heads and size of a head
        return ALGO["num_epochs"] * (of_token * num_tokens + 6 * width * num_pairs) / 1e12

    least, most = flops(repeated_prompts(batch)), flops(torch.zeros_like(batch.lengths))
    if job["actor"]["max_tokens_per_micro_batch"] > batch.num_tokens:
        most = least
    assert least * (1 - 1e-9) <= values["perf/update_tflop"] <= most * (1 + 1e-9), (values, least, most)


def check_losses(
    losses: list[tuple[float, float, float, int]], values: dict[str, float], tolerance: float, job: dict[str, Any]
) -> None:
    count = sum(n for *_, n in losses)
    policy, kl, moved = (sum(step[place] * step[-1] for step in losses) / count for place in range(3))
    assert abs(values["loss/policy"] - policy) < tolerance, (job, values, policy)
    assert abs(values["loss/kl"] - kl) < tolerance, (job, values, kl)
    assert abs(values["policy/kl_old_new"] - moved) < tolerance, (job, values, moved)


def check_weights(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, job: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = (got[name] - tensor).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference} with {job}"
