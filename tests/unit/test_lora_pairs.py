"""Adapters with every other choice of a run: each pair is accepted, or refused by a message that names both keys."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest

from rl.config.load import check, load_config
from rl.config.schema import ADVANTAGE_NAMES, LOSS_NAMES, Config, ConfigError, LoraConfig, keys_of
from rl.model.memory import checkpoint_bytes, estimate
from rl.model.shape import AdaptedLayers, ModelSize
from rl.placement.roles import plan
from rl.run import checks
from rl.run.checks import check_lora, check_settings

SECTIONS = ("model", "rollout", "algo", "actor", "critic", "reference", "sync")  # others do not concern the learner
SIZE = ModelSize(1000, 800, AdaptedLayers(7, 50, 60))
APART = ["placement.rollout=0-1", "placement.actor=2-3"]
SCORED = ["placement.rollout=0", "placement.inference=1", "placement.actor=2-3", "algo.kl_coef=0.1"]
# What a value needs to be accepted at all, with adapters or without.
COMPANIONS = {
    "actor.overlap=true": APART,
    "algo.kl_place=reward": ["algo.kl_coef=0.1"],
    "algo.old_logprobs=always": ["algo.correction=token"],
    "rollout.keep_kv=true": [*APART, "rollout.max_tokens_per_round=2", "algo.correction=token"],
}
COMPANIONS |= {f"algo.kl_estimator={name}": ["algo.kl_coef=0.1"] for name in ("k1", "k2", "full")}
COMPANIONS |= {f"reference.offload={name}": ["algo.kl_coef=0.1"] for name in ("none", "rollout", "always")}
COMPANIONS |= {
    f"critic.{name}": ["algo.advantage=gae"]
    for name in (
        "lora=false",
        *(f"offload={value}" for value in ("none", "rollout", "moments", "always")),
        *(f"recompute={value}" for value in ("none", "selective", "full")),
    )
}
# Choices that are no single value of a key.
COMBINATIONS = {
    "full KL, offloaded": ["algo.kl_coef=0.1", "algo.kl_estimator=full", "actor.offload=rollout"],
    "inference ranks": SCORED,
    "inference ranks that move the reference": [*SCORED, "reference.offload=always"],
    "replicas": [*APART, "actor.num_replicas=2"],
    "a tensor-parallel engine": ["rollout.tensor_parallel_size=2"],
    "Q": ["rollout.max_tokens_per_round=2"],
    "K": [*APART, "rollout.ahead=1"],
    "Q and K": [*APART, "rollout.ahead=1", "rollout.max_tokens_per_round=2"],
    "a critic of another model": ["algo.advantage=gae", "critic.path=configs/tiny"],
    "SGD without momentum": ["actor.optimizer=sgd", "actor.beta1=0"],
    "no checkpoints": ["checkpoint.save_interval=-1"],
    "copies of checkpoints": ["checkpoint.copies=2"],
    "some layers": ["model.lora.targets=[q_proj,v_proj]"],
}
# All that is refused because of adapters.
REFUSED = {f"reference.offload={value}" for value in ("none", "rollout", "always")}


class Choice(NamedTuple):
    name: str
    settings: list[str]
    phase: Any = "both"


def values_of(name: str, entry: Any) -> list[str]:
    """Return the values of a key that has only a few, except its default, which is tried in all other choices."""
    if name.partition(".")[0] not in SECTIONS:
        return []
    values = get_args(entry.type) if get_origin(entry.type) is Literal else ()
    values = (True, False) if entry.type is bool else values
    return [str(value).lower() for value in values if value != entry.default]


def choices() -> Iterator[Choice]:
    """Yield every value of the keys that have a few, of advantages and losses, and the combinations."""
    named = {name: values_of(name, entry) for name, entry in keys_of(Config)}
    named |= {"algo.advantage": [*ADVANTAGE_NAMES], "algo.loss": [*LOSS_NAMES]}
    for name, values in named.items():
        for setting in (f"{name}={value}" for value in values):
            yield Choice(setting, [setting, *COMPANIONS.get(setting, [])])
    for name, settings in COMBINATIONS.items():
        yield Choice(name, settings)
    for phase in ("rollout", "update"):
        yield Choice(f"phase {phase}", [], phase)


CHOICES = {choice.name: choice for choice in choices()}


def with_adapters(config: Config) -> Config:
    lora = replace(config.model.lora, rank=4)
    return replace(config, model=replace(config.model, lora=lora), actor=replace(config.actor, lr=1e-4))


def make_checks(choice: Choice, config: Config) -> list[str]:
    """Make the checks of a run and of --plan on 4 ranks, with the estimates of memory. Return the warnings."""
    check(config)
    sizes = (config.rollout.tensor_parallel_size, config.actor.num_replicas)
    placement = plan(config.placement, 1, 4, *sizes, choice.phase)
    warnings = check_settings(config, placement)
    critic = SIZE if config.algo.has_critic else None
    for trains in (True, False):
        for role in estimate(config, placement, SIZE, critic, trains):
            assert min(role.learner, role.engine, role.offloaded, role.host_on_cpu) >= 0
    if placement.actors:
        assert sum(checkpoint_bytes(config, placement, SIZE, critic)) > 0
    return warnings


def test_the_list_covers_what_matters() -> None:
    keys = {name.partition("=")[0] for name in CHOICES}
    assert len(CHOICES) > 60
    assert keys >= {
        *("algo.advantage", "algo.loss", "algo.kl_estimator", "algo.kl_place", "actor.optimizer", "actor.recompute"),
        *("actor.compile", "actor.offload", "actor.overlap", "critic.lora", "critic.offload", "reference.offload"),
        *("sync.verify", "model.dtype", "phase rollout", "phase update", "K", "Q", "replicas"),
    }
    assert COMPANIONS.keys() | REFUSED <= CHOICES.keys()


@pytest.mark.parametrize("name", CHOICES)
def test_a_pair(name: str) -> None:
    choice = CHOICES[name]
    config = load_config(overrides=choice.settings)
    make_checks(choice, config)
    if name in REFUSED:
        with pytest.raises(ConfigError) as refused:
            make_checks(choice, with_adapters(config))
        assert "model.lora" in str(refused.value) and name.partition("=")[0] in str(refused.value)
        return
    assert [text for text in make_checks(choice, with_adapters(config)) if "model.lora" in text] == []


@pytest.mark.parametrize("dropout", ["0.1", "1"])
def test_dropout_is_refused(dropout: str) -> None:
    with pytest.raises(ConfigError, match=r"model.lora.dropout: got .*; it must be 0"):
        load_config(overrides=["model.lora.rank=4", f"model.lora.dropout={dropout}"])


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    check_lora(LoraConfig(rank=8))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.lora.rank: got 8, but adapters need peft.*`pip install peft` in"):
        check_lora(LoraConfig(rank=8))
    check_lora(LoraConfig())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["model.lora.rank=4", "actor.lr=1e-6"], "actor.lr: got 1e-06 with model.lora"),
        (["model.lora.rank=4", "actor.lr=9e-6"], "Try 9e-05"),
        (["model.lora.rank=4", "actor.lr=1e-5"], ""),
        (["model.lora.rank=4", "actor.lr=1e-6", "actor.optimizer=sgd"], ""),
        (["model.lora.alpha=64"], "model.lora.rank=0 means no adapters"),
        (["model.lora.targets=[q_proj]"], "model.lora.rank=0 means no adapters"),
        ([], ""),
    ],
)
def test_warnings(settings: list[str], text: str) -> None:
    found = " ".join(make_checks(Choice("", settings), load_config(overrides=settings)))
    assert (text in found) if text else ("lora" not in found), found
