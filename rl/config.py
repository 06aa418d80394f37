"""Every setting of a run: frozen dataclasses, filled from a YAML file and `key=value` overrides through OmegaConf.

The text beside a field is its documentation. Unknown keys are errors that name the nearest known key; values that
contradict each other are errors that say what to change. Nothing here knows about ranks or devices.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = ROOT / "configs" / "default.yaml"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
SET_NAME = re.compile(r"[\w.-]+", re.ASCII)
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


class ConfigError(ValueError):
    """A mistake in the user's settings; the message says what was got, what is required and what to change."""


def key(default: Any, doc: str) -> Any:
    """A documented field; lists and dicts are copied into each instance."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class RunConfig:
    dir: str = key("runs", "folder that holds the run folders")
    name: str = key("", "run folder's name; empty: the config file's name and the time the launcher started")
    seed: int = key(0, "seed of the prompt order and of every sample")


@dataclass(frozen=True)
class ModelConfig:
    path: str = key("configs/tiny", "Hugging Face model folder, or a hub name")
    dtype: str = key("float32", "float32 or bfloat16: the dtype of forward passes and engines; masters are float32")


@dataclass(frozen=True)
class DataConfig:
    train: Any = key(
        "configs/tiny/train.jsonl", "prompts to train on: a path, a list, or a mapping path -> mixing weight"
    )
    eval: Any = key("", "held-out prompts: a path, a list, or a mapping name -> path; empty: no evaluation")
    prompt_key: str = key("prompt", "column that holds the prompt, or a list of messages with role and content")
    answer_key: str = key("answer", "column that holds the reference answer; empty: there is none")
    template: str = key("", "text with {column} placeholders that becomes the prompt; {prompt} is data.prompt_key's")
    chat_template: bool = key(False, "wrap each prompt as a user message in the tokenizer's chat template")
    system_prompt: str = key("", "system message before it; needs chat_template")
    max_prompt_tokens: int = key(1024, "rows with longer prompts are skipped, or end the run: data.long_rows")
    long_rows: str = key("skip", "rows above max_prompt_tokens: skip, with counts, or fatal")
    bad_rows: str = key("fatal", "malformed rows: fatal, or skip; either way they are reported with file and line")

    @property
    def train_weights(self) -> dict[str, float | None]:
        """By path; None: the rows of all files form one pool."""
        if isinstance(self.train, dict):
            return dict(self.train)
        return dict.fromkeys([self.train] if isinstance(self.train, str) else self.train)

    @property
    def eval_paths(self) -> dict[str, str]:
        """By the set's name, which is the file's unless it was given."""
        if isinstance(self.eval, dict):
            return {str(name): path for name, path in self.eval.items()}
        paths = [self.eval] if isinstance(self.eval, str) else self.eval
        return {Path(path).stem: path for path in paths or [] if path}


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = key("vllm", "vllm, or fake: an engine without a model for tests of the plumbing")
    num_samples_per_prompt: int = key(8, "rollouts in a group")
    temperature: float = key(1.0, "sampling temperature; logprobs of engine and learner are at this temperature")
    top_p: float = key(1.0, "sample from the likeliest tokens of this total probability; below 1 needs algo.correction")
    top_k: int = key(0, "sample from this many likeliest tokens; 0: all; above 0 needs algo.correction")
    max_new_tokens: int = key(64, "tokens after which a response is cut")
    tensor_parallel_size: int = key(1, "consecutive rollout ranks of one node that host one engine")
    max_num_seqs: int = key(256, "sequences one engine decodes at once")
    kv_cache_mb: int = key(0, "KV cache of one rank; 0: 256 MB on a CPU, gpu_memory_fraction on a GPU")
    gpu_memory_fraction: float = key(0.85, "share of a GPU's memory that an engine may fill")
    deterministic: bool = key(
        False, "seed each sample: the same tokens whichever engine samples them, and when; slower"
    )
    enforce_eager: bool = key(False, "no CUDA graphs: starts faster, decodes slower")
    max_mismatch_kl: float = key(0.0, "end the run when engine and learner disagree by more than this KL; 0: never")


@dataclass(frozen=True)
class RewardConfig:
    function: Any = key("exact_match", "a built-in name, file.py:function, or a mapping of those to weights; 0: logged")
    options: dict[str, Any] = key({}, "arguments by function name, such as {regex: {pattern: ...}}")
    timeout_s: float = key(10.0, "after which the call of a response is killed: it scores 0, in reward/timeouts")
    num_workers: int = key(0, "processes that score, of each engine; 0: its share of the cores, at most 8")


@dataclass(frozen=True)
class AlgoConfig:
    """docs/algorithms.md has the formulas and the papers."""

    advantage: str = key(
        "grpo", "grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, or gae (with a critic: PPO)"
    )
    gamma: float = key(1.0, "discount per token, of reinforce_pp and gae")
    lam: float = key(1.0, "lambda of gae")
    loss: str = key("clip", "clip (PPO's), gspo (ratios of whole sequences), or cispo (clipped weights)")
    loss_norm: str = key(
        "token", "what is averaged: token, sequence (each counts the same), constant (Dr.GRPO: by max_new_tokens)"
    )
    clip_low: float = key(0.2, "ratio is clipped below 1 - clip_low")
    clip_high: float = key(0.2, "ratio is clipped above 1 + clip_high")
    dual_clip: float = key(0.0, "bound of the ratio where advantages are negative, above 1, such as 3; 0: none")
    entropy_coef: float = key(0.0, "weight of the entropy bonus in the loss")
    kl_coef: float = key(0.0, "weight of the KL to the reference policy; 0: no reference model is loaded")
    kl_estimator: str = key(
        "k3", "k3, k2, k1 (an unbiased value, but its gradient averages to 0), or full (over the whole vocabulary)"
    )
    kl_place: str = key("loss", "loss, or reward: subtracted from rewards, token by token where the advantage can")
    kl_target: float = key(0.0, "adapt kl_coef to keep the KL per token near this; 0: kl_coef is fixed")
    correction: str = key(
        "none",
        "importance weights for what engine and learner differ in: none; token or sequence, truncated at "
        "correction_limit; token_mask or sequence_mask, dropped outside of it",
    )
    correction_limit: float = key(2.0, "largest weight; masks also drop those below its inverse")
    overlong_tokens: int = key(
        0, "DAPO: the last so many tokens before max_new_tokens cost reward, up to 1 at the limit; 0: none"
    )
    mask_truncated: bool = key(False, "learn nothing from responses that were cut at max_new_tokens")
    dynamic_sampling: bool = key(
        False, "DAPO: draw on the prompt stream until a batch is full of groups with unequal rewards"
    )
    max_sampling_rounds: int = key(10, "then the batch stays smaller")
    certainty_coef: float = key(0.0, "Intuitor: weight of the mean self-certainty of a response in its reward; 0: none")
    collapse_entropy: float = key(0.02, "with certainty_coef: say so when the entropy per token falls below this")
    num_mini_batches: int = key(1, "optimizer steps per pass over a batch")
    num_epochs: int = key(1, "passes over a batch")
    old_logprobs: str = key("auto", "auto: a pass of their own only where something needs it; always: a pass")

    @property
    def has_old_pass(self) -> bool:
        """Otherwise the batch was sampled by the very policy that its only update begins with."""
        return self.old_logprobs == "always" or self.num_mini_batches * self.num_epochs > 1 or self.scores_before_update

    @property
    def scores_before_update(self) -> bool:
        """Rewards depend on the policy's own logprobs."""
        return bool(self.certainty_coef) or self.has_kl_in_reward

    @property
    def has_kl_in_reward(self) -> bool:
        return bool(self.kl_coef) and self.kl_place == "reward"

    @property
    def has_kl_in_loss(self) -> bool:
        return bool(self.kl_coef) and self.kl_place == "loss"

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"


