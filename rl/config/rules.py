"""Check the settings. rl/placement/roles.py checks those that depend on the ranks.

The schema declares which values each key accepts. The rules here check combinations of keys, and the contents of a
mapping or a template. A rule yields what is wrong. Rules may assume that those before them found nothing.
"""

import math
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from rl.config.schema import PLACEHOLDER, Config, ConfigError, keys_of

SET_NAME = re.compile(r"[\w.-]+", re.ASCII)


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that is not allowed, alone or in combination with others."""
    for name, entry in keys_of(Config):
        allowed, value = entry.metadata["allowed"], attrgetter(name)(config)
        if allowed and not allowed.accepts(value):
            raise ConfigError(f"{name}: got {value!r}; it must be {allowed.text}")
    for rules in (_training_problems, _data_problems, _evaluation_problems):
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
    if algo.dual_clip and algo.loss != "clip":
        yield f"algo.dual_clip: got {algo.dual_clip}, but algo.loss={algo.loss} has no such bound; set it to 0"
    if (rollout.top_p < 1 or rollout.top_k) and algo.correction == "none":
        yield (
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: engines would sample from a truncated "
            "and rescaled distribution, but the learner computes probabilities over the whole vocabulary, so their "
            "ratio would be wrong. Set algo.correction=token, which weights each token by that ratio, or top_p=1 "
            "top_k=0"
        )
    if algo.kl_target and not algo.kl_coef:
        yield "algo.kl_target is set, but algo.kl_coef=0 leaves nothing to adapt; give a coefficient to start with"
    if algo.kl_estimator == "full" and algo.has_kl_in_reward:
        need = "the distributions of policy and reference at once, which only the update has"
        yield f"algo.kl_estimator=full needs {need}; set algo.kl_place=loss, or choose k1, k2 or k3"
    if algo.dynamic_sampling and rollout.num_samples_per_prompt < 2:
        yield f"{samples}; algo.dynamic_sampling keeps only groups with different rewards, so set it to 2 or more"
    if algo.dynamic_sampling and config.train.num_epochs:
        reason = "because the number of prompts per step is not known in advance; set train.num_steps"
        yield f"train.num_epochs cannot be turned into steps with algo.dynamic_sampling, {reason}"


def _data_problems(config: Config) -> Iterator[str]:
    data, train, sets = config.data, config.data.train, config.data.eval
    if not train or not _are_distinct_paths([*train] if isinstance(train, dict) else train):
        yield f"data.train: got {train!r}; it must be a path, a list of different paths, or a mapping path -> weight"
    for path, weight in train.items() if isinstance(train, dict) else ():
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            yield f"data.train: got {weight!r} for {path}; a mixing weight must be greater than 0"
    if sets and not _are_distinct_paths([*sets.values()] if isinstance(sets, dict) else sets):
        yield f"data.eval: got {sets!r}; it must be a path, a list of different paths, or a mapping name -> path"
    if bad := [name for name in data.eval_paths if not SET_NAME.fullmatch(name)]:
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
    if data.answer_key in placeholders and data.answer_key != data.prompt_key:
        problem = f"the placeholder {{{data.answer_key}}} would put the reference answer into the prompt"
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
    if metric.startswith("eval/") and not settings.interval:
        yield f"checkpoint.best_metric: got {metric!r}, but nothing is evaluated; set eval.interval"


def _are_distinct_paths(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return all(isinstance(path, str) and path for path in paths) and len(set(paths)) == len(paths)
