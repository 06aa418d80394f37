"""Load the config from a YAML file and `key=value` overrides, and check it.

An unknown key is an error that names the nearest one. The schema declares which values each key accepts. Rules check
combinations of keys, and the contents of a mapping or a template. A rule yields what is wrong, and may assume that the
rules before it found nothing. rl/placement/roles.py checks what depends on the ranks.
"""

import argparse
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from rl.config.functions import is_own
from rl.config.hub_path import read_hub_path
from rl.config.schema import (
    DEFAULT_CONFIG,
    PLACEHOLDER,
    PLACEMENT_SETTINGS,
    Config,
    ConfigError,
    Phase,
    Split,
    keys_of,
    resolve_path,
    sections_of,
)

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}
TYPE_NAMES |= {list: "a list"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of train.py, which the launchers accept too."""
    parser.add_argument("--config", metavar="F", help="YAML file; default: configs/default.yaml")
    kinds = parser.add_mutually_exclusive_group()
    what = "evaluate the newest checkpoint of run.name, or model.path if there is none: docs/evaluation.md"
    kinds.add_argument("--eval-only", action="store_true", help=what)
    what = "run one step and save nothing; the model may have no weights"
    kinds.add_argument("--dry-run", action="store_true", help=what)
    _add_phase_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config file")


def _add_phase_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a part of a step. docs/phases.md describes them."""
    phases = parser.add_argument_group("phases of a step (docs/phases.md)")
    what = "rollout: only sample the groups of the next step, into files; update: only train on them; default: both"
    phases.add_argument("--rl-phase", choices=get_args(Phase), default="both", help=what)
    what = "with --rl-phase rollout: only sample training prompts, or only evaluate; default: both if they are due"
    phases.add_argument("--rollout-split", choices=get_args(Split)[1:], default="all", help=what)
    what = "with --rl-phase rollout: sample only the Kth of N equal parts of the batch, such as 1/2"
    phases.add_argument("--rollout-part", metavar="K/N", default="1/1", help=what)
    what = "with --rl-phase update: folder of a run whose groups to train on; repeat it for several; default: this run"
    phases.add_argument("--trajectories", metavar="DIR", action="append", default=[], help=what)
    what = "with --rl-phase update: train even if groups of the batch are missing"
    phases.add_argument("--partial-batch", action="store_true", help=what)


def load_config(path: str | Path | None = None, overrides: Sequence[str] | None = ()) -> Config:
    """Return the checked settings: the defaults, then the file (or configs/default.yaml), then the overrides."""
    file, overrides = resolve_path(str(path)) if path else DEFAULT_CONFIG, overrides or ()
    if not file.is_file():
        remedy = "give --config the path of a YAML file, such as configs/default.yaml"
        raise ConfigError(f"no config file at {path}; {remedy}")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception as error:  # the YAML parser's own errors have no common base class
        raise ConfigError(_explain_yaml(file, error)) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}; a config must be a mapping of sections")
    if any(_names_a_role(override) for override in overrides):
        # A role on the command line replaces all roles of the file, since a mixture of both would be meaningless.
        values["placement"] = {name: size for name, size in _placement_of(values).items() if name in PLACEMENT_SETTINGS}
    for override in overrides:
        _apply_override(values, override)
    config = _typed(values)
    check(config)
    return _resolve_old_logprobs(config)


def _resolve_old_logprobs(config: Config) -> Config:
    """Return the config with the algo.old_logprobs that corrects for older weights, if tokens may come from them."""
    algo = config.algo
    if algo.old_logprobs != "auto" or not config.rollout.uses_older_weights:
        return config
    return replace(config, algo=replace(algo, old_logprobs="rollout" if algo.correction == "none" else "always"))


