"""The most memory that a rank's GPU needs in each stage of a step, by estimate. No torch.

An engine and a learner on the same GPU take turns, unless `rollout.sleep` is never. So two moments count:

    rollout     weights and moments that stay on the device, and the engine
    update      the training state of a rank, activations, and what a sleeping engine keeps

With offload=moments or rollout, moments return while the last backward pass frees activations (ShardedTrainer), so the
larger of both counts, unless a batch has several optimizer steps.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from rl.config.schema import Config
from rl.config.values import with_values
from rl.model.activations import EngineMemory, UpdateMemory, scoring_bytes, update_memory
from rl.model.memory import RoleMemory, estimate
from rl.model.shape import ModelShape, ModelSize
from rl.placement.roles import Placement

UPDATE, LOGPROBS, LOADING = "update", "computation of logprobs", "loading of the models"  # stages of a learner
WHOLE_GPU = 0.9  # share of an engine that has a GPU of its own
CUDA_BYTES = 1_500_000_000  # context, libraries and communicators
MARGIN = 0.03  # of a card, for what the estimate does not know
SLEEPING_BYTES = 2_500_000_000  # what an engine keeps while the learner works: graphs and buffers


class ModelFacts(NamedTuple):
    size: ModelSize
    shape: ModelShape


class Models(NamedTuple):
    policy: ModelFacts
    critic: ModelFacts | None = None


@dataclass(frozen=True)
class Card:
    """A GPU, and the part of it that a rank may use."""

    whole: int  # bytes
    num_ranks: int  # that share it

    @property
    def total(self) -> int:
        return self.whole // self.num_ranks

    @property
    def usable(self) -> int:
        return int((1 - MARGIN) * self.total) - CUDA_BYTES

    def fraction(self, num_bytes: float, rounds_up: bool = False) -> float:
        """Return the share of the GPU that this is, of at most WHOLE_GPU of the rank's part, to two digits."""
        share = 100 * min(num_bytes, WHOLE_GPU * self.total) / self.whole
        return max(1, math.ceil(share) if rounds_up and num_bytes < WHOLE_GPU * self.total else math.floor(share)) / 100


