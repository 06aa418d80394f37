"""Choose the loss and the advantage of a run: built-in functions, or functions in a file of the user.

A function gets its arguments by the names of its parameters. So it takes only what it needs, and a copy of a built-in
function works as it is. Its other parameters are options, which algo.options sets. Every mistake that can be found
without a batch is a ConfigError of `check_functions`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.algo.losses import LOSSES, PolicyLoss
from rl.config.functions import check_spec, describe_error, import_function, is_own, signature_of
from rl.config.schema import ADVANTAGE_NAMES, LOSS_NAMES, AlgoConfig, ConfigError

LOSS_INPUTS = ("new_logprobs", "old_logprobs", "rollout_logprobs", "advantages", "segment_ids", "lengths")
LOSS_SETTINGS = ("clip_low", "clip_high", "dual_clip")
ADVANTAGE_INPUTS = ("rewards", "token_rewards", "group_ids", "segment_ids", "lengths")
ADVANTAGE_SETTINGS = ("gamma", "lam")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Function:
    """A function, the setting that names it, and its arguments."""

    key: str
    spec: str
    call: Callable[..., Any]
    inputs: tuple[str, ...]  # names of the tensors that it takes
    constants: dict[str, Any]  # settings and options that it takes

    def __call__(self, tensors: Mapping[str, Tensor]) -> Any:
        """Call the function. Its exception is a ConfigError with the line, because a restart would not help."""
        try:
            return self.call(**{name: tensors[name] for name in self.inputs}, **self.constants)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            if not is_own(self.spec):
                raise
            raise ConfigError(f"{self.key}: {self.spec} failed: {describe_error(self.spec, error)}") from error

    def mistake(self, returned: str, rule: str) -> ConfigError:
        return ConfigError(f"{self.key}: {self.spec} returned {returned}; {rule}")


class Loss:
    """The policy loss that algo.loss names."""

    def __init__(self, algo: AlgoConfig):
        self.is_own = is_own(algo.loss)
        call = _load("algo.loss", algo.loss) if self.is_own else LOSSES[algo.loss]
        self._function = _bind("algo.loss", call, LOSS_INPUTS, LOSS_SETTINGS, algo)
        self.spec = algo.loss
        if "new_logprobs" not in self._function.inputs:
            raise ConfigError(
                f"algo.loss: {algo.loss} takes no new_logprobs, so its loss would have no gradient; add the parameter"
            )
        if algo.dual_clip and "dual_clip" not in self._function.constants:
            raise ConfigError(
                f"algo.dual_clip: got {algo.dual_clip}, but {algo.loss} takes no dual_clip; set it to 0, or add the "
                "parameter"
            )

    def __call__(self, **tensors: Tensor) -> PolicyLoss:
        """Return the loss of each token. `tensors` are LOSS_INPUTS: `lengths` is [S], all others are [T]."""
        if not self.is_own:
            return self._function(tensors)
        new_logprobs = tensors["new_logprobs"]
        none_clipped = torch.zeros_like(new_logprobs, dtype=torch.bool)
        if not new_logprobs.numel():  # all ranks run equally many passes, so some have no tokens
            return PolicyLoss(new_logprobs * 0, none_clipped)
        result = self._function(tensors)
        loss, clipped = (result.loss, result.clipped) if isinstance(result, PolicyLoss) else (result, none_clipped)
        rule = f"it must return one loss per token, [{len(new_logprobs)}], or a PolicyLoss of two such tensors"
        for tensor in (loss, clipped):
            if not isinstance(tensor, Tensor) or tensor.shape != new_logprobs.shape:
                raise self._function.mistake(_describe(tensor), f"{rule}. Do not take the mean or the sum")
        if not loss.requires_grad:
            raise self._function.mistake("a loss without a gradient", "it must depend on new_logprobs, not detached")
        return PolicyLoss(loss, clipped.bool())


class OwnAdvantage:
    """The function of the user that algo.advantage names."""

    def __init__(self, algo: AlgoConfig):
        key, call = "algo.advantage", _load("algo.advantage", algo.advantage)
        if "values" in getattr(signature_of(call), "parameters", ()):
            raise ConfigError(
                f"{key}: {algo.advantage} takes values, but only algo.advantage=gae trains a critic; remove the "
                "parameter, or use gae"
            )
        self._function = _bind(key, call, ADVANTAGE_INPUTS, ADVANTAGE_SETTINGS, algo)
        self.is_per_token = "token_rewards" in self._function.inputs
        self.is_standardized = bool(getattr(call, "standardize", False))
        if self.is_per_token == ("rewards" in self._function.inputs):
            raise ConfigError(
                f"{key}: {algo.advantage} takes {'both' if self.is_per_token else 'neither'} of rewards and "
                "token_rewards; take rewards [S] to return one advantage per response, or token_rewards [T] to return "
                "one per token"
            )

    def __call__(self, **tensors: Tensor) -> Tensor:
        """Return the advantage of each token, [T]. `tensors` are ADVANTAGE_INPUTS."""
        rewards = tensors["token_rewards" if self.is_per_token else "rewards"]
        if not rewards.numel():
            return tensors["token_rewards"]
        result = self._function(tensors)
        if not isinstance(result, Tensor) or result.shape != rewards.shape:
            what = "token of the responses" if self.is_per_token else "response"
            rule = f"it must return one advantage per {what}, [{len(rewards)}]"
            raise self._function.mistake(_describe(result), rule)
        if num_bad := int((~torch.isfinite(result)).sum()):
            raise FloatingPointError(
                f"algo.advantage: {self._function.spec} returned {num_bad} of {len(result)} advantages that are NaN or "
                "infinite; every advantage must be finite. Check divisions: the standard deviation of equal rewards "
                "is 0"
            )
        result = result.detach().to(rewards.dtype)
        return result if self.is_per_token else result[tensors["segment_ids"]]


def own_advantage(algo: AlgoConfig) -> OwnAdvantage | None:
    """Return the user's function, or None if algo.advantage is built in."""
    return OwnAdvantage(algo) if is_own(algo.advantage) else None


