"""rl/algo against verl and TRL: the same values and gradients from their padded tensors as from our flat tokens."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl.algo.advantages import (
    gae,
    group_relative,
    leave_one_out,
    moments,
    returns_to_go,
    standardize,
    token_rewards,
)
from rl.algo.correction import importance_weights
from rl.algo.kl import adapt_kl_coef, kl_penalty
from rl.algo.losses import PolicyLoss, clipped_ratio, clipped_weight, sequence_ratio, token_weights, value_loss
from tests.unit.peers import functions, source
from tests.unit.ragged import Ragged, close, ragged

pytestmark = pytest.mark.slow  # downloads 3 MB

VERL, TRL = "verl-0.9.1", "trl-1.16.0"
LOW, HIGH = 0.2, 0.3
MAX_LENGTH = 12
VERL_NAMES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
TRL_NAMES = {"token": "bnpo", "sequence": "grpo", "constant": "dr_grpo"}

Peer = Any


class ActorConfig(SimpleNamespace):
    """The settings that verl's functions read."""

    def get(self, name: str, default: float) -> float:
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl() -> Peer:
    names = {"torch": torch, "np": np, "math": math, "defaultdict": defaultdict}
    names["verl_F"] = functions(source(VERL, "verl/utils/torch_functional.py"), names)
    names |= {"ActorConfig": ActorConfig, "AlgoConfig": type("AlgoConfig", (), {})}
    peer = vars(functions(source(VERL, "verl/trainer/ppo/core_algos.py"), names))
    peer |= vars(functions(source(VERL, "verl/trainer/ppo/rollout_corr_helper.py"), names))
    return SimpleNamespace(**peer)


@pytest.fixture(scope="module")
def trl_loss() -> Peer:
    names = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    return functions(source(TRL, "trl/trainer/grpo_trainer.py"), names, inside="GRPOTrainer")._compute_loss


@pytest.fixture(scope="module")
def data() -> Ragged:
    """Return 32 sequences of 1 to 12 tokens. Peers differ in how they count a sequence without tokens."""
    data = ragged(seed=11, num_groups=8, max_length=MAX_LENGTH)
    lengths = data.lengths.clamp(min=1)
    return Ragged(lengths, torch.repeat_interleave(torch.arange(32), lengths), data.group_ids, data.rewards)


@pytest.fixture(scope="module")
def mask(data: Ragged) -> Tensor:
    return torch.arange(MAX_LENGTH) < data.lengths[:, None]


def pad(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_scatter(mask, values)


def shaped_rewards(data: Ragged) -> Tensor:
    return token_rewards(data.rewards, data.tokens(12), 0.1, data.segment_ids, data.lengths)


def standardized(tokens: Tensor) -> Tensor:
    return standardize(tokens, moments(tokens))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_group_advantages(verl: Peer, data: Ragged, mask: Tensor, name: str) -> None:
    rewards = pad(token_rewards(data.rewards, None, 0.0, data.segment_ids, data.lengths), mask)
    groups, where = data.group_ids.numpy(), data.segment_ids
    given = (data.rewards, data.group_ids)
    if name == "grpo":
        wanted, _ = verl.compute_grpo_outcome_advantage(rewards, mask, groups)
        got = group_relative(*given, normalize_std=True)[where]
    elif name == "dr_grpo":
        wanted, _ = verl.compute_grpo_outcome_advantage(rewards, mask, groups, norm_adv_by_std_in_grpo=False)
        got = group_relative(*given, normalize_std=False)[where]
    elif name == "rloo":
        wanted, _ = verl.compute_rloo_outcome_advantage(rewards, mask, groups)
        got = leave_one_out(*given)[where]
    else:
        wanted, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, groups)
        got = standardized(group_relative(*given, normalize_std=False)[where])
    close(got, wanted[mask], atol=2e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.95])
def test_token_advantages(verl: Peer, data: Ragged, mask: Tensor, gamma: float) -> None:
    rewards, values, ones = shaped_rewards(data), data.tokens(13), mask.float()
    wanted, returns_wanted = verl.compute_reinforce_plus_plus_outcome_advantage(
        pad(rewards, mask), ones, SimpleNamespace(gamma=gamma)
    )
    returns = returns_to_go(rewards, data.segment_ids, gamma)
    close(returns, returns_wanted[mask], atol=2e-6)
    close(standardized(returns), wanted[mask], atol=2e-6)
    wanted, returns_wanted = verl.compute_gae_advantage_return(pad(rewards, mask), pad(values, mask), ones, gamma, 0.9)
    advantages, returns = gae(rewards, values, data.segment_ids, gamma, 0.9)
    close(returns, returns_wanted[mask], atol=2e-6)
    close(standardized(advantages), wanted[mask], atol=2e-6)


def logprobs(data: Ragged) -> tuple[Tensor, Tensor]:
    """Return new logprobs with gradient, around the clipping bounds of the old ones, and the old ones."""
    old = data.tokens(14) - 3
    return (old + data.tokens(15, 0.6)).requires_grad_(), old


def ours(name: str, new: Tensor, old: Tensor, data: Ragged, low: float = LOW) -> PolicyLoss:
    advantages = data.rewards[data.segment_ids]
    if name == "gspo":
        return sequence_ratio(new, old, advantages, data.segment_ids, data.lengths, low, HIGH)
    if name == "cispo":
        return clipped_weight(new, old, advantages, low, HIGH)
    return clipped_ratio(new, old, advantages, low, HIGH, dual_clip=1.5)


def total(token_losses: Tensor, normalization: str, data: Ragged, kept: Tensor) -> Tensor:
    """Return the loss of a batch of only the kept sequences."""
    lengths = data.lengths[kept]
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    weights, denominator = token_weights(normalization, lengths, segment_ids, MAX_LENGTH)
    return (weights * token_losses[kept[data.segment_ids]]).sum() / denominator