class Peaks:
    """The memory of a run's ranks, whatever settings are tried."""

    def __init__(self, placement: Placement, models: Models, card: Card, trains: bool):
        self._placement, self._models, self._card, self._trains = placement, models, card, trains

    def roles(self, config: Config) -> list[RoleMemory]:
        critic = self._models.critic.size if self._models.critic else None
        return estimate(config, self._placement, self._models.policy.size, critic, self._trains)

    def activations(self, config: Config) -> dict[str, UpdateMemory]:
        """Return what an update of each trained model needs besides its state."""
        policy, critic = self._models
        found = {"policy": update_memory(config, policy.shape, config.actor.recompute, config.model.lora)}
        if critic is not None:
            recompute, lora = config.critic_recompute, config.critic_lora
            found["critic"] = update_memory(config, critic.shape, recompute, lora, is_critic=True)
        return found

    def awake_bytes(self, config: Config, role: RoleMemory, engine: EngineMemory) -> int:
        """Return what a rank's engine keeps while the learner works, because it does not sleep."""
        if config.rollout.sleep != "never" or not role.engine or not role.states:
            return 0
        return max(0, self.share(config, engine) + engine.beside - SLEEPING_BYTES)

    def share(self, config: Config, engine: EngineMemory) -> int:
        """Return what an engine takes of a GPU, except to sample."""
        if config.rollout.kv_cache_mb:
            return engine.total
        return max(int(config.rollout.gpu_memory_fraction * self._card.whole), engine.weights)

    def left_for_engine(self, config: Config, role: RoleMemory, engine: EngineMemory, needed: int) -> float:
        """Return the largest share that an engine may have beside the other roles of its rank."""
        if role.roles == ("rollout",):
            return math.inf
        left = self._card.usable - role.during_rollout - engine.beside
        if "inference" in role.roles and self._placement.scorers:  # it scores while the engine stays awake
            left -= scoring_bytes(config, self._models.policy.shape, config.inference.max_tokens_per_micro_batch)
        if config.rollout.sleep == "never" and role.states:
            changes = {"rollout.sleep": "always", "actor.max_tokens_per_micro_batch": needed}
            asleep = max(self.of_rank(with_values(config, changes), role, engine).values())
            left = min(left, self._card.usable + SLEEPING_BYTES - engine.beside - asleep)
        return left

    def of_rollout(self, config: Config, engine: EngineMemory) -> int:
        shared = [role for role in self.roles(config) if role.engine and role.roles != ("rollout",)]
        share = self.share(config, engine) + engine.beside
        return max((role.during_rollout + share for role in shared), default=0)

    def num_tokens(self, config: Config, limit: int) -> int:
        """Return the most tokens of a micro-batch, of which an actor has no more than about its part of a step."""
        longest = longest_sequence(config)
        return max(longest, min(limit, longest + config.max_step_tokens // len(self._placement.actors)))

    def of_learner(self, config: Config, engine: EngineMemory, has_activations: bool = True) -> dict[str, int]:
        """Return the peaks of the actors that need the most."""
        actors = [role for role in self.roles(config) if role.states]
        each = [self.of_rank(config, role, engine, has_activations) for role in actors]
        return {name: max(peaks[name] for peaks in each) for name in each[0]} if each else {}

    def of_rank(
        self, config: Config, role: RoleMemory, engine: EngineMemory, has_activations: bool = True
    ) -> dict[str, int]:
        """Return the peak of an actor's GPU in each stage of its learner, with the rank's engine."""
        awake, memory, update = self.awake_bytes(config, role, engine), self.activations(config), 0
        if not self._trains:  # the state is offloaded once it is loaded; with `always`, it never gets to the GPU
            beside = awake + (SLEEPING_BYTES if role.engine else 0)
            return {LOADING: role.learner + beside if role.learner else 0}
        limits = {"policy": config.actor.max_tokens_per_micro_batch, "critic": config.critic_max_tokens}
        for name in role.states:
            state, num_tokens = state_in_update(config, role, name), self.num_tokens(config, limits[name])
            activations = max(memory[name].per_token * num_tokens * has_activations, state.late)
            update = max(update, state.total + awake + memory[name].fixed + activations)
        if self._placement.scorers:
            return {UPDATE: update}
        # Most of the state is there while logprobs are computed.
        limit = max(config.inference.max_tokens_per_micro_batch, config.reference_max_tokens)
        activations = scoring_bytes(config, self._models.policy.shape, self.num_tokens(config, limit))
        return {UPDATE: update, LOGPROBS: state_in_update(config, role, "policy").total + awake + activations}


def longest_sequence(config: Config) -> int:
    """Return the maximum number of tokens of a sequence in training. It cannot be divided."""
    return config.data.max_prompt_tokens + config.max_training_tokens


class _UpdateState(NamedTuple):
    """Bytes on a rank's device during the update of one of its models."""

    total: int  # of all models, without what comes late
    late: int  # moments that return as activations are freed


def state_in_update(config: Config, role: RoleMemory, name: str) -> _UpdateState:
    """The critic is trained before the policy. Once its moments are back, they stay until the next rollout."""
    total = role.learner - sum(each.on_device for each in role.states.values())  # reference and copies
    late = 0
    for other, state in role.states.items():
        if state.offload == "always":
            continue
        returns = state.offload in ("moments", "rollout") and bool(role.engine)
        if other == name:
            is_single = config.algo.num_mini_batches * config.algo.num_epochs == 1
            late = state.moments if returns and is_single else 0
            total += state.total - late
        else:
            total += state.weights + (0 if returns and other == "policy" else state.moments)
    return _UpdateState(total + (SLEEPING_BYTES if role.engine else 0), late)
