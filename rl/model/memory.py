"""Estimate the least memory of each role from the number of parameters. Nothing is loaded.

State, reference and host copies are split over the shards of a replica, copies of the inference ranks over those ranks,
the weights of an engine over its ranks. With --eval-only, there are no moments, also after a checkpoint
is read. Activations come on top. They depend on kernels and lengths; `train.py --dry-run` measures them.

With LoRA adapters, the weights under them are stored in model.dtype. Gradients, moments and checkpoints are those of
the adapters alone, and the reference is the policy without adapters. A critic's head is too small to count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rl.common.text import format_bytes, format_ranks
from rl.config.schema import Config, LoraConfig
from rl.model.shape import ModelSize
from rl.placement.roles import IDLE, Placement

WEIGHTS = COPY = 4  # bytes per parameter, float32, as are gradients; a copy is a reference, or a policy for logprobs
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "sgd": 4.0}  # bytes per parameter; 8 bits and a scale per 256
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LIBRARIES = 1 << 30  # host memory of a rank without any model
CPU_KV_CACHE = 256 << 20
MIN_BLOCK = 64  # elements; 8-bit AdamW keeps float32 moments for rows that are no multiple of it


def num_adapter_parameters(lora: LoraConfig, size: ModelSize) -> int:
    return lora.rank * (size.adapted.num_inputs + size.adapted.num_outputs)


def moment_bytes(config: Config, size: ModelSize, lora: LoraConfig) -> int:
    """Return the bytes of an optimizer's state of a whole model, or of its adapters."""
    optimizer, beta1 = config.actor.optimizer, config.actor.beta1
    num_parameters, num_in_matrices = size.num_parameters, size.num_in_matrices
    if lora.is_set:
        num_parameters = num_in_matrices = num_adapter_parameters(lora, size)
        if optimizer == "adamw_8bit" and lora.rank & -lora.rank < MIN_BLOCK:
            # A row of B has as many elements as the rank, so only A is quantized.
            num_quantized = lora.rank * size.adapted.num_inputs
            return int(MOMENTS["adamw_8bit"] * num_quantized + MOMENTS["adamw"] * (num_parameters - num_quantized))
    if optimizer == "muon":  # one moment for a matrix of a layer, and AdamW's two for the rest
        return 4 * num_in_matrices + 8 * (num_parameters - num_in_matrices)
    return int(MOMENTS[optimizer] * num_parameters) if optimizer != "sgd" or beta1 else 0


def describe_adapters(rank: int, num_layers: int, num_trained: int, num_frozen: int) -> str:
    """Return how much of a policy is trained, in a sentence for the plan and the start of a run."""
    trained, total = num_trained / 1e6, (num_trained + num_frozen) / 1e6
    where = f"adapters of rank {rank} on {num_layers} linear layers"
    return f"{where}: {trained:,.2f} M of {total:,.2f} M parameters are trained"


def estimate_adapters(lora: LoraConfig, size: ModelSize) -> str:
    """Return the same before a model is loaded."""
    num_trained = num_adapter_parameters(lora, size)
    return describe_adapters(lora.rank, size.adapted.num_layers, num_trained, size.num_parameters)


@dataclass(frozen=True)
class ModelState:
    """Bytes of the training state of a policy or critic on one rank, and where they are."""

    weights: int
    moments: int
    gradients: int
    offload: str
    saved: int  # the copy of a checkpoint that is being written

    @property
    def total(self) -> int:
        return self.weights + self.moments + self.gradients

    def without_training(self) -> "ModelState":
        """Return the state of a run that only evaluates."""
        return replace(self, moments=0, gradients=0, saved=0)

    @property
    def on_device(self) -> int:
        return 0 if self.offload == "always" else self.total  # then one layer at a time is on the device

    @property
    def moved(self) -> int:
        """What is in host memory while the rank's engine works. Gradients exist only during an update."""
        return {"rollout": self.weights + self.moments, "moments": self.moments}.get(self.offload, 0)

    @property
    def freed(self) -> int:
        """What is not on the device while the rank's engine works."""
        return self.total if self.offload == "rollout" else self.moved


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that each of `ranks` needs. They all have the same roles."""

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    models: dict[str, int]  # on the device, by name: training states, reference, copies for logprobs
    engine: int  # on the device: the engine's weights
    offloaded: int  # part of `learner` that is not on the device while the engine works, gradients included
    host: int  # in addition: libraries, copies of checkpoints, offloaded state
    host_on_cpu: int  # host memory if the CPU is the device
    states: dict[str, ModelState] = field(default_factory=dict)  # the trained among `models`

    @property
    def learner(self) -> int:
        return sum(self.models.values())

    @property
    def is_offloaded(self) -> bool:
        """Whether one of the models is not on the device at all times. With `always`, nothing of it is."""
        return self.offloaded > 0 or not all(self.models.values())

    @property
    def who(self) -> str:
        return f"{','.join(self.roles)} ({format_ranks(self.ranks)})"

    @property
    def parts(self) -> str:
        parts = self.models | {"engine's weights": self.engine}
        return ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)

    @property
    def during_rollout(self) -> int:
        """What stays on the device while the rank's engine works. Gradients exist only during an update."""
        gradients = sum(each.gradients for each in self.states.values() if each.offload not in ("rollout", "always"))
        return self.learner - self.offloaded - gradients

    def on_device(self, engine_share: int) -> int:
        """Return the peak use of the device, if the engine fills `engine_share` bytes."""
        return max(self.learner, self.during_rollout + engine_share if self.engine else 0)