def _explain_yaml(file: Path, error: Exception) -> str:
    """Return why the file is not valid YAML. A tab is named, because an editor shows it as spaces."""
    mark: Any = getattr(error, "problem_mark", None)
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if mark is not None and lines[mark.line : mark.line + 1] and lines[mark.line][mark.column :].startswith("\t"):
        return f"{file}, line {mark.line + 1}: got a tab; YAML requires spaces: replace the tab with spaces"
    return f"{file} is not valid YAML: {' '.join(str(error).split())}"


def _names_a_role(override: str) -> bool:
    section, _, name = override.partition("=")[0].partition(".")
    return section == "placement" and name not in PLACEMENT_SETTINGS


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
    if placement.get("num_gpus_per_node") is not None:
        placement["num_gpus_per_node"] = parse_ranks_per_node(placement["num_gpus_per_node"])
    num_nodes = placement.get("num_nodes")
    if num_nodes is not None and (type(num_nodes) is not int or num_nodes < 1):
        raise ConfigError(f"placement.num_nodes: got {num_nodes!r}; it must be a whole number from 1, such as 4")
    per_node = placement.get("num_gpus_per_node")
    if isinstance(per_node, list) and num_nodes not in (None, len(per_node)):
        got = f"got {len(per_node)} numbers, but placement.num_nodes is {num_nodes}"
        raise ConfigError(f"placement.num_gpus_per_node: {got}; give one number for all nodes, or one for each")
    for section, _ in sections_of(Config):
        content = _content_of(values, section)
        if not isinstance(content, dict):
            got = "no keys" if content is None else repr(content)
            raise ConfigError(f"{section}: got {got}; it must be a section with keys, or be left out")
    if values.get("sync", {}).get("verify") is False:
        values["sync"]["verify"] = "off"  # YAML reads a bare `off` as a boolean
    actions = values.get("health", {}).get("actions")
    if isinstance(actions, dict):
        values["health"]["actions"] = {rule: "off" if action is False else action for rule, action in actions.items()}
    kinds = {name: entry.type for name, entry in keys_of(Config)}
    _fill_empty(values, kinds)
    _check_shapes(values)
    if "class" in values.get("environment", {}):
        values["environment"]["class_"] = values["environment"].pop("class")
    try:
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(values)))
    except ConfigKeyError as error:
        known = [entry.name.rstrip("_") for entry in fields(error.object_type or Config)]
        prefix = next((f"{name}." for name, kind in sections_of(Config) if kind is error.object_type), "")
        near = difflib.get_close_matches(str(error.key), known, n=1)
        names = ", ".join(prefix + name for name in known)
        hint = f"known keys: {names}. docs/coming_from.md translates the names of other trainers"
        if near:
            hint = f"did you mean {prefix}{near[0]}?"
        raise ConfigError(f"unknown config key {prefix}{error.key}; {hint}") from None
    except OmegaConfBaseException as error:
        name, problem = error.full_key or "config", str(error).splitlines()[0]
        if name in kinds and not isinstance(error, InterpolationResolutionError):
            section, _, leaf = name.rpartition(".")
            problem = f"got {_content_of(values, section)[leaf]!r}; it must be {_needed(kinds[name])}"
        raise ConfigError(f"{name}: {problem}") from None
    roles = {} if placement.keys() - PLACEMENT_SETTINGS else config.placement  # sizes alone keep the default roles
    given = {str(n): value if value is not None or n in PLACEMENT_SETTINGS else "" for n, value in placement.items()}
    return replace(config, placement=roles | given)


def _content_of(values: dict, section: str) -> Any:
    """Return what the settings have under the dotted name of a section."""
    content: Any = values
    for name in section.split("."):
        content = content.get(name, {})
    return content


def parse_ranks_per_node(value: Any) -> int | list[int]:
    """Return placement.num_gpus_per_node: a number, or a list with one number per node such as 8,4."""
    parts = value if isinstance(value, list) else str(value).split(",")
    counts = [int(part) if re.fullmatch("[0-9]{1,9}", str(part).strip()) else 0 for part in parts]
    if not counts or min(counts) < 1:
        raise ConfigError(
            f"placement.num_gpus_per_node: got {value!r}; it must be a whole number from 1, such as 8, or one per "
            "node, such as 8,4"
        )
    return counts[0] if len(counts) == 1 else counts


