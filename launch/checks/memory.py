"""Estimate the least memory that each role needs, from the number of parameters. Nothing is loaded.

    training state   16 bytes per parameter (float32 weights, gradients and two moments), split over the shards of a
                     replica; for the policy, and for the critic if there is one. With --eval-only, 4 bytes (weights)
    reference        4 bytes per parameter over the same ranks, or over the inference ranks
    inference        4 bytes per parameter over the inference ranks
    engine           weights in model.dtype over its ranks, and its KV cache
    checkpoint       weights in model.dtype, two moments, and float32 masters if model.dtype is narrower
    its host copy    12 bytes per parameter of the rank's shard. With --eval-only there is none

If --eval-only reads a checkpoint, two moments come on top. They are not counted, because it is not known yet whether
there is a checkpoint. Activations always come on top. They depend on kernels and lengths; `train.py --dry-run` measures
them.
"""

from collections.abc import Sequence
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
    host_on_cpu: int  # host memory if the CPU is the device

    def on_device(self, engine_share: int) -> int:
        """Return the peak use of the device, if the engine fills `engine_share` bytes."""
        return max(self.learner, self.learner - self.offloaded + (engine_share if self.engine else 0))


def estimate(config: Config, placement: Placement, policy: int, critic: int, trains: bool = True) -> list[RoleMemory]:
    """Estimate the memory of each combination of roles.

    `policy` and `critic` are numbers of parameters, 0 without a critic. `trains` is False with --eval-only.
    """
    has_reference, offload, scorers = bool(config.algo.kl_coef), config.actor.offload, placement.scorers
    found = []
    for roles in dict.fromkeys(placement.roles):
        is_actor, has_engine = "actor" in roles, "rollout" in roles
        state = moments = reference = scorer = engine = offloaded = engine_on_cpu = 0
        host = LIBRARIES
        if is_actor:
            num_shards = len(placement.replicas[0])
            state = (STATE if trains else COPY) * (policy + critic) // num_shards
            if trains:
                moments = MOMENTS * (policy + critic) // num_shards
                host += HOST_COPY * (policy + critic) // num_shards
            if has_reference and (not scorers or config.algo.kl_estimator == "full"):
                reference = COPY * policy // num_shards
        if "inference" in roles and scorers:
            copies = int(config.algo.has_old_pass or bool(config.algo.certainty_coef)) + int(has_reference)
            scorer = COPY * max(1, copies) * policy // len(scorers)
        if has_engine:
            engine = DTYPE_BYTES[config.model.dtype] * policy // config.rollout.tensor_parallel_size
            if config.rollout.engine == "vllm":
                engine_on_cpu = engine + (config.rollout.kv_cache_mb << 20 or CPU_KV_CACHE)
        learner = state + reference + scorer
        if offload == "always":  # one layer at a time is on the device
            host, learner = host + state + reference, scorer
        host_on_cpu = host + learner + engine_on_cpu
        if has_engine and is_actor and offload != "always":
            offloaded = {"none": 0, "rollout": learner, "moments": moments}[offload]
        ranks = tuple(rank for rank, others in enumerate(placement.roles) if others == roles)
        found.append(RoleMemory(roles, ranks, learner, engine, offloaded, host + offloaded, host_on_cpu))
    return found


def host_bytes(roles: Sequence[RoleMemory], placement: Placement, has_gpus: bool) -> list[int]:
    """Return the host memory that the ranks of each node need."""
    found = [0] * placement.num_nodes
    for role in roles:
        for rank in role.ranks:
            found[rank // placement.num_ranks_per_node] += role.host if has_gpus else role.host_on_cpu
    return found


def checkpoint_bytes(config: Config, placement: Placement, policy: int, critic: int) -> list[int]:
    """Return how much of one copy of a checkpoint each node writes. Each actor writes its shard."""
    dtype = DTYPE_BYTES[config.model.dtype]
    size = (policy + critic) * (dtype + MOMENTS + (4 if dtype < 4 else 0))
    nodes = [actor // placement.num_ranks_per_node for actor in placement.actors]
    return [size * nodes.count(node) // len(nodes) for node in range(placement.num_nodes)]


def num_kept(config: Config) -> int:
    """Return how many checkpoints lie on disk at once. A new one is written before an old one is removed."""
    keep, num_steps = config.checkpoint, config.train.num_steps
    permanent = num_steps // keep.keep_every if keep.keep_every else 0
    return keep.keep_last + 1 + bool(keep.best_metric) + permanent
