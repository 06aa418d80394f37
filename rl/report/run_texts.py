"""What TensorBoard shows about a start of a run: its settings and placement as texts, and its hyperparameters."""

from typing import Any

import yaml

from rl.config.schema import Config
from rl.placement.roles import Placement
from rl.report.samples import block
from rl.report.writers import public_settings

CONFIG, PLACEMENT = "run/config", "run/placement"  # tags of the texts
# What the tab HParams compares: the settings that most often differ between runs. run/config has all of them.
HYPERPARAMETERS = {
    "actor": ("lr",),
    "algo": ("advantage", "loss", "clip_low", "clip_high", "kl_coef", "correction"),
    "train": ("num_prompts_per_step",),
    "rollout": ("num_samples_per_prompt", "max_new_tokens", "temperature", "max_tokens_per_round", "ahead"),
    "model": ("path",),
    "model.lora": ("rank", "alpha"),
    "data": ("train",),
    "reward": ("function",),
    "run": ("seed",),
}

Setting = str | float | bool


def make_texts(config: Config, placement: Placement) -> dict[str, str]:
    """Return the texts by tag, as Markdown. They have no credentials."""
    settings, defaults = public_settings(config), public_settings(Config())
    changed = {
        section: found
        for section, entries in settings.items()
        if (found := {name: value for name, value in entries.items() if value != defaults[section].get(name)})
    }
    shown = ["### settings that differ from the defaults", block(_dump(changed)), "### all settings"]
    shown += [block(_dump(settings))]
    ranks = ["### ranks", block(placement.summary()), block(placement.table())]
    return {CONFIG: "\n\n".join(shown), PLACEMENT: "\n\n".join(ranks)}


def list_hyperparameters(config: Config) -> dict[str, Setting]:
    """Return the settings by which runs are compared, by key. All runs have the same keys."""
    settings = public_settings(config)
    found = {
        f"{section}.{name}": _section(settings, section)[name]
        for section, names in HYPERPARAMETERS.items()
        for name in names
    }
    found["placement"] = settings["placement"]
    return {
        key: value if isinstance(value, bool | int | float | str) else _dump(value, flow=True)
        for key, value in found.items()
    }


def _section(settings: dict[str, Any], dotted_name: str) -> dict[str, Any]:
    for name in dotted_name.split("."):
        settings = settings[name]
    return settings


def _dump(value: Any, flow: bool = False) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=1000).strip()