def estimate(
    config: Config, placement: Placement, policy: ModelSize, critic: ModelSize | None = None, trains: bool = True
) -> list[RoleMemory]:
    """Estimate the memory of each combination of roles, from the sizes of policy and critic."""
    has_reference, scorers = bool(config.algo.kl_coef), placement.scorers
    found = []
    for roles in dict.fromkeys(roles for roles in placement.roles if roles != IDLE):
        is_actor, has_engine = "actor" in roles, "rollout" in roles
        models: dict[str, int] = {}
        states: dict[str, ModelState] = {}
        engine = freed = moved = engine_on_cpu = 0
        host = LIBRARIES
        if is_actor:
            num_shards = len(placement.replicas[0])
            states = {"policy": _state(config, policy, num_shards, config.model.lora, config.actor.offload)}
            if critic is not None:
                states["critic"] = _state(config, critic, num_shards, config.critic_lora, config.critic_offload)
            states = states if trains else {name: each.without_training() for name, each in states.items()}
            for name, state in states.items():
                models[name], freed, moved = state.on_device, freed + state.freed, moved + state.moved
                host += state.total - state.on_device
                if config.checkpoint.save_interval >= 0:
                    host += state.saved
            has_own_reference = has_reference and not config.model.lora.is_set  # else it is the policy without adapters
            if has_own_reference and (not scorers or config.algo.kl_estimator == "full"):
                reference, offload = COPY * policy.num_parameters // num_shards, config.reference_offload
                models["reference"], host = (0, host + reference) if offload == "always" else (reference, host)
                if offload == "rollout":
                    freed, moved = freed + reference, moved + reference
        if "inference" in roles and scorers:
            copy = COPY * policy.num_parameters // len(scorers)
            models["copy of the policy"] = copy
            if has_reference and config.algo.kl_estimator != "full":
                on_host = config.reference.offload == "always"
                models["reference"], host = (0, host + copy) if on_host else (copy, host)
        if has_engine:
            engine = DTYPE_BYTES[config.model.dtype] * policy.num_parameters // config.rollout.tensor_parallel_size
            if config.rollout.engine == "vllm":
                engine_on_cpu = engine + (config.rollout.kv_cache_mb << 20 or CPU_KV_CACHE)
        if not has_engine:
            freed = moved = 0
        ranks = tuple(rank for rank, others in enumerate(placement.roles) if others == roles)
        host_on_cpu = host + sum(models.values()) + engine_on_cpu
        found.append(RoleMemory(roles, ranks, models, engine, freed, host + moved, host_on_cpu, states))
    return found


def _state(config: Config, size: ModelSize, num_shards: int, lora: LoraConfig, offload: str) -> ModelState:
    """Return the training state of a rank, from the size of the whole model."""
    trained, frozen = WEIGHTS * size.num_parameters, 0
    if lora.is_set:
        trained = WEIGHTS * num_adapter_parameters(lora, size)
        frozen = DTYPE_BYTES[config.model.dtype] * size.num_parameters
    moments = moment_bytes(config, size, lora)
    weights, gradients, moments, saved = (
        -(-each // num_shards) for each in (trained + frozen, trained, moments, trained + moments)
    )
    return ModelState(weights, moments, gradients, offload, saved)


def host_bytes(roles: Sequence[RoleMemory], placement: Placement, has_gpus: bool) -> list[int]:
    """Return the host memory that the ranks of each node need."""
    found = [0] * placement.num_nodes
    for role in roles:
        for rank in role.ranks:
            found[placement.nodes.node_of(rank)] += role.host if has_gpus else role.host_on_cpu
    return found


def checkpoint_bytes(
    config: Config, placement: Placement, policy: ModelSize, critic: ModelSize | None = None
) -> list[int]:
    """Return how much of one copy of a checkpoint each node writes. Each actor writes its shard."""
    dtype, size = DTYPE_BYTES[config.model.dtype], 0
    for model, lora in ((policy, config.model.lora), (critic, config.critic_lora)):
        if model is not None and lora.is_set:  # adapters have no copy in model.dtype
            size += WEIGHTS * num_adapter_parameters(lora, model) + moment_bytes(config, model, lora)
        elif model is not None:
            # The weights, float32 masters if model.dtype is narrower, and moments.
            size += model.num_parameters * (dtype + (WEIGHTS if dtype < 4 else 0)) + moment_bytes(config, model, lora)
    nodes = [placement.nodes.node_of(actor) for actor in placement.actors]
    return [size * nodes.count(node) // len(nodes) for node in range(placement.num_nodes)]


def num_kept(config: Config) -> int:
    """Return how many checkpoints lie on disk at once. A new one is written before an old one is removed."""
    keep, num_steps = config.checkpoint, config.train.num_steps
    if keep.save_interval < 0:
        return 0
    permanent = num_steps // keep.keep_every if keep.keep_every else 0
    return keep.keep_last + 1 + bool(keep.best_metric) + permanent
