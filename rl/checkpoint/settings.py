"""Compare the settings that a checkpoint was saved with to those of a run that resumes from it."""

from collections.abc import Collection, Mapping
from typing import Any

from rl.checkpoint.manifest import Manifest
from rl.config.schema import Config, ConfigError


def check_settings_of_checkpoint(manifest: Manifest, config: Config) -> None:
    """Raise ConfigError if the checkpoint holds the state of another optimizer, or other adapters."""
    _check_same_optimizer(manifest, config)
    _check_same_lora(manifest, config)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], derived: Collection[str] = ()) -> list[str]:
    """Return the settings that changed since the save, except run, checkpoint and placement, and those in `derived`:
    they depend on the GPUs and on what a command does, and the run prints them."""

    def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in section.items():
            found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        return found

    old, new = flat(before), flat(now)
    left_out = ("run", "checkpoint", "placement")
    names = [name for name in new if name.partition(".")[0] not in left_out and name not in derived]
    return [f"{name} {old.get(name)} -> {new[name]}" for name in names if old.get(name) != new[name]]


def _check_same_optimizer(manifest: Manifest, config: Config) -> None:
    """Raise ConfigError if the checkpoint holds the state of another optimizer."""
    saved, own = manifest.config.get("actor", {}), config.actor
    name = saved.get("optimizer", "adamw")
    if name != own.optimizer:
        raise ConfigError(
            f"actor.optimizer: got {own.optimizer}, but step {manifest.step} was saved with {name}, whose state "
            f"{own.optimizer} cannot use; set actor.optimizer={name}. To change the optimizer, merge the checkpoint "
            "with tools/merge_checkpoint.py, and give the result as model.path of a new run"
        )
    if name == "sgd" and bool(saved.get("beta1")) != bool(own.beta1):
        raise ConfigError(
            f"actor.beta1: got {own.beta1:g}, but step {manifest.step} was saved with sgd and actor.beta1="
            f"{saved.get('beta1'):g}; momentum cannot be switched on or off in a run. Set actor.beta1 as before"
        )


def _check_same_lora(manifest: Manifest, config: Config) -> None:
    """Raise ConfigError if the checkpoint holds other adapters than those that this run trains."""
    saved, own, step = manifest.lora, config.model.lora, manifest.step
    merge = "merge the checkpoint with tools/merge_checkpoint.py, and give the result as model.path of a new run"
    if saved.is_set and not own.is_set:
        raise ConfigError(
            f"model.lora.rank: got 0, but step {step} holds adapters and no other weights; set model.lora.rank="
            f"{saved.rank}. To train all weights from here, {merge}"
        )
    if own.is_set and not saved.is_set:
        raise ConfigError(
            f"model.lora.rank: got {own.rank}, but step {step} was saved without adapters; set model.lora.rank=0. To "
            f"train adapters from here, {merge}"
        )
    if not own.is_set:
        return
    for name, before, now in (
        ("rank", saved.rank, own.rank),
        ("alpha", saved.alpha, own.alpha),
        ("targets", sorted(saved.targets), sorted(own.targets)),
    ):
        if before != now:
            text = f"[{','.join(before)}]" if isinstance(before, list) else str(before)
            raise ConfigError(
                f"model.lora.{name}: got {now}, but the adapters of step {step} were trained with {before}; set "
                f"model.lora.{name}={text}. To change adapters, {merge}"
            )
    has_lora = manifest.config.get("critic", {}).get("lora", True)
    if config.algo.has_critic and manifest.slices("critic") and has_lora != config.critic.lora:
        raise ConfigError(
            f"critic.lora: got {_yaml(config.critic.lora)}, but the critic of step {step} was trained with "
            f"{_yaml(has_lora)}; set critic.lora={_yaml(has_lora)}"
        )


def _yaml(value: bool) -> str:
    return "true" if value else "false"
