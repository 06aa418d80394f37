"""Load the config from a YAML file and `key=value` overrides. An unknown key is an error that names the nearest one."""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from rl.config.rules import check
from rl.config.schema import DEFAULT_CONFIG, PLACEMENT_SIZES, Config, ConfigError, resolve_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of train.py, which the launchers accept too."""
    parser.add_argument("--config", metavar="F", help="YAML file; default: configs/default.yaml")
    kinds = parser.add_mutually_exclusive_group()
    what = "evaluate the newest checkpoint of run.name, or model.path if there is none: docs/evaluation.md"
    kinds.add_argument("--eval-only", action="store_true", help=what)
    what = "run one step and save nothing; the model may have no weights"
    kinds.add_argument("--dry-run", action="store_true", help=what)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config file")


def load_config(path: str | Path | None = None, overrides: Sequence[str] | None = ()) -> Config:
    """Return the checked settings: the defaults, then the file (or configs/default.yaml), then the overrides."""
    file, overrides = resolve_path(str(path)) if path else DEFAULT_CONFIG, overrides or ()
    if not file.is_file():
        remedy = "give --config the path of a YAML file, such as configs/default.yaml"
        raise ConfigError(f"no config file at {path}; {remedy}")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception as error:  # the YAML parser's own errors have no common base class
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}; a config must be a mapping of sections")
    if any(_names_a_role(override) for override in overrides):
        # A role on the command line replaces all roles of the file, since a mixture of both would be meaningless.
        values["placement"] = {name: size for name, size in _placement_of(values).items() if name in PLACEMENT_SIZES}
    for override in overrides:
        _apply_override(values, override)
    config = _typed(values)
    check(config)
    return config


def _names_a_role(override: str) -> bool:
    section, _, name = override.partition("=")[0].partition(".")
    return section == "placement" and name not in PLACEMENT_SIZES


def _placement_of(values: dict) -> dict:
    placement = values.get("placement") or {}
    if not isinstance(placement, dict):
        raise ConfigError(f"placement: got {placement!r}; it must be a mapping such as {{'actor,rollout': all}}")
    return placement


def _apply_override(values: dict, override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"got the argument {override!r}; an override must be key=value, such as actor.lr=1e-5")
    *sections, leaf = dotted.split(".")
    node = values
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"got {override!r}, but {section!r} is a value, not a section")
    try:
        node[leaf] = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[index,call-overload]
    except Exception as error:  # the YAML parser's own errors have no common base class
        raise ConfigError(f"got {override!r}: the value is not valid YAML ({error}); quote it") from None


def _typed(values: dict) -> Config:
    placement = _placement_of(values)
    values.pop("placement", None)
    for name in PLACEMENT_SIZES:
        size = placement.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"placement.{name}: got {size!r}; it must be a whole number from 1, such as {name}: 8")
    for section, content in values.items():
        if is_dataclass(getattr(Config(), str(section), None)) and not isinstance(content, dict):
            raise ConfigError(f"{section}: got {content!r}; it must be a section with keys")
    if values.get("sync", {}).get("verify") is False:
        values["sync"]["verify"] = "off"  # YAML reads a bare `off` as a boolean
    try:
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(values)))
    except ConfigKeyError as error:
        known = [entry.name for entry in fields(error.object_type or Config)]
        prefix = str(error.full_key).removesuffix(str(error.key))
        near = difflib.get_close_matches(str(error.key), known, n=1)
        hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(prefix + k for k in known)}"
        raise ConfigError(f"unknown config key {error.full_key}; {hint}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from None
    roles = {} if placement.keys() - PLACEMENT_SIZES else config.placement  # sizes alone keep the default roles
    return replace(config, placement=roles | {str(name): value for name, value in placement.items()})