def _fill_empty(values: dict, kinds: Mapping[str, Any]) -> None:
    """Replace the empty values of text keys, as in `key=`, by empty strings. Other keys must have a value."""
    for name, kind in kinds.items():
        section, _, leaf = name.rpartition(".")
        content = _content_of(values, section)
        if leaf not in content or content[leaf] is not None:
            continue
        if kind not in (str, Any):
            remedy = "give one, or leave the key out for its default"
            raise ConfigError(f"{name}: got no value; it must be {_needed(kind)}: {remedy}")
        content[leaf] = ""


def _check_shapes(values: dict) -> None:
    """Refuse lists of anything but texts, for which OmegaConf has no plain message, and numbers for true or false,
    which it would take: `critic.lora=8` is no rank."""
    for name, entry in keys_of(Config):
        section, _, leaf = name.rpartition(".")
        value = _content_of(values, section).get(leaf)
        if value is None or (isinstance(value, str) and "${" in value):
            continue
        is_list = isinstance(value, list) and all(isinstance(each, str | int | float) for each in value)
        if get_origin(entry.type) is list and not is_list:
            allowed = entry.metadata["allowed"]
            raise ConfigError(f"{name}: got {value!r}; it must be {allowed.text if allowed else 'a list of texts'}")
        if entry.type is bool and type(value) in (int, float) and value not in (0, 1):
            raise ConfigError(f"{name}: got {value!r}; it must be {_needed(bool)}")


def _needed(kind: Any) -> str:
    """Describe the values of a key of this type."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return TYPE_NAMES.get(get_origin(kind) or kind, "a value")


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that is not allowed, alone or in combination with others."""
    for name, entry in keys_of(Config):
        allowed, value = entry.metadata["allowed"], attrgetter(name)(config)
        if allowed and not allowed.accepts(value):
            raise ConfigError(f"{name}: got {value!r}; it must be {allowed.text}")
    for rules in (_training_problems, _data_problems, _evaluation_problems, _environment_problems):
        for problem in rules(config):
            raise ConfigError(problem)


def _training_problems(config: Config) -> Iterator[str]:
    algo, rollout, prompts = config.algo, config.rollout, config.train.num_prompts_per_step
    samples = f"rollout.num_samples_per_prompt: got {rollout.num_samples_per_prompt}"
    if algo.num_mini_batches > prompts:
        limit = f"it must not exceed train.num_prompts_per_step = {prompts}"
        yield f"algo.num_mini_batches: got {algo.num_mini_batches}; a mini-batch holds whole groups, so {limit}"
    if algo.compares_rollouts and rollout.num_samples_per_prompt < 2:
        yield f"{samples}; algo.advantage={algo.advantage} compares at least 2 rollouts of a prompt"
    if algo.overlong_tokens > rollout.max_new_tokens:
        limit = f"rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield f"algo.overlong_tokens: got {algo.overlong_tokens}; it must not exceed {limit}"
    if algo.dual_clip and algo.loss != "clip" and not is_own(algo.loss):
        yield f"algo.dual_clip: got {algo.dual_clip}, but algo.loss={algo.loss} has no such bound; set it to 0"
    if (rollout.top_p < 1 or rollout.top_k) and algo.correction == "none":
        yield (
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: engines would sample from a truncated "
            "and rescaled distribution, but the learner computes probabilities over the whole vocabulary, so their "
            "ratio would be wrong. Set algo.correction=token, which weights each token by that ratio, or top_p=1 "
            "top_k=0"
        )
    yield from _round_problems(config)
    if algo.kl_target and not algo.kl_coef:
        yield "algo.kl_target is set, but algo.kl_coef=0 leaves nothing to adapt; give a coefficient to start with"
    if algo.kl_estimator == "full" and algo.has_kl_in_reward:
        need = "the distributions of policy and reference at once, which only the update has"
        yield f"algo.kl_estimator=full needs {need}; set algo.kl_place=loss, or choose k1, k2 or k3"
    if algo.kl_coef and algo.kl_estimator == "full" and config.reference.max_tokens_per_micro_batch:
        yield (
            f"reference.max_tokens_per_micro_batch: got {config.reference.max_tokens_per_micro_batch}, but with "
            "algo.kl_estimator=full the reference runs on the micro-batches of the update; set it to 0, and use "
            "actor.max_tokens_per_micro_batch"
        )
    if algo.dynamic_sampling and rollout.num_samples_per_prompt < 2:
        yield f"{samples}; algo.dynamic_sampling keeps only groups with different rewards, so set it to 2 or more"
    if algo.dynamic_sampling and config.train.num_epochs:
        reason = "because the number of prompts per step is not known in advance; set train.num_steps"
        yield f"train.num_epochs cannot be turned into steps with algo.dynamic_sampling, {reason}"


