"""How engines spend a step: sampled tokens, seconds, and how full their KV caches are.

lead of each engine: EngineMeter --Pull--> leader: Dispatcher --> describe_uses --> metrics
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rl.common.members import metrics_of_members

MAX_ENGINES = 16  # with a metric of their own


@dataclass(frozen=True)
class EngineUse:
    """What one engine did in some of its steps."""

    num_tokens: int = 0  # of the responses that ended or were cut
    seconds: float = 0.0  # in the engine's steps
    kv_seconds: float = 0.0  # the same, each step weighted by the share of the KV cache that was in use
    max_kv_use: float = -1.0  # -1: the engine has no KV cache
    kv_bytes: int = 0  # size of the KV cache on one rank's GPU; 0 without a GPU

    def __add__(self, other: "EngineUse") -> "EngineUse":
        return EngineUse(
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            self.kv_seconds + other.kv_seconds,
            max(self.max_kv_use, other.max_kv_use),
            max(self.kv_bytes, other.kv_bytes),
        )


def describe_uses(uses: Mapping[int, EngineUse]) -> dict[str, float]:
    """Return the metrics of all engines, which are named by their leads. Engines that did nothing are left out."""
    speeds = {lead: use.num_tokens / use.seconds for lead, use in uses.items() if use.seconds}
    values = metrics_of_members("perf/tokens_per_s/engine", speeds, MAX_ENGINES)
    caching = [use for use in uses.values() if use.seconds and use.max_kv_use >= 0]
    if caching:
        values["rollout/kv_use"] = sum(use.kv_seconds for use in caching) / sum(use.seconds for use in caching)
        values["rollout/kv_use_max"] = max(use.max_kv_use for use in caching)
    if largest := max((use.kv_bytes for use in uses.values()), default=0):
        values["gpu/memory_gb/kv"] = largest / 1e9
    return values