def check_functions(algo: AlgoConfig) -> None:
    """Raise ConfigError if the loss or the advantage cannot be imported or called."""
    specs = {spec.rpartition(":")[2]: spec for spec in (algo.loss, algo.advantage) if is_own(spec)}
    for name, options in algo.options.items():
        if name not in specs:
            known = f"the functions of your own are {', '.join(specs)}" if specs else "there are none"
            raise ConfigError(
                f"algo.options: got options of {name!r}; only functions of your own in algo.loss and algo.advantage "
                f"have options, and {known}"
            )
        if not isinstance(options, dict):
            raise ConfigError(f"algo.options.{name}: got {options!r}; it must be a mapping of arguments")
    if algo.options and is_own(algo.loss) and is_own(algo.advantage) and len(specs) == 1:
        raise ConfigError(
            f"algo.options: algo.loss and algo.advantage are both named {algo.loss.rpartition(':')[2]!r}, so their "
            "options cannot be told apart; rename one"
        )
    Loss(algo)
    own_advantage(algo)


def _load(key: str, spec: str) -> Callable[..., Any]:
    check_spec(key, spec, LOSS_NAMES if key == "algo.loss" else ADVANTAGE_NAMES)
    return import_function(key, spec)


def _bind(
    key: str, call: Callable[..., Any], tensors: Sequence[str], settings: Sequence[str], algo: AlgoConfig
) -> Function:
    """Find the arguments that a function takes, among these tensors and settings of `algo`."""
    spec = algo.loss if key == "algo.loss" else algo.advantage
    name, signature = spec.rpartition(":")[2], signature_of(call)
    if signature is None:
        raise ConfigError(f"{key}: the parameters of {spec} cannot be read; wrap it in a function written in Python")
    options = algo.options.get(name, {}) if is_own(spec) else {}
    for option in options:
        if option in tensors or option in settings:
            remedy = f"set algo.{option}" if option in settings else "remove it"
            raise ConfigError(f"algo.options.{name}: got {option}, which the learner passes itself; {remedy}")
    named = [each.name for each in signature.parameters.values() if each.kind not in VARIADIC]
    inputs = tuple(each for each in tensors if each in named)
    constants = {each: getattr(algo, each) for each in settings if each in named} | options
    try:
        signature.bind(**dict.fromkeys(inputs), **constants)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {name} takes {signature}, but {error}; its parameters must be among "
            f"{', '.join((*tensors, *settings))}, or have a default, or be set in algo.options.{name}"
        ) from None
    return Function(key, spec, call, inputs, constants)


def _describe(result: Any) -> str:
    return f"a tensor of shape {[*result.shape]}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