def _round_problems(config: Config) -> Iterator[str]:
    algo, rollout = config.algo, config.rollout
    limit = f"rollout.max_tokens_per_round={rollout.max_tokens_per_round}"
    if algo.has_recorded_ratio and algo.correction != "none":
        yield (
            f"algo.correction: got {algo.correction}, but with algo.old_logprobs=rollout the ratio of the loss is "
            "already that of the policy to the engine; set algo.correction=none, or algo.old_logprobs=always"
        )
    if rollout.uses_older_weights and algo.old_logprobs == "always" and algo.correction == "none":
        cause = limit if rollout.max_rounds > 1 else f"rollout.ahead={rollout.ahead}"
        yield (
            f"algo.old_logprobs: got always, but with {cause} older weights have sampled some of the tokens, which "
            "algo.correction=none does not correct; set algo.correction=token, or algo.old_logprobs=rollout"
        )
    if config.actor.overlap and rollout.max_rounds > 1:
        yield (
            f"actor.overlap: got true, but with {limit} an update trains on groups of several rounds; set "
            "rollout.max_tokens_per_round=0, or actor.overlap=false"
        )
    if config.actor.overlap and rollout.ahead:
        yield (
            "actor.overlap: got true, but with rollout.ahead=1 all groups of an update are there before it begins; set "
            "actor.overlap=false. rollout.ahead=0 with actor.overlap=true stays on-policy"
        )
    if config.actor.overlap and algo.dynamic_sampling:
        yield (
            "actor.overlap: got true, but with algo.dynamic_sampling=true it is not known which groups an update "
            "trains on before all of them are sampled; set algo.dynamic_sampling=false, or actor.overlap=false"
        )
    if rollout.keep_kv and rollout.max_rounds == 1:
        bounds = f"above 0 and below rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield (
            f"rollout.keep_kv: got true, but with {limit} no response continues in another round; set it {bounds}, or "
            "rollout.keep_kv=false"
        )


