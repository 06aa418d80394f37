"""Every setting of a run: frozen dataclasses that rl/config/load.py fills and checks.

Each key has a default, its documentation and, if needed, the values that it accepts. Nothing here depends on ranks or
devices.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from ipaddress import ip_address
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rl.common.files import is_plain
from rl.config.hub_path import read_hub_path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "configs" / "default.yaml"
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
PLACEMENT_SIZES = ("num_nodes", "num_gpus_per_node")
PLACEMENT_SETTINGS = (*PLACEMENT_SIZES, "rank_weights")  # keys of the section that are not roles
DAY_S = 86_400.0

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae")
LOSS_NAMES = ("clip", "gspo", "cispo")
Correction = Literal["none", "token", "sequence", "token_mask", "sequence_mask", "sequence_mask_two_sided"]
Schedule = Literal["constant", "linear", "cosine"]
# auto: rl/run/derive.py chooses before anything is built, so only settings that a user gives are auto.
Recompute = Literal["auto", "none", "head", "selective", "full"]
Offload = Literal["auto", "none", "rollout", "moments", "always"]
Sleep = Literal["auto", "always", "never"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd", "muon"]
WRITERS = ("wandb", "swanlab")
Verify = Literal["full", "transport", "off"]
Phase = Literal["both", "rollout", "update"]  # what a command does of a step: --rl-phase, docs/phases.md
Split = Literal["all", "train-only", "eval-only"]  # what the phase rollout samples: --rollout-split


class ConfigError(ValueError):
    """A mistake in the user's settings. The message says what was wrong, what is allowed and what to change."""


class Allowed(NamedTuple):
    """The values that a key accepts, as a text for people and as a predicate."""

    text: str
    accepts: Callable[[Any], object]


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    with suppress(ValueError):
        return bool(ip_address(text))
    return False


POSITIVE = Allowed("greater than 0", lambda value: 0 < value < math.inf)
POSITIVE_OR_INF = Allowed("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Allowed("at least 0", lambda value: 0 <= value < math.inf)
AT_LEAST_MINUS_1 = Allowed("at least -1", lambda value: value >= -1)
ZERO_OR_ONE = Allowed("0 or 1", lambda value: value in (0, 1))
UP_TO_1 = Allowed("greater than 0 and at most 1", lambda value: 0 < value <= 1)
BETWEEN_0_AND_1 = Allowed("greater than 0 and less than 1", lambda value: 0 < value < 1)
FROM_0_BELOW_1 = Allowed("at least 0 and less than 1", lambda value: 0 <= value < 1)
ABOVE_1 = Allowed("greater than 1", lambda value: 1 < value < math.inf)
ZERO_OR_ABOVE_1 = Allowed("0 or greater than 1", lambda value: value == 0 or value > 1)
PORT = Allowed("0, or 1024 to 65535", lambda port: port == 0 or 1024 <= port <= 65535)
FINITE = Allowed("a finite number", math.isfinite)
PATH = Allowed("a path", bool)
COLUMN = Allowed("the name of a column", bool)
MODEL = Allowed("a directory or a hub name", bool)
ADDRESS = Allowed("an IP address, such as 127.0.0.1", _is_address)
DIRECTORY_NAME = Allowed(
    "a printable directory name without '/', other than '.' and '..' (run.dir is the path)",
    lambda name: not name or ("/" not in name and is_plain(name)),
)
ONE_OR_TWO = Allowed("1 or 2", lambda value: value in (1, 2))
RESUME = Allowed("auto, never or a path", bool)
ADVANTAGE_OR_FILE = Allowed(
    f"{', '.join(ADVANTAGE_NAMES)} or file.py:function", lambda spec: spec in ADVANTAGE_NAMES or ":" in spec
)
LOSS_OR_FILE = Allowed(f"{', '.join(LOSS_NAMES)} or file.py:function", lambda spec: spec in LOSS_NAMES or ":" in spec)
PROJECT = Allowed("a name of letters, digits, '_', '-' and '.'", lambda name: re.fullmatch(r"[\w.-]+", name, re.ASCII))
WRITER_NAMES = Allowed(
    f"a list of different names among {', '.join(WRITERS)}",
    lambda names: len(set(names)) == len(names) and set(names) <= set(WRITERS),
)
HEALTH_RULES = (
    *("reward_flat", "no_signal", "entropy", "mismatch", "truncation", "gradient_spikes", "skipped_steps", "timeouts"),
    *("waiting", "host_memory", "lag"),
)
HEALTH_ACTIONS = Allowed(
    f"a mapping of rules ({', '.join(HEALTH_RULES)}) to warn, stop or off",
    lambda actions: set(actions) <= set(HEALTH_RULES) and set(actions.values()) <= {"warn", "stop", "off"},
)
ZERO = Allowed("0", lambda value: value == 0)
ALL_LINEAR = "all-linear"
TARGETS = Allowed(
    f"[{ALL_LINEAR}], or a list of different names of linear layers such as [q_proj, v_proj]",
    lambda names: (
        names == [ALL_LINEAR]
        or (names and len(set(names)) == len(names) and all(re.fullmatch(r"\w+", name, re.ASCII) for name in names))
    ),
)
HUB_NAME = Allowed("ORG/NAME, NAME or empty", re.compile(r"([\w.-]+(/[\w.-]+)?)?", re.ASCII).fullmatch)


def key(default: Any, doc: str, allowed: Allowed | None = None) -> Any:
    """Return a dataclass field for a config key. A dict or list is copied into each instance."""
    metadata = {"doc": doc, "allowed": allowed}
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def keys_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield the dotted name and the field of every key of a config class."""
    for entry in fields(schema):
        if is_dataclass(entry.type):
            yield from keys_of(entry.type, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name.rstrip("_"), entry


def sections_of(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the class of every section of a config class. A section comes before those in it."""
    for entry in fields(schema):
        if is_dataclass(entry.type):
            yield prefix + entry.name, entry.type
            yield from sections_of(entry.type, f"{prefix}{entry.name}.")


@dataclass(frozen=True)
class RunConfig:
    dir: str = key("runs", "Directory that holds the run directories.", PATH)
    name: str = key("", "Name of the run directory. Empty: the config file's name and the launch time.", DIRECTORY_NAME)
    project: str = key(
        "oneworld",
        "Project under which wandb and swanlab list the run. It does not change the run directory.",
        PROJECT,
    )
    seed: int = key(0, "Seed of the prompt order and of every sample.")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA): only they are trained, and the model itself is frozen. See docs/lora.md."""

    rank: int = key(0, "Rank of the adapters; 0: none, so that all weights are trained.", NOT_NEGATIVE)
    alpha: int = key(32, "The product of an adapter's matrices is multiplied by alpha / rank.", POSITIVE)
    targets: list[str] = key(
        [ALL_LINEAR],
        "Linear layers that get an adapter, by the last part of their names, such as [q_proj, v_proj]. all-linear: "
        "every one but the head.",
        TARGETS,
    )
    dropout: float = key(0.0, "Must be 0: with dropout, learner and engine would compute different logprobs.", ZERO)

    @property
    def is_set(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    path: str = key("configs/tiny", "Hugging Face model directory or hub name.", MODEL)
    dtype: Literal["float32", "bfloat16"] = key("float32", "Dtype of forward passes and engines. Masters are float32.")
    lora: LoraConfig = field(default_factory=LoraConfig)


def _set_name(path: str) -> str:
    """Return the name of an evaluation set, which is part of its metrics' names."""
    try:
        dataset = read_hub_path(path)
    except ValueError:  # it is reported later
        dataset = None
    return Path(path).stem if dataset is None else dataset.repo.rpartition("/")[2]


