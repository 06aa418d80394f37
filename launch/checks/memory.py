"""What the ranks of each role need at least, by arithmetic on the number of parameters, before anything is loaded.

    training state   16 bytes a parameter (float32 weights, gradients and two moments) over the shards of a replica; of
                     the policy, and of the critic where there is one
    reference        4 bytes a parameter over the same ranks, or over the inference ranks
    inference        4 bytes a parameter over the inference ranks
    engine           weights in model.dtype over its ranks, and its KV cache
    a checkpoint     the weights in model.dtype, two moments, and float32 masters where model.dtype is narrower
    its host copy    12 bytes a parameter of the rank's shard

With --eval-only the state is the weights, 4 bytes a parameter, and no host copy is made; a checkpoint that is read then
brings its two moments along, which are not counted: whether there is one is not known before.

Activations come on top: they depend on kernels and lengths, and `train.py --dry-run` measures them.
"""

from dataclasses import dataclass

from rl.config.schema import Config
from rl.placement.roles import Placement

STATE, MOMENTS, COPY, HOST_COPY = 16, 8, 4, 12  # bytes a parameter
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LIBRARIES = 1 << 30  # of host memory a rank
CPU_KV_CACHE = 256 << 20


@dataclass(frozen=True)
class Need:
    """In bytes, of each of some ranks with the same roles."""

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    learner: int  # where the learner computes: state, reference, copies for logprobs
    engine: int  # weights alone
    resting: int  # of the learner's part: not on the device while the engine works
    host: int  # besides: libraries, copies of checkpoints, what was swapped out

    def on_device(self, engine_share: int) -> int:
        """At the worst moment, with an engine that fills its share."""
        engine = engine_share if self.engine else 0
        return max(self.learner, self.learner - self.resting + engine)


def estimate(
    config: Config, placement: Placement, num_parameters: int, num_critic_parameters: int, trains: bool = True
) -> list[Need]:
    """`trains` False: --eval-only."""
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, roles in enumerate(placement.roles):
        found.setdefault(roles, []).append(rank)
    return [
        _need(config, placement, roles, ranks, num_parameters, num_critic_parameters, trains)
        for roles, ranks in found.items()
    ]


def _need(
    config: Config,
    placement: Placement,
    roles: tuple[str, ...],
    ranks: list[int],
    policy: int,
    critic: int,
    trains: bool,
) -> Need:
    critic = critic if config.algo.has_critic else 0
    has_reference = bool(config.algo.kl_coef)
    is_scored_apart = bool(placement.scorers) and config.algo.kl_estimator != "full"
    state = moments = reference = scorer = 0
    if "actor" in roles:
        num_shards = len(placement.replicas[0])
        state = (STATE if trains else COPY) * (policy + critic) // num_shards
        moments = MOMENTS * (policy + critic) // num_shards if trains else 0
        reference = 0 if is_scored_apart or not has_reference else COPY * policy // num_shards
    if "inference" in roles and placement.scorers:
        copies = int(config.algo.has_old_pass or bool(config.algo.certainty_coef)) + int(has_reference)
        scorer = COPY * max(1, copies) * policy // len(placement.scorers)
    engine = 0
    if "rollout" in roles:
        engine = DTYPE_BYTES[config.model.dtype] * policy // config.rollout.tensor_parallel_size
    learner = state + reference + scorer
    host, resting = LIBRARIES, 0
    if config.actor.offload == "always":  # a layer at a time is on the device
        host, learner = host + state + reference, scorer
    elif "rollout" in roles and "actor" in roles:
        resting = {"none": 0, "rollout": learner, "moments": moments}[config.actor.offload]
        host += resting
    if "actor" in roles and trains:
        host += HOST_COPY * (policy + critic) // len(placement.replicas[0])
    return Need(roles, tuple(ranks), learner, engine, resting, host)


def on_cpu(need: Need, config: Config) -> int:
    """Of host memory, where that is the device too."""
    cache = config.rollout.kv_cache_mb << 20 or CPU_KV_CACHE
    engine = need.engine + cache if need.engine and config.rollout.engine == "vllm" else 0
    return need.host - need.resting + need.learner + engine


def checkpoint_bytes(config: Config, num_parameters: int, num_critic_parameters: int) -> int:
    """On disk, of all ranks, one copy of it."""
    dtype = DTYPE_BYTES[config.model.dtype]
    critic = num_critic_parameters if config.algo.has_critic else 0
    return (num_parameters + critic) * (dtype + 8 + (4 if dtype < 4 else 0))


def num_kept(config: Config) -> int:
    """Checkpoints that lie on disk at once: the new one is written before an old one is removed."""
    keep, num_steps = config.checkpoint, config.train.num_steps
    for_good = num_steps // keep.keep_every if keep.keep_every else 0
    return keep.keep_last + 1 + bool(keep.best_metric) + for_good
