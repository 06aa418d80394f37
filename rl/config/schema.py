"""Every setting of a run: frozen dataclasses, which rl/config/load.py fills and rl/config/rules.py checks.

The text beside a field is its documentation. Nothing here knows about ranks or devices.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "configs" / "default.yaml"
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
        """Return mixing weights by path; None: the rows of all files form one pool."""
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
    engine_options: dict[str, Any] = key({}, "further arguments of vllm.LLM, such as {block_size: 64}, as they are")


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
    gamma: float = key(1.0, "discount per token, of reinforce_pp and gae; the others have none")
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
        "correction_limit; sequence_mask, dropped above it; token_mask or sequence_mask_two_sided, dropped above it "
        "and below its inverse",
    )
    correction_limit: float = key(2.0, "largest weight; two-sided masks also drop those below its inverse")
    overlong_tokens: int = key(
        0, "DAPO: the last so many tokens before max_new_tokens cost reward, up to 1 at the limit; 0: none"
    )
    mask_truncated: bool = key(
        False,
        "leave responses that were cut at max_new_tokens out of everything: means, advantages, losses, the critic",
    )
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
        "weights and optimizer in host memory: none; rollout, while the engine of the same rank works; moments, then "
        "only the optimizer's, two thirds of it; always, with optimizer steps on the CPU, where memory is short",
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
    silence_floor_s: float = key(
        60.0, "minimum silence in seconds before a rank counts as hung; the limit is 5 times a stage's longest so far"
    )
    silence_cap_s: float = key(
        1800.0,
        "maximum silence in seconds; it also applies to a new stage, a compilation, an engine build, and a checkpoint "
        "whose disk accepts nothing",
    )


@dataclass(frozen=True)
class DebugConfig:
    share_gpu: bool = key(False, "all ranks of a node on GPU 0, for trying a placement on one card")
    ignore_stop_tokens: bool = key(False, "every response goes on to its token limit, for measuring")
    profile_step: int = key(0, "profile this step on every actor rank, into the folder profile of the run; 0: none")
    profile_num_steps: int = key(1, "and those after it, so many in all")
    num_collectives: int = key(
        2000, "that NCCL's flight recorder keeps of each rank, on GPUs; it also tells who waits; 0: off"
    )
    dry_run: bool = key(False, "what --dry-run sets: nothing is saved, and a model folder may have no weights")
    breakpoints: bool = key(False, "ranks wait a day, not transfer_timeout_s, for one that stands at a breakpoint()")
    post_mortem: bool = key(False, "an exception opens a debugger where it was raised, and the others wait likewise")
    save_rollouts: bool = key(False, "write each step's batch to the run's folder, one safetensors file an actor rank")


@dataclass(frozen=True)
class Config:
    placement: dict[str, Any] = key({"actor,rollout": "all"}, "who does what: rl/placement/roles.py has the grammar")
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
CORRECTIONS = ("none", "token", "sequence", "token_mask", "sequence_mask", "sequence_mask_two_sided")
PLACEMENT_SIZES = ("num_nodes", "num_gpus_per_node")
DAY_S = 86_400.0


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