@dataclass(frozen=True)
class DataConfig:
    train: Any = key(
        "configs/tiny/train.jsonl",
        "Training prompts: a path, a list, or a mapping path -> weight. hub:ORG/NAME/PATH is a dataset on the Hugging "
        "Face hub, and PATH its folder, split or file, such as hub:openai/gsm8k/main/train. See docs/data.md.",
    )
    eval: Any = key(
        "", "Held-out prompts: a path, a list, or a mapping name -> path, as in data.train. Empty: no evaluation."
    )
    prompt_key: str = key(
        "prompt",
        "Column with the prompt: a text, or a list of messages with role and content. a.b is b inside of a.",
        COLUMN,
    )
    answer_key: str = key(
        "answer", "Column with the reference answer, such as reward_model.ground_truth. Empty: there is none."
    )
    template: str = key(
        "", "Prompt text with {column} placeholders; {prompt} is the column prompt_key. Empty: only that column."
    )
    chat_template: bool = key(False, "Wrap each prompt as a user message in the tokenizer's chat template.")
    system_prompt: str = key("", "System message before each prompt. Requires data.chat_template.")
    max_prompt_tokens: int = key(1024, "Maximum length of a prompt in tokens. See data.long_rows.", POSITIVE)
    long_rows: Literal["skip", "fatal"] = key("skip", "Skip and count prompts above max_prompt_tokens, or end the run.")
    bad_rows: Literal["fatal", "skip"] = key("fatal", "End the run at a malformed row, or report and skip it.")

    @property
    def train_weights(self) -> dict[str, float | None]:
        """Return mixing weights by path. None: the rows of all files form one pool."""
        paths = [self.train] if isinstance(self.train, str) else self.train
        return dict(paths) if isinstance(paths, dict) else dict.fromkeys(paths)

    @property
    def eval_paths(self) -> dict[str, str]:
        """Return paths by the name of the evaluation set, which defaults to the file's stem or the dataset's name."""
        if isinstance(self.eval, dict):
            return {str(name): path for name, path in self.eval.items()}
        paths = [self.eval] if isinstance(self.eval, str) else self.eval
        return {_set_name(path): path for path in paths or [] if path}


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["vllm", "fake"] = key("vllm", "Inference engine. fake has no model and is for tests.")
    num_samples_per_prompt: int = key(8, "Number of rollouts per prompt (the group size).", POSITIVE)
    temperature: float = key(1.0, "Sampling temperature, which the learner's logprobs use too.", POSITIVE)
    top_p: float = key(1.0, "Probability mass of the tokens to sample from. Below 1, set algo.correction.", UP_TO_1)
    top_k: int = key(0, "Sample from this many most likely tokens; 0: all. Above 0, set algo.correction.", NOT_NEGATIVE)
    max_new_tokens: int = key(64, "Maximum length of a response.", POSITIVE)
    max_tokens_per_round: int = key(
        0,
        "Maximum number of tokens that a response gets in one round; 0: no limit. A longer response continues in the "
        "next round, under newer weights. So no batch waits for its longest response. See docs/rounds.md.",
        NOT_NEGATIVE,
    )
    ahead: int = key(
        0,
        "0: sampling and training take turns. 1: engines sample the next round while actors train on the last one. "
        "Tokens are then one update older. Only if all engines are on ranks whose single role is rollout. See "
        "docs/rounds.md.",
        ZERO_OR_ONE,
    )
    keep_kv: bool = key(
        False,
        "With max_tokens_per_round: continue responses with the KV cache of older weights. Saves prefill, but recorded "
        "logprobs then belong to no single version, tokens depend on timing, and an engine on an actor's GPU keeps its "
        "memory during updates.",
    )
    tensor_parallel_size: int = key(1, "Number of consecutive ranks of one node that share an engine.", POSITIVE)
    max_num_seqs: int = key(
        0,
        "Maximum number of sequences that one engine decodes at once; 0: derived, as many as an engine gets in a step, "
        "at most 1,024. On a CPU 256.",
        NOT_NEGATIVE,
    )
    kv_cache_mb: int = key(0, "KV cache per rank in MiB; 0: 256 on a CPU, gpu_memory_fraction on a GPU.", NOT_NEGATIVE)
    gpu_memory_fraction: float = key(
        0.0,
        "Share of a GPU's memory that an engine may use; 0: derived. On a GPU of its own 0.9, less with many "
        "sequences, which need memory to sample. Beside a learner, what "
        "the engine needs for all its sequences, and at most what the learner leaves free.",
        FROM_0_BELOW_1,
    )
    sleep: Sleep = key(
        "auto",
        "Whether engine and learner of the same GPU take turns with its memory. always: an engine frees its memory "
        "during updates, and a learner its temporary memory during rollouts; never: both keep it, so steps of small "
        "models are faster; auto: derived, never with keep_kv, or if both together need at most 40 % of the GPU. On a "
        "CPU never.",
    )
    deterministic: bool = key(False, "Seed each sample, so that tokens do not depend on engine or timing. Slower.")
    enforce_eager: bool = key(False, "Do not capture CUDA graphs. The engine starts faster and decodes slower.")
    max_mismatch_kl: float = key(
        0.0, "End the run if the KL between engine and learner is above this; 0: never.", NOT_NEGATIVE
    )
    engine_options: dict[str, Any] = key({}, "Further arguments of vllm.LLM, such as {block_size: 64}.")

    @property
    def max_rounds(self) -> int:
        """Return the number of rounds that the longest response takes."""
        return -(-self.max_new_tokens // self.max_tokens_per_round) if self.max_tokens_per_round else 1

    @property
    def max_num_groups(self) -> int:
        """Return the number of groups that one engine samples at once."""
        assert self.max_num_seqs, "rollout.max_num_seqs has not been derived"
        return max(1, self.max_num_seqs // self.num_samples_per_prompt)

    @property
    def uses_older_weights(self) -> bool:
        """Return whether an update may train on tokens that weights before the last update have sampled."""
        return self.max_rounds > 1 or self.ahead > 0


@dataclass(frozen=True)
class RewardConfig:
    function: Any = key(
        "exact_match", "Built-in name, file.py:function, or a mapping of these to weights (0: log only)."
    )
    options: dict[str, Any] = key({}, "Keyword arguments by function name, such as {regex: {pattern: ...}}.")
    timeout_s: float = key(
        10.0, "Time limit per response in seconds. After it the score is 0, and reward/timeouts counts it.", POSITIVE
    )
    stop_if_all_fail: bool = key(
        True,
        "End the run if no sample of its first step, or of an evaluation before it, can be scored. "
        "Only a resumed run may be restarted then.",
    )
    num_workers: int = key(0, "Scoring processes per engine; 0: its share of the cores, at most 8.", NOT_NEGATIVE)
    credentials: list[str] = key(
        [], "Names of credentials in the environment that functions may read, such as [OPENAI_API_KEY]."
    )


@dataclass(frozen=True)
class EnvironmentConfig:
    """Conversations of several turns: docs/environments.md. At most one of tools, class and rollout is set, except that
    a class may be given tools besides its own methods."""

    tools: list[str] = key(
        [], "Functions that the model may call: a list of file.py:function. Types and docstrings describe them."
    )
    class_: str = key("", "file.py:Class of an environment, with one instance per sample. Empty: none.")
    rollout: str = key("", "file.py:function of an asynchronous function that makes a whole rollout. Empty: none.")
    options: dict[str, Any] = key({}, "Keyword arguments of the class or of the rollout function.")
    max_turns: int = key(8, "Maximum number of the model's turns in a conversation.", POSITIVE)
    max_tokens_per_turn: int = key(
        0, "Maximum number of tokens that the model writes in a turn; 0: none.", NOT_NEGATIVE
    )
    max_observation_tokens: int = key(
        512, "Maximum length of one observation. The middle of a longer one is left out.", POSITIVE
    )
    max_conversation_tokens: int = key(
        0,
        "Maximum number of tokens after the first prompt: those of the model, of which there are at most "
        "rollout.max_new_tokens, and those of observations. 0: twice rollout.max_new_tokens.",
        NOT_NEGATIVE,
    )
    max_seconds: float = key(1800.0, "Time limit of a conversation in seconds, over all of its turns.", POSITIVE)
    timeout_s: float = key(10.0, "Time limit in seconds of each call of a tool or an environment.", POSITIVE)
    num_workers: int = key(
        0,
        "Processes per engine for tools and environments that are not asynchronous; 0: as many as needed, up to 64.",
        NOT_NEGATIVE,
    )
    on_rewrite: Literal["refuse", "split"] = key(
        "refuse",
        "If the model's chat template changes earlier turns when a conversation goes on: refuse to start, or train on "
        "each stretch between such changes as a sequence of its own.",
    )

    @property
    def is_set(self) -> bool:
        return bool(self.tools or self.class_ or self.rollout)


setattr(EnvironmentConfig, "class", property(attrgetter("class_")))  # the key has the name of a Python keyword


@dataclass(frozen=True)
class AlgoConfig:
    """docs/algorithms.md has the formulas and the papers."""

    advantage: str = key(
        "grpo",
        "Advantage estimator. gae trains a critic (PPO). file.py:function is one of your own.",
        ADVANTAGE_OR_FILE,
    )
    gamma: float = key(1.0, "Discount per token, for reinforce_pp and gae.", UP_TO_1)
    lam: float = key(1.0, "Lambda of gae.", UP_TO_1)
    loss: str = key(
        "clip",
        "Policy loss: clip (PPO), gspo (ratios of whole sequences), cispo (clipped weights), or file.py:function, one "
        "of your own.",
        LOSS_OR_FILE,
    )
    options: dict[str, Any] = key(
        {}, "Keyword arguments of your own loss and advantage by function name, such as {my_loss: {delta: 0.1}}."
    )
    loss_norm: Literal["token", "sequence", "constant"] = key(
        "token",
        "Average over all tokens, average over sequences with equal weight, or divide by max_new_tokens (Dr.GRPO).",
    )
    clip_low: float = key(0.2, "Lower bound of the ratio: 1 - clip_low.", BETWEEN_0_AND_1)
    clip_high: float = key(0.2, "Upper bound of the ratio: 1 + clip_high.", POSITIVE_OR_INF)
    dual_clip: float = key(
        0.0, "Upper bound of the ratio of tokens with a negative advantage, such as 3; 0: none.", ZERO_OR_ABOVE_1
    )
    entropy_coef: float = key(0.0, "Weight of the entropy bonus in the loss.", NOT_NEGATIVE)
    kl_coef: float = key(0.0, "Weight of the KL to the reference policy; 0: no reference is loaded.", NOT_NEGATIVE)
    kl_estimator: Literal["k1", "k2", "k3", "full"] = key(
        "k3", "KL estimator. The gradient of k1 averages to 0; full sums over the vocabulary."
    )
    kl_place: Literal["loss", "reward"] = key(
        "loss",
        "Add the KL to the loss, or subtract it from the reward: per response for grpo, dr_grpo and rloo, per token "
        "for the others. A function of your own gets the reward that it asks for, less the KL.",
    )
    kl_target: float = key(0.0, "KL per token that an adaptive kl_coef aims at; 0: kl_coef is fixed.", NOT_NEGATIVE)
    correction: Correction = key(
        "none",
        "Importance weights for the difference between engine and learner. token and sequence truncate weights at "
        "correction_limit; sequence_mask drops sequences above it; token_mask and sequence_mask_two_sided also drop "
        "those below its inverse.",
    )
    correction_limit: float = key(
        2.0, "Maximum importance weight. Two-sided masks also drop weights below its inverse.", ABOVE_1
    )
    overlong_tokens: int = key(
        0, "DAPO: number of last tokens up to max_new_tokens over which a penalty grows to 1; 0: none.", NOT_NEGATIVE
    )
    mask_truncated: bool = key(False, "Leave truncated responses out of means, advantages, losses and the critic.")
    dynamic_sampling: bool = key(False, "DAPO: sample until the batch is full of groups with unequal rewards.")
    max_sampling_rounds: int = key(10, "Maximum number of sampling rounds per batch.", POSITIVE)
    certainty_coef: float = key(
        0.0, "Intuitor: weight of a response's mean self-certainty in its reward; 0: none.", FINITE
    )
    num_mini_batches: int = key(1, "Number of optimizer steps per pass over a batch.", POSITIVE)
    num_epochs: int = key(1, "Number of passes over a batch.", POSITIVE)
    old_logprobs: Literal["auto", "always", "rollout"] = key(
        "auto",
        "Where the old logprobs in the ratio of the loss come from. auto: a separate pass, only if needed; always: a "
        "separate pass; rollout: the engine, which recorded them when it sampled. If older weights sample some tokens "
        "(max_tokens_per_round, ahead), auto means rollout, or always if algo.correction is set.",
    )

    @property
    def compares_rollouts(self) -> bool:
        """Return whether a built-in advantage needs several rollouts of a prompt. Your own may do without."""
        return self.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")

    @property
    def has_old_pass(self) -> bool:
        """Return whether old logprobs need a separate pass. A single update uses its own unless rewards need them."""
        has_several_updates = self.num_mini_batches * self.num_epochs > 1
        is_for_loss = self.old_logprobs == "always" or (self.old_logprobs == "auto" and has_several_updates)
        return is_for_loss or self.certainty_coef != 0 or self.has_kl_in_reward

    @property
    def has_recorded_ratio(self) -> bool:
        """Return whether the ratio of the loss is that to the logprobs that the engine recorded."""
        return self.old_logprobs == "rollout"

    @property
    def has_kl_in_reward(self) -> bool:
        return bool(self.kl_coef) and self.kl_place == "reward"

    @property
    def has_kl_in_loss(self) -> bool:
        return bool(self.kl_coef) and self.kl_place == "loss"

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def fields_to_score(self) -> list[str]:
        """Return the batch fields that need a separate forward pass."""
        has_reference = self.kl_coef and self.kl_estimator != "full"
        wanted = {"old_logprobs": self.has_old_pass, "certainty": self.certainty_coef, "ref_logprobs": has_reference}
        return [name for name, is_wanted in wanted.items() if is_wanted]


@dataclass(frozen=True)
class CriticConfig:
    """The critic of algo.advantage=gae. The actor ranks hold it and its optimizer."""

    path: str = key("", "Model whose layers initialize the critic. Empty: model.path.")
    lr: float = key(1e-5, "Learning rate.", NOT_NEGATIVE)
    clip: float = key(0.2, "Maximum change of a value in an update.", POSITIVE)
    warmup_steps: int = key(0, "Number of initial steps in which only the critic learns.", NOT_NEGATIVE)
    max_tokens_per_micro_batch: int = key(
        0, "Maximum tokens per pass of an update; 0: actor.max_tokens_per_micro_batch.", NOT_NEGATIVE
    )
    recompute: Literal["actor", "none", "selective", "full"] = key(
        "actor", "As actor.recompute, for a critic, which has no logits. actor: the same value."
    )
    offload: Literal["actor", "none", "rollout", "moments", "always"] = key(
        "actor", "Keep the critic's training state in host memory, as actor.offload. actor: the same value."
    )
    lora: bool = key(True, "With model.lora: train adapters and the head of the critic. false: train all of it.")


@dataclass(frozen=True)
class ReferenceConfig:
    """The reference policy of algo.kl_coef. It has no backward pass, so there is nothing to recompute."""

    max_tokens_per_micro_batch: int = key(
        0, "Maximum tokens per pass; 0: inference.max_tokens_per_micro_batch.", NOT_NEGATIVE
    )
    offload: Literal["actor", "none", "rollout", "always"] = key(
        "actor",
        "Keep the reference in host memory: rollout: while the rank's engine works; always: at all times, also on "
        "inference ranks. actor: as actor.offload says on the actors, where moments means none.",
    )


@dataclass(frozen=True)
class ActorConfig:
    lr: float = key(1e-6, "Peak learning rate.", NOT_NEGATIVE)
    lr_schedule: Schedule = key("constant", "Schedule of the learning rate after the warm-up, over train.num_steps.")
    warmup_steps: int = key(0, "Number of optimizer steps of linear warm-up.", NOT_NEGATIVE)
    optimizer: Optimizer = key(
        "adamw",
        "Optimizer of policy and critic: adamw; adamw_8bit (8-bit moments, needs torchao); sgd; muon (for the matrices "
        "of the layers, and adamw for the rest). See docs/algorithms.md.",
    )
    weight_decay: float = key(0.0, "Weight decay.", NOT_NEGATIVE)
    beta1: float = key(0.9, "AdamW beta1, and the momentum of sgd and muon.", FROM_0_BELOW_1)
    beta2: float = key(0.999, "AdamW beta2.", FROM_0_BELOW_1)
    eps: float = key(1e-8, "AdamW epsilon.", POSITIVE)
    max_grad_norm: float = key(1.0, "Maximum global gradient norm; larger gradients are scaled down.", POSITIVE)
    max_tokens_per_micro_batch: int = key(
        0,
        "Maximum tokens per pass. A longer sequence runs alone. A prompt that samples share counts once, and a quarter "
        "for each further sample. 0: derived, 20,480, more for tiny models and long sequences, less if memory is "
        "short. On a CPU 8,192.",
        NOT_NEGATIVE,
    )
    compile: bool = key(True, "Compile the layers on GPUs. The first steps take some tens of seconds longer.")
    recompute: Recompute = key(
        "auto",
        "What the backward pass computes again to save memory. none: nothing; head: the logits; selective: also every "
        "second layer; full: also all layers. auto: derived, the first of head, selective and full with which 8,192 "
        "tokens and the longest sequence fit, or none if the logits fit too and no engine must sleep for them. "
        "On a CPU head.",
    )
    offload: Offload = key(
        "auto",
        "Keep training state in host memory. none: nothing; rollout: weights and optimizer state, while the rank's "
        "engine works; moments: only the optimizer state (two thirds of it, with adamw) in that time; always: "
        "everything at all times, with optimizer steps on the CPU; auto: derived, the first of none, moments, rollout "
        "and always with which engine and update fit. On a CPU none.",
    )
    overlap: bool = key(
        False,
        "Train on the first groups of a batch while the engines still sample the others. The result is the same, but "
        "for rounding. Only if no actor hosts an engine, and without max_tokens_per_round, ahead and dynamic_sampling. "
        "See docs/rounds.md.",
    )
    num_replicas: int = key(1, "Copies of the policy (HSDP), each sharded over its share of the actors.", POSITIVE)


@dataclass(frozen=True)
class InferenceConfig:
    max_tokens_per_micro_batch: int = key(16384, "Maximum tokens per logprob pass.", POSITIVE)


@dataclass(frozen=True)
class SyncConfig:
    bucket_mb: int = key(0, "Size of a bucket of weights in MiB; 0: 128, or 32 on a CPU.", NOT_NEGATIVE)
    join_timeout_s: float = key(600.0, "Time in seconds for all ranks to join a sync. After it the run ends.", POSITIVE)
    verify: Verify = key(
        "full", "Compare digests. full: of the weights in the engines; transport: of the bytes received; off: none."
    )
    probe_interval: int = key(
        50,
        "Compare logprobs of engine and learner (a probe) at the first two versions and every Nth; 0: never.",
        NOT_NEGATIVE,
    )
    probe_limit: float = key(
        0.0, "Mean logprob difference in a probe that ends the run; 0: a limit for model.dtype.", NOT_NEGATIVE
    )


@dataclass(frozen=True)
class CheckpointConfig:
    save_interval: int = key(
        20,
        "Save every N steps, and at the last step. 0: only at the last step. -1: never, except on SIGUSR1; SIGTERM "
        "then stops the run without a save.",
        AT_LEAST_MINUS_1,
    )
    keep_last: int = key(2, "Number of newest checkpoints to keep.", POSITIVE)
    keep_every: int = key(0, "Keep the checkpoint of every Nth step forever; 0: none.", NOT_NEGATIVE)
    best_metric: str = key("", "Metric whose best step is also saved and kept, such as eval/accuracy. Empty: none.")
    best_is_lowest: bool = key(False, "The lowest value of best_metric is the best, not the highest.")
    copies: int = key(
        1, "2: each file also goes to the next node's disk, so that a lost node loses nothing.", ONE_OR_TWO
    )
    resume: str = key(
        "auto",
        "auto: resume from the run's newest checkpoint; never: set its checkpoints aside; PATH: fork another run.",
        RESUME,
    )
    hub_name: str = key(
        "",
        "Repository on the Hugging Face hub to which tools/merge_checkpoint.py --upload sends the model. Empty: the "
        "run's name, in the namespace of your login.",
        HUB_NAME,
    )


@dataclass(frozen=True)
class TrainConfig:
    num_steps: int = key(100, "Number of iterations of the loop.", POSITIVE)
    num_epochs: int = key(0, "Number of passes over the prompts, instead of num_steps; 0: use num_steps.", NOT_NEGATIVE)
    num_prompts_per_step: int = key(32, "Number of prompts per iteration.", POSITIVE)

    def count_steps(self, num_prompts: int) -> int:
        """Return num_steps, or the steps that num_epochs passes over this many prompts take."""
        return -(-num_prompts * self.num_epochs // self.num_prompts_per_step) if self.num_epochs else self.num_steps


@dataclass(frozen=True)
class EvalConfig:
    interval: int = key(0, "Evaluate every N steps, and before and after training; 0: never.", NOT_NEGATIVE)
    before_training: bool = key(True, "With eval.interval: also evaluate before the first step.")
    num_prompts: int = key(0, "Number of prompts of each held-out set per evaluation; 0: all.", NOT_NEGATIVE)
    num_samples: int = key(1, "Responses per prompt, for avg@k, pass@k and maj@k. Above 1, set temperature.", POSITIVE)
    temperature: float = key(0.0, "Sampling temperature; 0: greedy.", NOT_NEGATIVE)
    top_p: float = key(1.0, "Probability mass of the tokens to sample from.", UP_TO_1)
    max_new_tokens: int = key(0, "Maximum length of a response; 0: rollout.max_new_tokens.", NOT_NEGATIVE)
    function: str = key("", "The function of reward.function that scores evaluations. Empty: the first.")


@dataclass(frozen=True)
class MetricsConfig:
    writers: list[str] = key(
        [],
        "Further writers beside TensorBoard and metrics.jsonl, such as [wandb, swanlab]. They must be installed on the "
        "leader's node. Their own variables, such as WANDB_MODE, apply. See docs/performance.md.",
        WRITER_NAMES,
    )
    samples_interval: int = key(10, "Write sample responses to TensorBoard every N steps; 0: never.", NOT_NEGATIVE)
    num_samples: int = key(4, "Number of sample responses to write.", NOT_NEGATIVE)
    prometheus_port: int = key(
        0,
        "Port on which the leader serves the metrics of the last step to Prometheus; 0: off. See docs/health.md.",
        PORT,
    )
    prometheus_address: str = key(
        "127.0.0.1",
        "Address on which it listens. Everybody who reaches another address can read the metrics. See "
        "docs/security.md.",
        ADDRESS,
    )


@dataclass(frozen=True)
class HealthConfig:
    """Rules over the metrics of recent steps, which warn or end the run: docs/health.md."""

    actions: dict[str, str] = key(
        {},
        "What rules do, by name: warn, stop or off, such as {truncation: stop, waiting: off}. By default "
        "skipped_steps stops the run, and the others warn.",
        HEALTH_ACTIONS,
    )
    num_steps: int = key(10, "Number of recent steps that a rule looks at. It is silent before.", POSITIVE)
    min_entropy: float = key(
        0.02, "entropy: smallest entropy per token while the mean reward is below 0.9 and does not rise.", NOT_NEGATIVE
    )
    max_mismatch_kl: float = key(
        0.02,
        "mismatch: largest mean KL between engine and learner. rollout.max_mismatch_kl ends the run before a batch is "
        "trained on.",
        POSITIVE,
    )
    max_truncated: float = key(0.5, "truncation: largest share of truncated responses.", UP_TO_1)
    max_grad_norm_ratio: float = key(
        10.0,
        "gradient_spikes: largest gradient norm, compared with the median of earlier steps. Norms up to "
        "actor.max_grad_norm do not count.",
        ABOVE_1,
    )
    max_skipped_steps: int = key(
        5, "skipped_steps: number of steps in a row with infinite or NaN gradients after which the run stops.", POSITIVE
    )
    max_timeouts: float = key(0.05, "timeouts: largest share of samples whose scoring timed out or crashed.", UP_TO_1)
    max_waiting: float = key(0.5, "waiting: largest share of a step in which the ranks of a role wait.", UP_TO_1)
    max_memory_growth: float = key(
        0.2, "host_memory: largest growth of a node's memory, as a share of it, over 10 times num_steps.", POSITIVE
    )
    max_lag: float = key(
        0.8, "lag: largest mean lag, as a share of the bound of the lag if that is 2 or more.", UP_TO_1
    )


@dataclass(frozen=True)
class WorldConfig:
    transfer_timeout_s: float = key(300.0, "Time limit of a collective in seconds.", POSITIVE)
    max_fruitless_attempts: int = key(10, "Maximum number of consecutive restarts without progress.")
    silence_floor_s: float = key(
        60.0,
        "Minimum silence in seconds before a rank counts as hung. The limit is 5 times the longest silence so far in "
        "the same stage.",
    )
    silence_cap_s: float = key(
        1800.0,
        "Upper bound of that limit in seconds. It is also the limit in a new stage, a compilation, an engine build, "
        "and a checkpoint whose disk accepts no data.",
    )


@dataclass(frozen=True)
class DebugConfig:
    share_gpu: bool = key(False, "Put all ranks of a node on GPU 0, to try a placement on one card.")
    mean_response_tokens: int = key(
        0,
        "For benchmarks: ignore stop tokens, and draw the length of each response from a lognormal distribution with "
        "sigma 1 and this mean. Lengths are cut at max_new_tokens, and depend only on run.seed, epoch, prompt and "
        "sample. If the mean is max_new_tokens or more, every response has max_new_tokens tokens. 0: off.",
        NOT_NEGATIVE,
    )
    profile_step: int = key(0, "First step to profile, on all actors, into the run's profile/; 0: none.", NOT_NEGATIVE)
    profile_num_steps: int = key(1, "Number of steps to profile.", POSITIVE)
    num_collectives: int = key(2000, "Number of collectives that NCCL's flight recorder keeps; 0: off.", NOT_NEGATIVE)
    dry_run: bool = key(False, "Set by --dry-run: save nothing, and accept a model directory without weights.")
    breakpoints: bool = key(False, "Let ranks wait a day, not transfer_timeout_s, for a rank at a breakpoint().")
    debugpy_port: int = key(
        0,
        "Let breakpoint() and post_mortem wait for a debugpy client such as VS Code, not for tools/debug.py. Rank R "
        "listens on port debugpy_port + R of its node's loopback interface. 0: off. See docs/debugging.md.",
        PORT,
    )
    post_mortem: bool = key(False, "Open a debugger where an exception was raised. The other ranks wait for a day.")
    save_rollouts: bool = key(False, "Write each step's groups to the run directory. See docs/replay.md.")


@dataclass(frozen=True)
class Config:
    placement: dict[str, Any] = key(
        {"actor,rollout": "all"}, "Roles of the ranks, and shares of rollout work. See docs/placement.md."
    )
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def model_paths(self) -> dict[str, str]:
        """Return the models of the run by the settings that name them."""
        has_own_critic = self.algo.has_critic and self.critic.path
        return {"model.path": self.model.path} | ({"critic.path": self.critic.path} if has_own_critic else {})

    @property
    def critic_lora(self) -> LoraConfig:
        """Return the adapters of the critic. Their rank is 0 if all of it is trained."""
        return self.model.lora if self.critic.lora else LoraConfig()

    @property
    def critic_offload(self) -> Offload:
        return self.actor.offload if self.critic.offload == "actor" else self.critic.offload

    @property
    def critic_recompute(self) -> Recompute:
        return self.actor.recompute if self.critic.recompute == "actor" else self.critic.recompute

    @property
    def critic_max_tokens(self) -> int:
        """Return the maximum tokens of a micro-batch in which the critic is trained."""
        return self.critic.max_tokens_per_micro_batch or self.actor.max_tokens_per_micro_batch

    @property
    def reference_offload(self) -> Offload:
        """Return what the reference offloads on the actors. It has no moments."""
        if self.reference.offload != "actor":
            return self.reference.offload
        return "none" if self.actor.offload == "moments" else self.actor.offload

    @property
    def reference_max_tokens(self) -> int:
        """Return the maximum tokens of a pass of the reference."""
        return self.reference.max_tokens_per_micro_batch or self.inference.max_tokens_per_micro_batch

    @property
    def max_training_tokens(self) -> int:
        """Return the maximum number of tokens after the first prompt in training."""
        return self.max_tokens_after_prompt if self.environment.is_set else self.rollout.max_new_tokens

    @property
    def max_step_tokens(self) -> int:
        """Return the maximum number of tokens of the rollouts of a step, with their prompts and observations."""
        num_rollouts = self.train.num_prompts_per_step * self.rollout.num_samples_per_prompt
        return num_rollouts * (self.data.max_prompt_tokens + self.max_training_tokens)

    @property
    def max_sequence_tokens(self) -> int:
        """Return the maximum length of prompt and response, in training or evaluation."""
        return self.data.max_prompt_tokens + self.max_tokens_after_prompt

    @property
    def max_tokens_after_prompt(self) -> int:
        """Return the maximum number of tokens after the first prompt: the model's, and those of observations."""
        most = max(self.rollout.max_new_tokens, self.eval.max_new_tokens)
        return (self.environment.max_conversation_tokens or 2 * most) if self.environment.is_set else most


def resolve_path(path: str) -> Path:
    """Look up a relative path in the working directory, then in the repository. Return a hub name unchanged."""
    return Path(path) if Path(path).exists() or not (ROOT / path).exists() else ROOT / path


def with_debugger_timeouts(config: Config) -> Config:
    """Return the config with timeouts of a day if a debugger may stop a rank."""
    if not (config.debug.breakpoints or config.debug.post_mortem):
        return config
    world = replace(config.world, transfer_timeout_s=DAY_S)
    return replace(config, world=world, sync=replace(config.sync, join_timeout_s=DAY_S))