@dataclass(frozen=True)
class CriticConfig:
    """With algo.advantage=gae: on the actor ranks, with an optimizer of its own."""

    path: str = key("", "model whose layers it starts from; empty: model.path")
    lr: float = key(1e-5, "learning rate")
    clip: float = key(0.2, "values move by at most this in an update")
    warmup_steps: int = key(0, "steps at first in which only the critic learns")


@dataclass(frozen=True)
class ActorConfig:
    lr: float = key(1e-6, "peak learning rate")
    lr_schedule: str = key("constant", "constant, linear or cosine, after the warm-up, over train.num_steps")
    warmup_steps: int = key(0, "optimizer steps of linear warm-up")
    weight_decay: float = key(0.0, "AdamW weight decay")
    beta1: float = key(0.9, "AdamW beta1")
    beta2: float = key(0.999, "AdamW beta2")
    eps: float = key(1e-8, "AdamW epsilon")
    max_grad_norm: float = key(1.0, "gradients are scaled down to this global norm")
    max_tokens_per_micro_batch: int = key(8192, "tokens in one forward-backward; a longer sequence goes alone")
    compile: bool = key(True, "compile layers, on GPUs; the first steps take some tens of seconds longer")
    recompute: str = key(
        "none", "activations made anew in the backward pass: none, selective (every second layer), full"
    )
    offload: str = key(
        "none",
        "weights and optimizer in host memory: none; rollout, while the engine of the same rank works; always, with "
        "optimizer steps on the CPU, where memory is short",
    )
    num_replicas: int = key(1, "copies of the policy among the actors (HSDP); each is sharded over its share of them")