def _data_problems(config: Config) -> Iterator[str]:
    data, train, sets = config.data, config.data.train, config.data.eval
    if not train or not _are_distinct_paths([*train] if isinstance(train, dict) else train):
        yield f"data.train: got {train!r}; it must be a path, a list of different paths, or a mapping path -> weight"
    for path, weight in train.items() if isinstance(train, dict) else ():
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            yield f"data.train: got {weight!r} for {path}; a mixing weight must be greater than 0"
    if sets and not _are_distinct_paths([*sets.values()] if isinstance(sets, dict) else sets):
        yield f"data.eval: got {sets!r}; it must be a path, a list of different paths, or a mapping name -> path"
    paths = [*(data.train_weights if train else ()), *data.eval_paths.values()]
    for path in (path for path in paths if isinstance(path, str)):
        try:
            read_hub_path(path)
        except ValueError as error:
            yield f"data.train or data.eval: {error}"
    if bad := [name for name in data.eval_paths if not re.fullmatch(r"[\w.-]+", name, re.ASCII)]:
        rule = "a set's name has only letters, digits, '_', '-' and '.': give a mapping name -> path"
        yield f"data.eval: got the name {bad[0]!r}; {rule}"
    if isinstance(sets, list) and len(data.eval_paths) < len(sets):
        yield f"data.eval: got {sets!r}; two of these have the same name, so give a mapping name -> path"
    if data.system_prompt and not data.chat_template:
        yield "data.system_prompt is set, but only a chat template uses it; set data.chat_template=true"
    template, placeholders = f"data.template: got {data.template!r}", PLACEHOLDER.findall(data.template)
    if data.template and not placeholders:
        remedy = "add one, such as {prompt} for the column data.prompt_key"
        yield f"{template}, which has no {{column}}, so all prompts would be the same; {remedy}"
    answers = [name for name in placeholders if data.answer_key and f"{name}.".startswith(f"{data.answer_key}.")]
    if answers and data.answer_key != data.prompt_key:
        problem = f"the placeholder {{{answers[0]}}} would put the reference answer into the prompt"
        yield f"{template}; {problem}. Remove it. If the braces are literal text, write another word in them"


def _evaluation_problems(config: Config) -> Iterator[str]:
    settings, function, metric = config.eval, config.reward.function, config.checkpoint.best_metric
    if settings.num_samples > 1 and not settings.temperature:
        reason = "with eval.temperature=0 all responses to a prompt are the same"
        yield f"eval.num_samples: got {settings.num_samples}, but {reason}; set eval.temperature, for example 0.6"
    names = [str(each).rpartition(":")[2] for each in (function if isinstance(function, dict) else [function])]
    if settings.function not in ("", *names):
        yield f"eval.function: got {settings.function!r}; it must be one of reward.function: {', '.join(names)}"
    if settings.interval and not config.data.eval:
        yield "eval.interval is set, but data.eval is empty: give held-out prompts or set eval.interval=0"
    if metric and config.checkpoint.save_interval < 0:
        yield (
            f"checkpoint.best_metric: got {metric!r}, but checkpoint.save_interval=-1 saves nothing; set "
            "checkpoint.save_interval=0 to save the best and the last step, or remove the metric"
        )
    if metric.startswith("eval/") and not settings.interval:
        yield f"checkpoint.best_metric: got {metric!r}, but nothing is evaluated; set eval.interval"


def _environment_problems(config: Config) -> Iterator[str]:
    environment, rollout, most = config.environment, config.rollout, config.environment.max_conversation_tokens
    functions = config.reward.function if isinstance(config.reward.function, dict) else [config.reward.function]
    if "environment" in functions and not (environment.class_ or environment.rollout):
        yield (
            "reward.function: got environment, but there is none that gives rewards; set environment.class or "
            "environment.rollout, or choose another function"
        )
    if not environment.is_set:
        return
    if environment.rollout and (environment.tools or environment.class_):
        yield (
            "environment.rollout makes the whole rollout, so environment.tools and environment.class have no effect; "
            "call them in the function, and leave these keys out"
        )
    if environment.options and not (environment.class_ or environment.rollout):
        yield "environment.options are arguments of environment.class or environment.rollout; set one, or remove them"
    if not environment.rollout and not config.data.chat_template:
        yield (
            "environment.tools and environment.class need the model's chat template, which writes calls and their "
            "results; set data.chat_template=true"
        )
    if most and most < rollout.max_new_tokens:
        least = f"rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield f"environment.max_conversation_tokens: got {most}; it must be at least {least}, which it includes"
    if config.debug.mean_response_tokens:
        yield "debug.mean_response_tokens makes up the lengths of responses; set it to 0 with an environment"


def _are_distinct_paths(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return all(isinstance(path, str) and path for path in paths) and len(set(paths)) == len(paths)
