"""Load the reward functions that reward.function names, and check them and reward.options."""

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError, RewardConfig, resolve_path
from rl.rewards.functions import FUNCTIONS
from rl.rewards.worker import RewardFunction

REQUIRED = "(prompt, response, row)"
TAKEN = ("mean", "timeouts", "errors", "overlong", "certainty", "kl")  # reward/NAME is already a metric


@dataclass(frozen=True)
class Rule:
    """One reward function of the weighted sum: its name, weight and options in the config."""

    spec: str  # a name, or file.py:function
    weight: float
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]


def read_rules(config: RewardConfig) -> list[Rule]:
    """Return the reward functions of the config. Raise ConfigError if their names, weights or options are wrong."""
    weights = config.function if isinstance(config.function, dict) else {str(config.function): 1.0}
    if not weights or not isinstance(config.function, str | dict) or not all(isinstance(s, str) for s in weights):
        raise ConfigError(
            f"reward.function: got {config.function!r}; it must be a name, file.py:function, or a mapping of these to "
            "weights, such as {math: 1.0, format: 0.2}"
        )
    rules = []
    for spec, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"reward.function: got {weight!r} as the weight of {spec}; it must be a finite number")
        rule = Rule(spec, float(weight), {})
        _check_name(rule)
        options = config.options.get(rule.name, {})
        if not isinstance(options, dict):
            raise ConfigError(f"reward.options.{rule.name}: got {options!r}; it must be a mapping of arguments")
        rules.append(Rule(spec, float(weight), options))
    names = [rule.name for rule in rules]
    for name in names:
        if name in TAKEN:
            raise ConfigError(f"reward.function: got {name!r}, but reward/{name} is another metric; rename it")
        if names.count(name) > 1:
            raise ConfigError(
                f"reward.function: got two functions named {name!r}; their metrics would clash, so rename one"
            )
    for name in config.options:
        if name not in names:
            raise ConfigError(f"reward.options: got options of {name!r}; reward.function has {', '.join(names)}")
    return rules


def own_files(config: RewardConfig) -> dict[str, Path]:
    """Return the files of functions that are not built in, by their paths in the config."""
    names = [rule.spec.rpartition(":")[0] for rule in read_rules(config)]
    return {name: resolve_path(name) for name in names if name}


def load(rule: dict[str, Any]) -> RewardFunction:
    """Import a function and check that it can be called with its options."""
    read = Rule(**rule)
    is_built_in = ":" not in read.spec
    call = FUNCTIONS[read.spec] if is_built_in else _import(read)
    _check_signature(read, call)
    if is_built_in:  # these accept any text, so a failure is due to the options
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
        load(asdict(rule))


def _check_name(rule: Rule) -> None:
    file, colon, function = rule.spec.rpartition(":")
    if not colon:
        if rule.spec not in FUNCTIONS:
            raise ConfigError(
                f"reward.function: got {rule.spec!r}; choose one of {', '.join(FUNCTIONS)}, or give file.py:function"
            )
    elif not function.isidentifier() or not resolve_path(file).is_file():
        what = f"no file at {file}" if function.isidentifier() else f"{function!r} is not the name of a function"
        raise ConfigError(
            f"reward.function: got {rule.spec!r}, but {what}; give the path of a file and a function: file.py:function"
        )


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
        raise ConfigError(f"reward.function: {path} cannot be imported: {_describe(error, path)}") from None
    call = getattr(module, rule.name, None)
    if call is None or not callable(call):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise ConfigError(
            f"reward.function: {path} has no function {rule.name!r}; it has {', '.join(own) or 'none at all'}"
        )
    return call


def _describe(error: BaseException, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


def _check_signature(rule: Rule, call: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a callable written in C has no signature
        return
    try:
        signature.bind_partial("", "", {})
    except TypeError:
        raise ConfigError(
            f"reward.function: {rule.name} takes {signature}; it must take {REQUIRED}, then options by name"
        ) from None
    parameters = list(signature.parameters.values())
    names = [p.name for p in parameters[3:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = names if not any(p.kind == p.VAR_POSITIONAL for p in parameters[:3]) else [p.name for p in parameters]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    if unknown := [name for name in rule.options if name not in names and not takes_all]:
        takes = ", ".join(names) or "no options"
        raise ConfigError(f"reward.options.{rule.name}: got {', '.join(unknown)}; {rule.name} takes {takes}")
    try:
        signature.bind("", "", {}, **rule.options)
    except TypeError as error:
        raise ConfigError(f"reward.options.{rule.name}: {error}; {rule.name} takes {', '.join(names)}") from None
