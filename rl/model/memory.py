"""Estimate the least memory of each role from the number of parameters. Nothing is loaded.

State, reference and host copies are split over the shards of a replica, copies of the inference ranks over those ranks,
the weights of an engine over its ranks. With --eval-only, moments are not counted, because it is not known yet whether
a checkpoint is read. Activations come on top. They depend on kernels and lengths; `train.py --dry-run` measures them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.common.text import format_bytes, format_ranks
from rl.config.schema import Config
from rl.placement.roles import Placement

STATE = 16  # bytes per parameter of policy and critic: float32 weights, gradients and two moments
MOMENTS = 8
COPY = 4  # a float32 copy: of the reference, for logprobs, or instead of the state with --eval-only
HOST_COPY = 12  # of a checkpoint that is being written: weights and moments
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

    @property
    def who(self) -> str:
        return f"{','.join(self.roles)} ({format_ranks(self.ranks)})"

    @property
    def parts(self) -> str:
        parts = {"learner": self.learner, "engine's weights": self.engine}
        return ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)

    def on_device(self, engine_share: int) -> int:
        """Return the peak use of the device, if the engine fills `engine_share` bytes."""
        return max(self.learner, self.learner - self.offloaded + (engine_share if self.engine else 0))


def estimate(config: Config, placement: Placement, policy: int, critic: int, trains: bool = True) -> list[RoleMemory]:
    """Estimate the memory of each combination of roles. `policy` and `critic` are numbers of parameters."""
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
        if has_engine and is_actor:
            offloaded = {"rollout": learner, "moments": moments}.get(offload, 0)
        ranks = tuple(rank for rank, others in enumerate(placement.roles) if others == roles)
        found.append(RoleMemory(roles, ranks, learner, engine, offloaded, host + offloaded, host_on_cpu))
    return found


def host_bytes(roles: Sequence[RoleMemory], placement: Placement, has_gpus: bool) -> list[int]:
    """Return the host memory that the ranks of each node need."""
    found = [0] * placement.num_nodes
    for role in roles:
        for rank in role.ranks:
            found[placement.nodes.node_of(rank)] += role.host if has_gpus else role.host_on_cpu
    return found


def checkpoint_bytes(config: Config, placement: Placement, policy: int, critic: int) -> list[int]:
    """Return how much of one copy of a checkpoint each node writes. Each actor writes its shard."""
    dtype = DTYPE_BYTES[config.model.dtype]
    size = (policy + critic) * (dtype + MOMENTS + (4 if dtype < 4 else 0))  # with float32 masters if that is narrower
    nodes = [placement.nodes.node_of(actor) for actor in placement.actors]
    return [size * nodes.count(node) // len(nodes) for node in range(placement.num_nodes)]


def num_kept(config: Config) -> int:
    """Return how many checkpoints lie on disk at once. A new one is written before an old one is removed."""
    keep, num_steps = config.checkpoint, config.train.num_steps
    permanent = num_steps // keep.keep_every if keep.keep_every else 0
    return keep.keep_last + 1 + bool(keep.best_metric) + permanent
