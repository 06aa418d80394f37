"""Load the config from a YAML file and `key=value` overrides. An unknown key is an error that names the nearest one."""

import argparse
import dataclasses
import difflib
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.rules import check
from rl.config.schema import DEFAULT_CONFIG, PLACEMENT_SIZES, Config, ConfigError, resolve_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of train.py, which the launchers accept too."""
    parser.add_argument("--config", metavar="F", help="YAML file; default: configs/default.yaml")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate the newest checkpoint of run.name, or model.path if there is none: docs/evaluation.md",
    )
    kinds.add_argument(
        "--dry-run", action="store_true", help="run one step and save nothing; the model may have no weights"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config file")


def load_config(path: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """Return the checked settings: the defaults, then those of the file, then the overrides.

    The file is configs/default.yaml if `path` is None.
    """
    file = resolve_path(str(path)) if path else DEFAULT_CONFIG
    if not file.is_file():
        raise ConfigError(
            f"no config file at {path}; give --config the path of a YAML file, such as configs/default.yaml"
        )
    try:
        loaded = OmegaConf.load(file)
    except Exception as error:  # the YAML parser's own errors have no common base class
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(
            f"{file} holds a {type(OmegaConf.to_container(loaded)).__name__}; a config must be a mapping of sections"
        )
    values = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(values, dict)
    if any(_names_a_role(override) for override in overrides or []):
        # A role on the command line replaces all roles of the file, since a mixture of both would be meaningless.
        placement = _placement_of(values)
        values["placement"] = {name: value for name, value in placement.items() if name in PLACEMENT_SIZES}
    for override in overrides or []:
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
    _check_keys(values, Config, "")
    if values.get("sync", {}).get("verify") is False:
        values["sync"]["verify"] = "off"  # YAML reads a bare `off` as a boolean
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(values))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'config'}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config)
    if placement:
        for name in PLACEMENT_SIZES:
            size = placement.get(name)
            if size is not None and (type(size) is not int or size < 1):
                raise ConfigError(
                    f"placement.{name}: got {size!r}; it must be a whole number from 1, such as {name}: 8"
                )
        roles = {} if set(placement) - set(PLACEMENT_SIZES) else config.placement  # sizes alone keep the default roles
        config = dataclasses.replace(config, placement=roles | {str(name): value for name, value in placement.items()})
    return config


def _check_keys(values: dict, schema: type, prefix: str) -> None:
    known = {entry.name: entry for entry in dataclasses.fields(schema)}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(prefix + k for k in known)}"
            raise ConfigError(f"unknown config key {prefix}{name}; {hint}")
        nested = known[name].type
        if dataclasses.is_dataclass(nested) and isinstance(nested, type):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{name}: got {value!r}; it must be a section with keys")
            _check_keys(value, nested, f"{prefix}{name}.")
