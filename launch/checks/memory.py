"""Check that the placement fits the world, and that the model, if it can be read here, fits the memory of its ranks.

The least memory of each role is estimated from the number of parameters. Nothing is loaded. State, reference and host
copies are split over the shards of a replica, copies of the inference ranks over those ranks, the weights of an engine
over its ranks. With --eval-only, moments are not counted, because it is not known yet whether a checkpoint is read.
Activations come on top. They depend on kernels and lengths; `train.py --dry-run` measures them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.checks.results import FAILED, OK, WARNING, CheckResult, Finding, summarize
from rl.common.text import format_bytes, format_ranks
from rl.config.schema import Config, ConfigError
from rl.model.shape import check_model, count_parameters, local_folder
from rl.placement.roles import Placement, plan

STATE = 16  # bytes per parameter of policy and critic: float32 weights, gradients and two moments
MOMENTS = 8
COPY = 4  # a float32 copy: of the reference, for logprobs, or instead of the state with --eval-only
HOST_COPY = 12  # of a checkpoint that is being written: weights and moments
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LIBRARIES = 1 << 30  # host memory of a rank without any model
CPU_KV_CACHE = 256 << 20
ACTIVATION_SHARE = 0.1  # fraction of a GPU that should stay free


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
            found[rank // placement.num_ranks_per_node] += role.host if has_gpus else role.host_on_cpu
    return found


def checkpoint_bytes(config: Config, placement: Placement, policy: int, critic: int) -> list[int]:
    """Return how much of one copy of a checkpoint each node writes. Each actor writes its shard."""
    dtype = DTYPE_BYTES[config.model.dtype]
    size = (policy + critic) * (dtype + MOMENTS + (4 if dtype < 4 else 0))  # with float32 masters if that is narrower
    nodes = [actor // placement.num_ranks_per_node for actor in placement.actors]
    return [size * nodes.count(node) // len(nodes) for node in range(placement.num_nodes)]


def num_kept(config: Config) -> int:
    """Return how many checkpoints lie on disk at once. A new one is written before an old one is removed."""
    keep, num_steps = config.checkpoint, config.train.num_steps
    permanent = num_steps // keep.keep_every if keep.keep_every else 0
    return keep.keep_last + 1 + bool(keep.best_metric) + permanent


def check_placement(
    config: Config, num_nodes: int, num_local: int, gpus: Sequence[Mapping[str, Any]], trains: bool = True
) -> tuple[CheckResult, list[int], list[int]]:
    """Check the placement as train.py would, then the estimated memory. `trains` is False with --eval-only.

    Also return the bytes of host memory, and of one copy of a checkpoint, that each node needs, or empty lists.
    """
    tp = config.rollout.tensor_parallel_size
    try:
        placement = plan(config.placement, num_nodes, num_local, tp, config.actor.num_replicas)
        if folder := local_folder(config.model.path):
            check_model(config, folder)
    except ConfigError as error:
        return CheckResult("placement", FAILED, str(error)), [], []
    counts = {}
    for path in filter(None, [config.model.path, config.critic.path]):
        model = local_folder(path)
        counts[path] = count_parameters(model) if model else None
        if counts[path] is None:
            where = f"has no weights in {model}" if model else "cannot be read here"
            text = f"{placement.summary()}; {path} {where} yet, so memory and disk were not estimated"
            return CheckResult("placement", WARNING, text), [], []
    policy = counts[config.model.path] or 0
    critic = (counts.get(config.critic.path) or policy) if config.algo.has_critic else 0
    roles = estimate(config, placement, policy, critic, trains)
    text = f"{placement.summary()}; {policy / 1e6:.2f} M parameters"
    result = summarize("placement", [_check_role(role, config, gpus) for role in roles], text)
    host = host_bytes(roles, placement, all("total" in gpu for gpu in gpus))
    return result, host, checkpoint_bytes(config, placement, policy, critic)


def _check_role(role: RoleMemory, config: Config, gpus: Sequence[Mapping[str, Any]]) -> Finding:
    who = f"{','.join(role.roles)} ({format_ranks(role.ranks)})"
    parts = {"learner": role.learner, "engine's weights": role.engine}
    shown = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)
    card = min((gpus[rank].get("total", 0) for rank in role.ranks), default=0)
    if not card or config.debug.share_gpu:
        return OK, f"{who}: each at least {format_bytes(role.host_on_cpu)} of host memory ({shown})"
    share = int(config.rollout.gpu_memory_fraction * card)
    peak = role.on_device(share)
    text = f"{who}: each {shown}, and {format_bytes(role.host)} of host memory; its GPU has {format_bytes(card)}"
    if role.engine > share:
        return FAILED, f"{text}, of which the engine may fill {format_bytes(share)}; raise rollout.tensor_parallel_size"
    if peak > card:
        return FAILED, f"{text}, and {format_bytes(peak)} would be in use at once; {_remedy(role, config, card)}"
    limit = int((1 - ACTIVATION_SHARE) * card)
    if role.learner and max(role.learner, peak if role.offloaded < role.learner else 0) > limit:
        return WARNING, f"{text}: little is left for activations; {_remedy(role, config, limit)}"
    return OK, text


def _remedy(role: RoleMemory, config: Config, limit: int) -> str:
    """Return what to change if a rank needs more than `limit` bytes, without what is set already."""
    is_actor, offload = "actor" in role.roles, config.actor.offload
    remedies = []
    if role.learner <= limit:  # the learner fits, but not together with the engine
        remedies.append("lower rollout.gpu_memory_fraction")
        remedies += ["set actor.offload=rollout"] if is_actor and offload in ("none", "moments") else []
    elif is_actor and offload != "always":
        remedies.append("set actor.offload=always")
    return ", or ".join([*remedies, f"give {'the learner' if is_actor else 'inference'} more ranks"])
