"""Load the reward functions that reward.function names, and check them and reward.options."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rl.config.functions import check_spec, files_of, import_function, signature_of
from rl.config.schema import ConfigError, RewardConfig
from rl.rewards.functions import FUNCTIONS
from rl.rewards.sandbox import Limits, MachineError
from rl.rewards.worker import RewardFunction

SPARE_S = 2.0  # of a call of `code`, to start a sandbox
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
        name = check_spec("reward.function", spec, FUNCTIONS)
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
        if spec == "code":
            _check_timeout(config, options)
    if unknown := [name for name in config.options if name not in rules]:
        raise ConfigError(f"reward.options: got options of {unknown[0]!r}; reward.function has {', '.join(rules)}")
    return list(rules.values())


def _check_timeout(config: RewardConfig, options: dict[str, Any]) -> None:
    """Raise ConfigError if calls would be killed before the time limit of their programs."""
    limit_s = options.get("timeout_s", Limits.cpu_s)
    if isinstance(limit_s, int | float) and config.timeout_s < (least := Limits(limit_s).wall_s + SPARE_S):
        raise ConfigError(
            f"reward.timeout_s: got {config.timeout_s:g}, but with reward.options.code.timeout_s = {limit_s:g} a call "
            f"may take {least:g} s; set reward.timeout_s to at least that, or lower the other limit"
        )


def own_files(config: RewardConfig) -> dict[str, Path]:
    """Return the files of functions that are not built in, by their paths in the config."""
    return files_of("reward.function", *[rule.spec for rule in read_rules(config)])


def load(rule: dict[str, Any]) -> RewardFunction:
    """Import a function and check that it can be called with its options."""
    read = Rule(**rule)
    call = FUNCTIONS.get(read.spec) or import_function("reward.function", read.spec)
    _check_signature(read, call)
    if read.spec in FUNCTIONS:
        try:
            if (check := getattr(call, "check", None)) is not None:
                check(**read.options)
            else:  # these accept any text, so a failure is due to the options
                call("", "\\boxed{1}", {"answer": "1"}, **read.options)
        except ImportError as error:
            raise ConfigError(f"reward.function: {read.spec} needs {error.name}; install requirements.txt") from None
        except MachineError as error:
            raise ConfigError(f"reward.function: {read.spec}: {error}") from None
        except Exception as error:
            raise ConfigError(f"reward.options.{read.name}: {error}") from None
    return RewardFunction(read.name, read.weight, call, read.options)


def check_rewards(config: RewardConfig) -> None:
    """Raise ConfigError if a reward function cannot be imported or called."""
    for rule in read_rules(config):
        load(rule._asdict())


def _check_signature(rule: Rule, call: Callable[..., Any]) -> None:
    signature = signature_of(call)
    if signature is None:
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
