"""What settings must be, each and together; errors say what was got, what is required and what to change."""

import math
import re
from collections.abc import Callable
from typing import Any

from rl.config.schema import ADVANTAGES, CORRECTIONS, PLACEHOLDER, Config, ConfigError, DataConfig

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
SET_NAME = re.compile(r"[\w.-]+", re.ASCII)


def validate(config: Config) -> None:
    """What can be wrong without knowing the world; rl/placement/roles.py checks the rest."""

    def require(ok: bool, name: str, got: Any, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{name}: got {got!r}; {rule}")

    def one_of(name: str, got: str, choices: tuple[str, ...]) -> None:
        require(got in choices, name, got, f"choose one of {', '.join(choices)}")

    one_of("model.dtype", config.model.dtype, ("float32", "bfloat16"))
    one_of("rollout.engine", config.rollout.engine, ("vllm", "fake"))
    one_of("sync.verify", config.sync.verify, ("full", "transport", "off"))
    one_of("algo.old_logprobs", config.algo.old_logprobs, ("auto", "always"))
    one_of("algo.advantage", config.algo.advantage, tuple(ADVANTAGES))
    one_of("algo.loss", config.algo.loss, ("clip", "gspo", "cispo"))
    one_of("algo.loss_norm", config.algo.loss_norm, ("token", "sequence", "constant"))
    one_of("algo.kl_estimator", config.algo.kl_estimator, ("k1", "k2", "k3", "full"))
    one_of("algo.kl_place", config.algo.kl_place, ("loss", "reward"))
    one_of("algo.correction", config.algo.correction, CORRECTIONS)
    one_of("actor.recompute", config.actor.recompute, ("none", "selective", "full"))
    one_of("actor.offload", config.actor.offload, ("none", "rollout", "moments", "always"))
    one_of("actor.lr_schedule", config.actor.lr_schedule, ("constant", "linear", "cosine"))
    one_of("data.long_rows", config.data.long_rows, ("skip", "fatal"))
    one_of("data.bad_rows", config.data.bad_rows, ("fatal", "skip"))
    positive = {
        "train.num_steps": config.train.num_steps,
        "eval.num_samples": config.eval.num_samples,
        "train.num_prompts_per_step": config.train.num_prompts_per_step,
        "rollout.num_samples_per_prompt": config.rollout.num_samples_per_prompt,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
        "rollout.max_num_seqs": config.rollout.max_num_seqs,
        "rollout.temperature": config.rollout.temperature,
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "actor.max_tokens_per_micro_batch": config.actor.max_tokens_per_micro_batch,
        "actor.max_grad_norm": config.actor.max_grad_norm,
        "inference.max_tokens_per_micro_batch": config.inference.max_tokens_per_micro_batch,
        "actor.num_replicas": config.actor.num_replicas,
        "algo.num_mini_batches": config.algo.num_mini_batches,
        "algo.num_epochs": config.algo.num_epochs,
        "algo.max_sampling_rounds": config.algo.max_sampling_rounds,
        "critic.clip": config.critic.clip,
        "data.max_prompt_tokens": config.data.max_prompt_tokens,
        "reward.timeout_s": config.reward.timeout_s,
        "sync.join_timeout_s": config.sync.join_timeout_s,
        "world.transfer_timeout_s": config.world.transfer_timeout_s,
        "actor.eps": config.actor.eps,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "debug.profile_num_steps": config.debug.profile_num_steps,
    }
    for name, number in positive.items():
        require(0 < number < math.inf, name, number, "it must be greater than 0")
    nonnegative = {
        "actor.lr": config.actor.lr,
        "actor.warmup_steps": config.actor.warmup_steps,
        "algo.kl_coef": config.algo.kl_coef,
        "algo.kl_target": config.algo.kl_target,
        "algo.entropy_coef": config.algo.entropy_coef,
        "algo.overlong_tokens": config.algo.overlong_tokens,
        "algo.collapse_entropy": config.algo.collapse_entropy,
        "critic.lr": config.critic.lr,
        "critic.warmup_steps": config.critic.warmup_steps,
        "rollout.top_k": config.rollout.top_k,
        "train.num_epochs": config.train.num_epochs,
        "eval.interval": config.eval.interval,
        "eval.num_prompts": config.eval.num_prompts,
        "eval.temperature": config.eval.temperature,
        "eval.max_new_tokens": config.eval.max_new_tokens,
        "rollout.max_mismatch_kl": config.rollout.max_mismatch_kl,
        "rollout.kv_cache_mb": config.rollout.kv_cache_mb,
        "reward.num_workers": config.reward.num_workers,
        "actor.weight_decay": config.actor.weight_decay,
        "sync.bucket_mb": config.sync.bucket_mb,
        "sync.probe_interval": config.sync.probe_interval,
        "sync.probe_limit": config.sync.probe_limit,
        "checkpoint.save_interval": config.checkpoint.save_interval,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "metrics.samples_interval": config.metrics.samples_interval,
        "metrics.num_samples": config.metrics.num_samples,
        "debug.profile_step": config.debug.profile_step,
        "debug.num_collectives": config.debug.num_collectives,
    }
    for name, number in nonnegative.items():
        require(0 <= number < math.inf, name, number, "it must not be negative")
    for name, beta in (("actor.beta1", config.actor.beta1), ("actor.beta2", config.actor.beta2)):
        require(0 <= beta < 1, name, beta, "it must lie between 0 and 1")
    require(0 < config.algo.clip_low < 1, "algo.clip_low", config.algo.clip_low, "it must lie between 0 and 1")
    require(config.algo.clip_high > 0, "algo.clip_high", config.algo.clip_high, "it must be greater than 0")
    fraction = config.rollout.gpu_memory_fraction
    require(0 < fraction < 1, "rollout.gpu_memory_fraction", fraction, "it must lie between 0 and 1")
    batches, prompts = config.algo.num_mini_batches, config.train.num_prompts_per_step
    rule = f"a mini-batch holds whole groups, so it must not exceed train.num_prompts_per_step = {prompts}"
    require(batches <= prompts, "algo.num_mini_batches", batches, rule)
    if ADVANTAGES[config.algo.advantage]:
        rule = f"algo.advantage={config.algo.advantage} compares at least 2 rollouts of a prompt"
        require(config.rollout.num_samples_per_prompt > 1, "rollout.num_samples_per_prompt", 1, rule)
    _validate_algo(config, require)
    _validate_data(config.data)
    require(0 < config.eval.top_p <= 1, "eval.top_p", config.eval.top_p, "it must be above 0 and at most 1")
    if config.eval.num_samples > 1 and not config.eval.temperature:
        raise ConfigError(
            f"eval.num_samples: got {config.eval.num_samples}, but with eval.temperature=0 all responses to a prompt "
            "are the same; set eval.temperature, for example 0.6"
        )
    functions = config.reward.function if isinstance(config.reward.function, dict) else [config.reward.function]
    names = [str(function).rpartition(":")[2] for function in functions]
    rule = f"choose one of reward.function: {', '.join(names)}"
    require(config.eval.function in ("", *names), "eval.function", config.eval.function, rule)
    if config.eval.interval and not config.data.eval:
        raise ConfigError("eval.interval is set, but data.eval is empty: give held-out prompts or set eval.interval=0")
    require(config.checkpoint.copies in (1, 2), "checkpoint.copies", config.checkpoint.copies, "choose 1 or 2")
    require(bool(config.checkpoint.resume), "checkpoint.resume", "", "choose auto, never or a path")
    name = config.checkpoint.hub_name
    require(not name or bool(HUB_NAME.fullmatch(name)), "checkpoint.hub_name", name, "it is ORG/NAME or NAME")
    metric = config.checkpoint.best_metric
    if metric.startswith("eval/") and not config.eval.interval:
        raise ConfigError(f"checkpoint.best_metric: got {metric!r}, but nothing is evaluated; set eval.interval")
    if "/" in config.run.name:
        raise ConfigError(
            f"run.name: got {config.run.name!r}; it is a folder's name, without '/' (run.dir is the path)"
        )


def _validate_algo(config: Config, require: Callable[[bool, str, Any, str], None]) -> None:
    algo, rollout = config.algo, config.rollout
    for name, factor in (("algo.gamma", algo.gamma), ("algo.lam", algo.lam), ("rollout.top_p", rollout.top_p)):
        require(0 < factor <= 1, name, factor, "it must be above 0 and at most 1")
    require(algo.dual_clip == 0 or algo.dual_clip > 1, "algo.dual_clip", algo.dual_clip, "it must be above 1, or 0")
    require(1 < algo.correction_limit < math.inf, "algo.correction_limit", algo.correction_limit, "it must be above 1")
    require(math.isfinite(algo.certainty_coef), "algo.certainty_coef", algo.certainty_coef, "it must be a number")
    if algo.dual_clip and algo.loss != "clip":
        raise ConfigError(
            f"algo.dual_clip: got {algo.dual_clip}, but algo.loss={algo.loss} has no such bound; set it to 0"
        )
    if (rollout.top_p < 1 or rollout.top_k) and algo.correction == "none":
        raise ConfigError(
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: engines would sample from a cut and "
            "rescaled distribution, the learner computes probabilities over the whole vocabulary, and their ratio "
            "would be wrong without a word. Set algo.correction=token, which weights each token by that ratio, or "
            "top_p=1 top_k=0"
        )
    if algo.kl_target and not algo.kl_coef:
        raise ConfigError(
            "algo.kl_target is set, but algo.kl_coef=0 leaves nothing to adapt; give a coefficient to start"
        )
    if algo.kl_estimator == "full" and algo.has_kl_in_reward:
        raise ConfigError(
            "algo.kl_estimator=full needs the distributions of policy and reference at once, which only the update "
            "has; set algo.kl_place=loss, or choose k1, k2 or k3"
        )
    longest = rollout.max_new_tokens
    rule = f"it must not exceed rollout.max_new_tokens = {longest}"
    require(algo.overlong_tokens <= longest, "algo.overlong_tokens", algo.overlong_tokens, rule)
    if algo.dynamic_sampling and rollout.num_samples_per_prompt < 2:
        raise ConfigError(
            "algo.dynamic_sampling looks for groups with unequal rewards; set rollout.num_samples_per_prompt to 2 or "
            "more"
        )
    if algo.dynamic_sampling and config.train.num_epochs:
        raise ConfigError(
            "train.num_epochs cannot be turned into steps with algo.dynamic_sampling, which decides as it goes how "
            "many prompts a step takes; set train.num_steps"
        )


def _validate_data(data: DataConfig) -> None:
    if not _are_paths([*data.train] if isinstance(data.train, dict) else data.train) or not data.train:
        raise ConfigError(
            f"data.train: got {data.train!r}; it is a path, a list of different paths, or a mapping path -> weight"
        )
    for path, weight in data.train.items() if isinstance(data.train, dict) else ():
        if type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise ConfigError(f"data.train: got {weight!r} for {path}; a mixing weight is a number greater than 0")
    if data.eval and not _are_paths([*data.eval.values()] if isinstance(data.eval, dict) else data.eval):
        raise ConfigError(
            f"data.eval: got {data.eval!r}; it is a path, a list of different paths, or a mapping name -> path"
        )
    names = list(data.eval_paths)
    if bad := [name for name in names if not SET_NAME.fullmatch(name)]:
        raise ConfigError(
            f"data.eval: got the name {bad[0]!r}; a set's name has only letters, digits, '_', '-' and '.': give "
            "a mapping name -> path"
        )
    if isinstance(data.eval, list) and len(names) < len(data.eval):
        raise ConfigError(f"data.eval: got {data.eval!r}, of which two have the same name; give a mapping name -> path")
    if data.system_prompt and not data.chat_template:
        raise ConfigError("data.system_prompt is set, but has no place without data.chat_template=true")
    placeholders = PLACEHOLDER.findall(data.template)
    if data.template and not placeholders:
        raise ConfigError(
            f"data.template: got {data.template!r}, without a {{column}}: all prompts would be the same; {{prompt}} "
            "stands for the prompt column"
        )
    if data.answer_key in placeholders and data.answer_key != data.prompt_key:
        raise ConfigError(
            f"data.template: got {data.template!r}; {{{data.answer_key}}} would put the reference answer into the "
            "prompt: use another word between these braces"
        )


def _are_paths(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return all(isinstance(path, str) and path for path in paths) and len(set(paths)) == len(paths)