@dataclass(frozen=True)
class InferenceConfig:
    max_tokens_per_micro_batch: int = key(16384, "tokens in one forward of a logprob pass")


@dataclass(frozen=True)
class SyncConfig:
    bucket_mb: int = key(0, "whole tensors that travel together, two such buckets at a time; 0: 128, on a CPU 32")
    join_timeout_s: float = key(600.0, "ranks that have not joined an announced sync by then are named and end the run")
    verify: str = key("full", "full: what engines hold is what was sent; transport: what they got is; off: unproven")
    probe_interval: int = key(50, "compare logprobs of a probe every so many versions, after the first two; 0: never")
    probe_limit: float = key(0.0, "mean difference of these logprobs that ends the run; 0: by model.dtype")


@dataclass(frozen=True)
class CheckpointConfig:
    save_interval: int = key(20, "save every so many steps; 0: no step but the last, which is always saved")
    keep_last: int = key(2, "newest checkpoints that are kept")
    keep_every: int = key(0, "checkpoints of every so many steps are kept for good; 0: none")
    best_metric: str = key("", "also save and keep the step at which this was best, such as eval/accuracy")
    best_is_lowest: bool = key(False, "the lowest value of best_metric is the best one, not the highest")
    copies: int = key(1, "1; or 2: each file also goes to the next node's disk, so that a lost node loses nothing")
    resume: str = key("auto", "auto: go on from this run's newest; never: set them aside; PATH: fork another run's")
    hub_name: str = key("", "ORG/NAME on the Hugging Face hub, where tools/merge_checkpoint.py --upload puts the model")


@dataclass(frozen=True)
class TrainConfig:
    num_steps: int = key(100, "iterations of the loop")
    num_epochs: int = key(0, "passes over the prompts in place of num_steps; 0: num_steps counts")
    num_prompts_per_step: int = key(32, "prompts of one iteration")


@dataclass(frozen=True)
class EvalConfig:
    interval: int = key(0, "evaluate every so many steps, and before and after training; 0: never")
    num_prompts: int = key(0, "held-out prompts of each set in one evaluation; 0: all")
    num_samples: int = key(1, "responses to each, for avg@k, pass@k and maj@k; above 1 needs a temperature")
    temperature: float = key(0.0, "0: greedy")
    top_p: float = key(1.0, "sample from the likeliest tokens of this total probability")
    max_new_tokens: int = key(0, "tokens after which a response is cut; 0: rollout.max_new_tokens")
    function: str = key("", "of reward.function, the one that judges; empty: the first")


@dataclass(frozen=True)
class MetricsConfig:
    samples_interval: int = key(10, "sample responses go to TensorBoard every so many steps; 0: never")
    num_samples: int = key(4, "how many of them")


@dataclass(frozen=True)
class WorldConfig:
    transfer_timeout_s: float = key(300.0, "a collective that takes longer fails")
    max_fruitless_attempts: int = key(10, "restarts in a row that get no further than those before, and then none")
    silence_floor_s: float = key(60.0, "a rank may be silent in a stage for 5 times as long as ever, at least for this")
    silence_cap_s: float = key(1800.0, "and at most for this, as in a stage that it has not been in before")


