"""Find the settings in which runs differ from each other, or from the defaults."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl.config.schema import Config, sections_of

INNER_SECTIONS = [name for name, _ in sections_of(Config) if "." in name]
LOCAL_SETTINGS = ("run.dir", "run.name")  # say where a run is, and nothing about what it does


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name. The placement is a single value."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if isinstance(values, Mapping) and section != "placement":
            flat |= _flatten_section(section, values)
        else:
            flat[section] = values
    return flat


def _flatten_section(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{section}.{name}"
        flat |= _flatten_section(dotted, value) if dotted in INNER_SECTIONS else {dotted: value}
    return flat


def default_settings() -> dict[str, Any]:
    return flatten(dataclasses.asdict(Config()))


def find_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings whose values are not the same in all configs, by dotted name. A config of another version
    may lack a setting: then its value is None."""
    flat = [flatten(json.loads(json.dumps(config))) for config in configs]  # a file has lists, not tuples
    names = dict.fromkeys(name for settings in flat for name in settings if name not in LOCAL_SETTINGS)
    found = {name: [settings.get(name) for settings in flat] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values[1:])}