def check_gradients(got: Tensor, wanted: Tensor, new: Tensor) -> None:
    close(got.detach(), wanted.detach(), atol=1e-6)
    close(torch.autograd.grad(got, new)[0], torch.autograd.grad(wanted, new)[0], atol=1e-6)


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo"])
def test_policy_losses(verl: Peer, data: Ragged, mask: Tensor, name: str, normalization: str) -> None:
    """With importance weights between engine and learner, and every fifth sequence masked."""
    new, old = logprobs(data)
    kept = torch.arange(32) % 5 != 0
    used = mask & kept[:, None]
    correction = importance_weights(old, old + data.tokens(16, 0.5), data.segment_ids, data.lengths, "token", 2.0)
    config = ActorConfig(
        clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=1.5, global_batch_info={}
    )
    wanted, metrics = getattr(verl, f"compute_policy_loss_{name}")(
        pad(old, mask),
        pad(new, mask),
        data.rewards[:, None].expand(mask.shape),
        used.float(),
        VERL_NAMES[normalization],
        config,
        pad(correction.weights, mask),
    )
    got = ours(name, new, old, data)
    check_gradients(total(correction.weights * got.loss, normalization, data, kept), wanted, new)
    clip_fraction = total(got.clipped.float(), "token", data, kept).item()
    assert clip_fraction == pytest.approx(metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"], abs=1e-6)


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_value_loss(verl: Peer, data: Ragged, mask: Tensor, normalization: str) -> None:
    values, returns = data.tokens(18), data.tokens(19)
    values, old = values.requires_grad_(), values.detach() + data.tokens(20, 0.5)
    padded = [pad(tensor, mask) for tensor in (values, returns, old)]
    wanted, clip_fraction = verl.compute_value_loss(*padded, mask.float(), 0.3, VERL_NAMES[normalization])
    loss, clipped = value_loss(values, old, returns, clip=0.3)
    check_gradients(total(loss, normalization, data, torch.ones(32, dtype=torch.bool)), wanted, values)
    close(clipped.float().mean(), clip_fraction, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(verl: Peer, data: Ragged, estimator: str) -> None:
    new, ref = logprobs(data)
    check_gradients(kl_penalty(new, ref, estimator).mean(), verl.kl_penalty(new, ref, estimator).mean(), new)
    for kl in (0.0, 5.9, 6.3, 40.0):
        controller = verl.AdaptiveKLController(0.2, 6.0, 10000)
        controller.update(kl, 256)
        assert adapt_kl_coef(0.2, kl, 6.0, 256) == pytest.approx(controller.value, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "level", "limit"),
    [
        ("token", "token", 2.0),
        ("sequence", "sequence", 2.0),
        ("token_mask", "token", "0.5_2.0"),
        ("sequence_mask", "sequence", "1e-30_2.0"),  # verl wants a lower bound above 0
        ("sequence_mask_two_sided", "sequence", "0.5_2.0"),
    ],
)
def test_correction(verl: Peer, data: Ragged, mask: Tensor, mode: str, level: str, limit: float | str) -> None:
    old, rollout = data.tokens(21, 0.4), data.tokens(22, 0.4)
    wanted, _ = verl.compute_rollout_correction_weights(pad(old - rollout, mask), mask.float(), level, limit)
    got = importance_weights(old, rollout, data.segment_ids, data.lengths, mode, 2.0)
    close(got.weights, wanted[mask], atol=2e-6)
    assert 0 < got.cut.sum() < got.cut.numel()


def trl_trainer(new: Tensor, **settings: Any) -> SimpleNamespace:
    """Return the attributes that TRL's loss reads from its trainer, for one process."""
    defaults: dict[str, Any] = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "beta": 0.05,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_LENGTH,
        "_entropy_bonus_enabled": False,
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "accelerator": SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (new, torch.zeros_like(new.detach()), None),
    }
    return SimpleNamespace(**(defaults | settings))


@pytest.mark.parametrize(
    ("name", "normalization"),
    [
        *((name, normalization) for name in ("clip", "gspo") for normalization in ("token", "sequence", "constant")),
        ("cispo", "token"),
    ],
)
def test_trl(trl_loss: Peer, data: Ragged, mask: Tensor, name: str, normalization: str) -> None:
    """The whole loss: policy loss with importance weights, and k3. TRL's delta is a dual clip, and its CISPO bounds the
    ratio only from above."""
    new, old = logprobs(data)
    ref = old + data.tokens(23, 0.3)
    level = "sequence" if name == "gspo" else "token"
    weights = importance_weights(old, old + data.tokens(16, 0.5), data.segment_ids, data.lengths, level, 2.0).weights
    trainer = trl_trainer(
        pad(new, mask),
        loss_type="cispo" if name == "cispo" else TRL_NAMES[normalization],
        importance_sampling_level=level,
        args=SimpleNamespace(
            use_bias_correction_kl=False, delta=1.5 if name == "clip" else None, steps_per_generation=1
        ),
        **({"epsilon_high": 1 + HIGH} if name == "cispo" else {}),
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask.int(),
        "advantages": data.rewards,
        "old_per_token_logps": pad(old, mask),
        "ref_per_token_logps": pad(ref, mask),
        "importance_sampling_ratio": pad(weights, mask),
        "num_items_in_batch": mask.sum().float(),
    }
    policy = ours(name, new, old, data, low=1.0 if name == "cispo" else LOW)
    got = total(
        weights * policy.loss + 0.05 * kl_penalty(new, ref, "k3"),
        normalization,
        data,
        torch.ones(32, dtype=torch.bool),
    )
    check_gradients(got, trl_loss(trainer, None, inputs), new)
