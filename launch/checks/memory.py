"""Estimate the least memory that each role needs, from the number of parameters. Nothing is loaded.

    training state   16 bytes per parameter (float32 weights, gradients and two moments), split over the shards of a
                     replica; for the policy, and for the critic if there is one
    reference        4 bytes per parameter over the same ranks, or over the inference ranks
    inference        4 bytes per parameter over the inference ranks
    engine           weights in model.dtype over its ranks, and its KV cache
    checkpoint       weights in model.dtype, two moments, and float32 masters if model.dtype is narrower
    its host copy    12 bytes per parameter of the rank's shard

With --eval-only the state is the weights alone, 4 bytes per parameter, and there is no host copy. If a checkpoint is
read, its two moments come on top. They are not counted, because it is not known yet whether there is a checkpoint.

Activations come on top. They depend on kernels and lengths; `train.py --dry-run` measures them.
"""

from dataclasses import dataclass

from rl.config.schema import Config
from rl.placement.roles import Placement

STATE, MOMENTS, COPY, HOST_COPY = 16, 8, 4, 12  # bytes per parameter
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LIBRARIES = 1 << 30  # host memory of a rank without any model
CPU_KV_CACHE = 256 << 20


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that each of `ranks` needs. They all have the same roles."""

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    learner: int  # on the device: training state, reference, copies for logprobs
    engine: int  # on the device: the engine's weights
    offloaded: int  # part of `learner` that is not on the device while the engine works
    host: int  # in addition: libraries, copies of checkpoints, offloaded state

    def on_device(self, engine_share: int) -> int:
        """Return the peak use of the device, if the engine fills `engine_share` bytes."""
        engine = engine_share if self.engine else 0
        return max(self.learner, self.learner - self.offloaded + engine)


def estimate(config: Config, placement: Placement, policy: int, critic: int, trains: bool = True) -> list[RoleMemory]:
    """Estimate the memory of each combination of roles.

    `policy` and `critic` are numbers of parameters, 0 without a critic. `trains` is False with --eval-only.
    """
    return [
        _estimate_role(config, placement, roles, policy, critic, trains) for roles in dict.fromkeys(placement.roles)
    ]


def _estimate_role(
    config: Config, placement: Placement, roles: tuple[str, ...], policy: int, critic: int, trains: bool
) -> RoleMemory:
    has_reference = bool(config.algo.kl_coef)
    is_scored_apart = bool(placement.scorers) and config.algo.kl_estimator != "full"
    state = moments = reference = scorer = engine = offloaded = 0
    host = LIBRARIES
    if "actor" in roles:
        num_shards = len(placement.replicas[0])
        state = (STATE if trains else COPY) * (policy + critic) // num_shards
        if trains:
            moments = MOMENTS * (policy + critic) // num_shards
            host += HOST_COPY * (policy + critic) // num_shards
        if has_reference and not is_scored_apart:
            reference = COPY * policy // num_shards
    if "inference" in roles and placement.scorers:
        copies = int(config.algo.has_old_pass or bool(config.algo.certainty_coef)) + int(has_reference)
        scorer = COPY * max(1, copies) * policy // len(placement.scorers)
    if "rollout" in roles:
        engine = DTYPE_BYTES[config.model.dtype] * policy // config.rollout.tensor_parallel_size
    learner = state + reference + scorer
    if config.actor.offload == "always":  # one layer at a time is on the device
        host, learner = host + state + reference, scorer
    elif "rollout" in roles and "actor" in roles:
        offloaded = {"none": 0, "rollout": learner, "moments": moments}[config.actor.offload]
        host += offloaded
    ranks = tuple(rank for rank, others in enumerate(placement.roles) if others == roles)
    return RoleMemory(roles, ranks, learner, engine, offloaded, host)


def on_cpu(memory: RoleMemory, config: Config) -> int:
    """Return the bytes of host memory that a rank needs if the CPU is its device."""
    cache = config.rollout.kv_cache_mb << 20 or CPU_KV_CACHE
    engine = memory.engine + cache if memory.engine and config.rollout.engine == "vllm" else 0
    return memory.host - memory.offloaded + memory.learner + engine


def checkpoint_bytes(config: Config, policy: int, critic: int) -> int:
    """Return the size of one copy of a checkpoint, all ranks together."""
    dtype = DTYPE_BYTES[config.model.dtype]
    return (policy + critic) * (dtype + MOMENTS + (4 if dtype < 4 else 0))


def num_kept(config: Config) -> int:
    """Return how many checkpoints lie on disk at once. A new one is written before an old one is removed."""
    keep, num_steps = config.checkpoint, config.train.num_steps
    permanent = num_steps // keep.keep_every if keep.keep_every else 0
    return keep.keep_last + 1 + bool(keep.best_metric) + permanent