@dataclass(frozen=True)
class DebugConfig:
    share_gpu: bool = key(False, "all ranks of a node on GPU 0, for trying a placement on one card")
    ignore_stop_tokens: bool = key(False, "every response goes on to its token limit, for measuring")
    profile_step: int = key(0, "profile this step on every actor rank, into the folder profile of the run; 0: none")
    profile_num_steps: int = key(1, "and those after it, so many in all")
    num_collectives: int = key(2000, "that NCCL's flight recorder keeps of each rank, on GPUs; 0: it is off")
    dry_run: bool = key(False, "what --dry-run sets: nothing is saved, and a model folder may have no weights")
    breakpoints: bool = key(False, "ranks wait a day, not transfer_timeout_s, for one that stands at a breakpoint()")
    post_mortem: bool = key(False, "an exception opens a debugger where it was raised, and the others wait likewise")
    save_rollouts: bool = key(False, "write each step's batch to the run's folder, one safetensors file an actor rank")


@dataclass(frozen=True)
class Config:
    placement: dict[str, Any] = key({"actor,rollout": "all"}, "who does what: rl/placement.py has the grammar")
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def max_sequence_tokens(self) -> int:
        """Of prompt and response, in training or evaluation."""
        return self.data.max_prompt_tokens + max(self.rollout.max_new_tokens, self.eval.max_new_tokens)


ADVANTAGES = {  # and whether they compare the rollouts of a prompt
    "grpo": True,
    "dr_grpo": True,
    "rloo": True,
    "reinforce_pp": False,
    "reinforce_pp_baseline": True,
    "gae": False,
}
CORRECTIONS = ("none", "token", "sequence", "token_mask", "sequence_mask")
PLACEMENT_SIZES = ("num_nodes", "num_gpus_per_node")
DAY_S = 86_400.0


def load_config(path: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """The defaults above, then the file, then the overrides; `path` None is configs/default.yaml."""
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
            f"{file} holds a {type(OmegaConf.to_container(loaded)).__name__}; a config is a mapping of sections"
        )
    values = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(values, dict)
    if any(_names_a_role(override) for override in overrides or []):
        # A role map is read as a whole: half of the file's map beside half of the command line's means nothing.
        placement = _placement_of(values)
        values["placement"] = {name: value for name, value in placement.items() if name in PLACEMENT_SIZES}
    for override in overrides or []:
        _apply_override(values, override)
    config = _typed(values)
    validate(config)
    return config


def resolve_path(path: str) -> Path:
    """A relative path is looked up in the working directory, then in the repository; a hub name stays as it is."""
    if Path(path).is_absolute() or Path(path).exists():
        return Path(path)
    return ROOT / path if (ROOT / path).exists() else Path(path)


def with_patience(config: Config) -> Config:
    """For a run with debuggers: a collective, or a weight sync, may take as long as a person."""
    if not (config.debug.breakpoints or config.debug.post_mortem):
        return config
    world = dataclasses.replace(config.world, transfer_timeout_s=DAY_S)
    return dataclasses.replace(config, world=world, sync=dataclasses.replace(config.sync, join_timeout_s=DAY_S))


def _names_a_role(override: str) -> bool:
    section, _, name = override.partition("=")[0].partition(".")
    return section == "placement" and name not in PLACEMENT_SIZES


def _placement_of(values: dict) -> dict:
    placement = values.get("placement") or {}
    if not isinstance(placement, dict):
        raise ConfigError(f"placement: got {placement!r}; it is a mapping such as {{'actor,rollout': all}}")
    return placement


def _apply_override(values: dict, override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"got the argument {override!r}; an override is key=value, such as actor.lr=1e-5")
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
        values["sync"]["verify"] = "off"  # which YAML reads as a boolean
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
                raise ConfigError(f"placement.{name}: got {size!r}; it is a whole number from 1, such as {name}: 8")
        config = dataclasses.replace(config, placement={str(name): value for name, value in placement.items()})
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
                raise ConfigError(f"{prefix}{name}: got {value!r}; it is a section with keys of its own")
            _check_keys(value, nested, f"{prefix}{name}.")


def validate(config: Config) -> None:
    """What can be wrong without knowing the world; rl/placement.py checks the rest."""

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
    one_of("actor.offload", config.actor.offload, ("none", "rollout", "always"))
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
