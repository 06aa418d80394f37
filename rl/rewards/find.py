"""Load the reward functions that reward.function names, and check them and reward.options."""

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rl.config.schema import ConfigError, RewardConfig, resolve_path
from rl.rewards.functions import FUNCTIONS
from rl.rewards.worker import RewardFunction

TAKEN = ("mean", "timeouts", "errors", "overlong", "certainty", "kl")  # reward/NAME is already a metric


class Rule(NamedTuple):
    """One reward function of the weighted sum: its name, weight and options in the config."""

    spec: str  # a name, or file.py:function
    weight: float
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]


def read_rules(config: RewardConfig) -> list[Rule]:
    """Return the reward functions of the config. Raise ConfigError if their names, weights or options are wrong."""
    weights = {config.function: 1.0} if isinstance(config.function, str) else config.function
    if not isinstance(weights, dict) or not weights or not all(isinstance(spec, str) for spec in weights):
        raise ConfigError(
            f"reward.function: got {config.function!r}; it must be a name, file.py:function, or a mapping of these to "
            "weights, such as {math: 1.0, format: 0.2}"
        )
    rules: dict[str, Rule] = {}
    for spec, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"reward.function: got {weight!r} as the weight of {spec}; it must be a finite number")
        name = _check_name(spec)
        if name in TAKEN:
            raise ConfigError(f"reward.function: got {name!r}, but reward/{name} is another metric; rename it")
        if name in rules:
            raise ConfigError(
                f"reward.function: got two functions named {name!r}; their metrics would clash, so rename one"
            )
        options = config.options.get(name, {})
        if not isinstance(options, dict):
            raise ConfigError(f"reward.options.{name}: got {options!r}; it must be a mapping of arguments")
        rules[name] = Rule(spec, float(weight), options)
    if unknown := [name for name in config.options if name not in rules]:
        raise ConfigError(f"reward.options: got options of {unknown[0]!r}; reward.function has {', '.join(rules)}")
    return list(rules.values())


def own_files(config: RewardConfig) -> dict[str, Path]:
    """Return the files of functions that are not built in, by their paths in the config."""
    names = [rule.spec.rpartition(":")[0] for rule in read_rules(config)]
    return {name: resolve_path(name) for name in names if name}


def load(rule: dict[str, Any]) -> RewardFunction:
    """Import a function and check that it can be called with its options."""
    read = Rule(**rule)
    call = FUNCTIONS.get(read.spec) or _import(read)
    _check_signature(read, call)
    if read.spec in FUNCTIONS:  # these accept any text, so a failure is due to the options
        try:
            call("", "\\boxed{1}", {"answer": "1"}, **read.options)
        except ImportError as error:
            raise ConfigError(f"reward.function: {read.spec} needs {error.name}; install requirements.txt") from None
        except Exception as error:
            raise ConfigError(f"reward.options.{read.name}: {error}") from None
    return RewardFunction(read.name, read.weight, call, read.options)


def check_rewards(config: RewardConfig) -> None:
    """Raise ConfigError if a reward function cannot be imported or called."""
    for rule in read_rules(config):
        load(rule._asdict())


def _check_name(spec: str) -> str:
    """Return the name of the function, which must be built in or in a file that exists."""
    file, colon, name = spec.rpartition(":")
    if not colon and name not in FUNCTIONS:
        raise ConfigError(
            f"reward.function: got {spec!r}; choose one of {', '.join(FUNCTIONS)}, or give file.py:function"
        )
    if colon and not (name.isidentifier() and resolve_path(file).is_file()):
        what = f"no file at {file}" if name.isidentifier() else f"{name!r} is not the name of a function"
        raise ConfigError(
            f"reward.function: got {spec!r}, but {what}; give the path of a file and a function: file.py:function"
        )
    return name


def _import(rule: Rule) -> Callable[..., Any]:
    path = resolve_path(rule.spec.rpartition(":")[0]).resolve()
    module_name = f"oneworld_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.function: got {rule.spec!r}; the file's name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        reason = f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
        raise ConfigError(f"reward.function: {path} cannot be imported: {reason}") from None
    call = getattr(module, rule.name, None)
    if call is None or not callable(call):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise ConfigError(
            f"reward.function: {path} has no function {rule.name!r}; it has {', '.join(own) or 'none at all'}"
        )
    return call


def _check_signature(rule: Rule, call: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a callable written in C has no signature
        return
    try:
        signature.bind_partial("", "", {})
    except TypeError:
        raise ConfigError(
            f"reward.function: {rule.name} takes {signature}; it must take (prompt, response, row), then options by "
            "name"
        ) from None
    try:
        signature.bind("", "", {}, **rule.options)
    except TypeError as error:
        raise ConfigError(f"reward.options.{rule.name}: {error}; {rule.name} takes {signature}") from None
