"""Read and change settings of a config by name, such as rollout.max_num_seqs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl.config.schema import Config


def read_value(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config with these settings changed."""
    for name, value in values.items():
        section, _, key = name.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config
