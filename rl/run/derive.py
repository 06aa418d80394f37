"""Derive settings that the user has left open from model, lengths, placement and the memory of the GPUs. No torch.

    derive(config, placement, models, device_bytes).config      has a number or a name for each of them

Values that the user gives are used as given, and the others are chosen to fit them. On a CPU they are fixed. The leader
derives them for all ranks, from the smallest GPU (rl/run/agree.py). They change speed and memory, and of the results
only the rounding.

rl/run/peaks.py estimates the memory of a GPU with each choice. The order of preference is that of the cost: computing
logits twice, smaller micro-batches, then moments over the bus, weights over the bus, recomputation of layers, and
everything in host memory.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rl.common.text import count_of, format_bytes
from rl.config.schema import Config
from rl.config.values import read_value, with_values
from rl.model.activations import EngineMemory, engine_memory, kept_logits_bytes
from rl.model.shape import measure_size, read_shape
from rl.placement.roles import Placement
from rl.run.peaks import (
    LOADING,
    LOGPROBS,
    UPDATE,
    WHOLE_GPU,
    Card,
    ModelFacts,
    Models,
    Peaks,
    longest_sequence,
    state_in_update,
)
from rl.run.slots import Slots, count_slots

SLOTS, FRACTION, TOKENS = "rollout.max_num_seqs", "rollout.gpu_memory_fraction", "actor.max_tokens_per_micro_batch"
OFFLOAD, RECOMPUTE, SLEEP = "actor.offload", "actor.recompute", "rollout.sleep"
KEEP_KV = "rollout.keep_kv"
ON_CPU = {SLOTS: 256, FRACTION: 0.85, TOKENS: 8192, OFFLOAD: "none", RECOMPUTE: "head", SLEEP: "never"}
# For a model whose config.json has no sizes that are known here.
CAUTIOUS = {FRACTION: 0.5, TOKENS: 8192, OFFLOAD: "rollout", RECOMPUTE: "head", SLEEP: "always"}

AIM_TOKENS, MAX_AIM_TOKENS = 20_480, 65_536  # of a micro-batch; larger ones are hardly faster
# A pass costs the host this time per layer, whatever the number of tokens (0.1 s for 30 layers beside an H200, with
# 135 M parameters). The GPU should have as long to compute, so micro-batches of tiny models are larger.
HOST_S_PER_LAYER, OPERATIONS_PER_S = 3.3e-3, 4e14
ENOUGH_TOKENS = 8192  # smaller micro-batches are clearly slower, so they cost more than moments over the bus
ROUND_TOKENS = 512
NEAR = 0.8  # an engine is content with this share of the most that it could get
AWAKE_SHARE = 0.4  # of a card; if engine and learner need more, saving memory is worth the 0.05 s of a handover
GIB = 1 << 30
NOMINAL = 0.99  # GiB that CUDA reports of a nominal GB: 79.2 of 80, 139.8 of 141


def read_models(config: Config, folders: Mapping[str, Path]) -> Models | None:
    """Read the models of a run. `folders` are by setting, as in Run.models. Return None if a config.json lacks sizes.
    Weights that are not there, as in a dry run, are counted from config.json."""
    policy = _read_model(config, folders["model.path"])
    critic = _read_model(config, folders["critic.path"]) if "critic.path" in folders else policy
    if policy is None or critic is None:
        return None
    return Models(policy, critic if config.algo.has_critic else None)


def _read_model(config: Config, folder: Path) -> ModelFacts | None:
    shape = read_shape(folder)
    if shape is None:
        return None
    return ModelFacts(measure_size(folder, config.model.lora.targets) or shape.size, shape)


@dataclass(frozen=True)
class Derived:
    """The settings of a run, with everything filled in."""

    config: Config
    reasons: dict[str, str]  # for each setting that was derived
    problem: str = ""  # why the run is not expected to fit
    use: str = ""  # of the memory of a GPU, in words

    @property
    def values(self) -> dict[str, Any]:
        """The derived settings by name."""
        return {name: read_value(self.config, name) for name in self.reasons}

    def line(self) -> str:
        """Return the derived settings as on a command line."""
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def open_settings(config: Config) -> list[str]:
    """Return the names of the settings that are to be derived."""
    return [name for name in ON_CPU if read_value(config, name) in (0, "auto")]


def derive_for_cpu(config: Config) -> Config:
    """Return the config with all settings filled in for ranks without GPUs."""
    return with_values(config, {name: ON_CPU[name] for name in open_settings(config)})


def nominal_bytes(num_gb: float) -> int:
    """Return the bytes of a GPU that is sold as having this many GB. CUDA reports about as many GiB."""
    return int(num_gb * NOMINAL * GIB)


def derive(
    config: Config,
    placement: Placement,
    models: Models | None,
    device_bytes: int,
    trains: bool = True,
    alike: bool = True,
) -> Derived:
    """Fill in the settings that are open. `device_bytes` is the memory of the smallest GPU; 0: the ranks have none.
    `alike`: all engines have the same kind of GPU."""
    names = open_settings(config)
    if not device_bytes:
        return Derived(derive_for_cpu(config), dict.fromkeys(names, "on a CPU"))
    if not placement.engines:  # a phase without sampling
        config = with_values(config, {name: ON_CPU[name] for name in names if name in (SLOTS, FRACTION, SLEEP)})
        names = open_settings(config)
    largest_share = max((placement.engine_shares or {}).values(), default=0.0)
    slots = count_slots(config, max(1, len(placement.engines)), largest_share, trains, alike)
    reasons = {SLOTS: slots.reason}
    if SLOTS in names:
        config = with_values(config, {SLOTS: slots.number})
    if models is None:
        values = {name: value for name, value in CAUTIOUS.items() if name in names}
        if config.rollout.keep_kv and trains and SLEEP in names:  # an engine that sleeps would lose its KV cache
            values[SLEEP] = "never"
        reasons |= dict.fromkeys(values, "a cautious value, because config.json of the model has no known sizes")
        return Derived(with_values(config, values), {name: reasons[name] for name in names})
    device_bytes = device_bytes // GIB * GIB or device_bytes  # cards of the same kind differ by a few MB
    card = Card(device_bytes, max(placement.nodes.sizes) if config.debug.share_gpu else 1)
    search = _Search(placement, models, card, slots, config.rollout.max_num_seqs, trains)
    found = search.choose(config)
    values = {FRACTION: found.fraction, TOKENS: found.tokens, **found.others}
    reasons |= found.reasons
    config = with_values(config, {name: value for name, value in values.items() if name in names})
    return Derived(config, {name: reasons[name] for name in names}, found.problem, found.use)


def _aim_tokens(model: ModelFacts) -> int:
    """Return how many tokens a micro-batch should have if there is memory for them."""
    busy = HOST_S_PER_LAYER * model.shape.num_layers * OPERATIONS_PER_S / (6 * model.size.num_parameters)
    return min(max(AIM_TOKENS, round(busy)), MAX_AIM_TOKENS)


class _Found(NamedTuple):
    fraction: float
    tokens: int
    others: dict[str, Any]  # offload, recompute and sleep
    reasons: dict[str, str]
    problem: str
    use: str


class _Budget(NamedTuple):
    """What one choice of offload and recompute leaves, on the ranks with the least."""

    config: Config
    for_engine: float  # bytes; infinite if no engine shares a GPU
    num_tokens: float  # in a micro-batch of the update; without an update, infinite if the models can be loaded


class _Search:
    def __init__(self, placement: Placement, models: Models, card: Card, slots: Slots, limit: int, trains: bool):
        self._placement, self._models, self._card, self._trains = placement, models, card, trains
        self._num_sequences, self._num_of_step = min(slots.num_sequences, limit), min(slots.num_of_step, limit)
        self._peaks = Peaks(placement, models, card, trains)
        self._busiest = UPDATE if trains else LOADING  # when the learner needs the most

    def choose(self, given: Config) -> _Found:
        config, longest, limit = given, longest_sequence(given), given.actor.max_tokens_per_micro_batch
        if config.rollout.sleep == "auto":
            config = with_values(config, {SLEEP: "never" if self._keeps_kv(config) else "always"})
        needed = self._peaks.num_tokens(config, limit or ENOUGH_TOKENS)
        slots, policy = config.rollout.max_num_seqs, self._models.policy
        engine = engine_memory(config, policy.shape, policy.size, slots, self._num_sequences, self._num_of_step)
        budgets = [self._budget(each, engine, needed) for each in _candidates(config)]
        weighed, share = budgets, config.rollout.gpu_memory_fraction
        if self._keeps_kv(config):  # a larger cache is not worth weights in host memory
            fast = [each for each in budgets if each.num_tokens >= needed and each.config.actor.offload != "always"]
            weighed = fast or budgets
        most = max(each.for_engine for each in weighed)
        enough = min(share * self._card.whole, most) if share else min(engine.enough, NEAR * most)
        if config.rollout.kv_cache_mb:  # then vLLM does not use the share
            enough = min(engine.total, most)
        fitting = [each for each in budgets if each.num_tokens >= needed and each.for_engine >= enough]
        best = fitting[0] if fitting else budgets[-1]
        room = max(best.num_tokens, 0)
        tokens = int(min(self._aim(config), room)) // ROUND_TOKENS * ROUND_TOKENS
        tokens = limit or max(tokens, longest, ROUND_TOKENS)
        fraction, why = self._fraction(best.config, best.for_engine, engine)
        config = with_values(best.config, {TOKENS: tokens, FRACTION: fraction})
        if given.rollout.sleep == "auto":
            config = with_values(config, {SLEEP: self._choose_sleep(config, engine)[0]})
        why_recompute = f"the first of head, selective and full with room for {needed:,} tokens"
        smaller = self._fraction(with_values(best.config, {RECOMPUTE: "none"}), best.for_engine, engine)[0]
        if self._has_room_for_logits(config, given, engine, smaller):
            fraction = smaller
            config = with_values(config, {RECOMPUTE: "none", FRACTION: fraction})
            logits = self._peaks.num_tokens(config, tokens) * kept_logits_bytes(config, policy.shape, "none")
            why_recompute = f"there is room for {format_bytes(logits)} of logits"
        peaks = {"rollout": self._peaks.of_rollout(config, engine)} | self._peaks.of_learner(config, engine)
        problem = self._problem(config, given, peaks, engine, best.for_engine)
        of = f"of {format_bytes(self._card.usable)}"
        shown = {name: peaks.get(name, 0) for name in ("rollout", self._busiest)}
        use = ", ".join(f"{format_bytes(peak)} in the {name}" for name, peak in shown.items() if peak)
        update, room = self._peaks.activations(config)["policy"], self._budget(config, engine, needed).num_tokens
        reasons = {
            FRACTION: why,
            TOKENS: f"{format_bytes(update.per_token)} of activations per token, and room for {_count(max(room, 0))}",
            OFFLOAD: f"the first of none, moments, rollout and always that fits, with {use or 'no learner'}",
            RECOMPUTE: why_recompute,
            SLEEP: self._choose_sleep(config, engine)[1],
        }
        actor = config.actor
        others = {OFFLOAD: actor.offload, RECOMPUTE: actor.recompute, SLEEP: config.rollout.sleep}
        return _Found(fraction, tokens, others, reasons, problem, f"at most {use} {of}" if use else "")

    def _has_room_for_logits(self, config: Config, given: Config, engine: EngineMemory, fraction: float) -> bool:
        """Return whether an update may keep the logits that it computes twice in `config`: if it still fits beside an
        engine with this share, and if the engine need not sleep for that."""
        if not self._trains or given.actor.recompute != "auto" or config.actor.recompute != "head":
            return False
        kept = with_values(config, {RECOMPUTE: "none", FRACTION: fraction})
        if self._peaks.of_learner(kept, engine).get(UPDATE, 0) > self._card.usable:
            return False
        return given.rollout.sleep != "auto" or self._choose_sleep(kept, engine)[0] == config.rollout.sleep

    def _choose_sleep(self, config: Config, engine: EngineMemory) -> tuple[str, str]:
        """Return whether engine and learner of a GPU should take turns with its memory, and why."""
        shared = [role for role in self._peaks.roles(config) if role.engine and role.states]
        if not shared:
            return "never", "no engine shares a GPU with a learner"
        if not self._trains:
            return "always", "no update follows"
        if self._keeps_kv(config):
            return "never", "rollout.keep_kv, and an engine that sleeps loses its KV cache"
        if any(role.is_offloaded for role in shared):
            return "always", "state is offloaded while the engine works"
        together = max(self._peaks.of_learner(with_values(config, {SLEEP: "never"}), engine).values())
        enough = int(AWAKE_SHARE * self._card.usable)
        needs = f"engine and learner need {format_bytes(together)} together"
        return ("never", needs) if together <= enough else ("always", f"{needs}, more than {format_bytes(enough)}")

    def _aim(self, config: Config) -> int:
        """Return how many tokens a micro-batch should have if there is memory for them."""
        return max(_aim_tokens(self._models.policy), longest_sequence(config))

    def _keeps_kv(self, config: Config) -> bool:
        """Return whether an engine on a learner's GPU must keep its KV cache during updates."""
        is_shared = any(role.engine and role.states for role in self._peaks.roles(config))
        return config.rollout.keep_kv and self._trains and is_shared

    def _budget(self, config: Config, engine: EngineMemory, needed: int) -> _Budget:
        """Return what is left for an engine beside a micro-batch of `needed` tokens, and then for micro-batches."""
        roles, memory, num_tokens = self._peaks.roles(config), self._peaks.activations(config), math.inf
        left = (self._peaks.left_for_engine(config, role, engine, needed) for role in roles if role.engine)
        for_engine = min(left, default=math.inf)
        sized = with_values(config, {FRACTION: self._fraction(config, for_engine, engine)[0]})
        for role in (role for role in roles if role.states):
            peaks = self._peaks.of_rank(sized, role, engine)
            if any(peak > self._card.usable for name, peak in peaks.items() if name != UPDATE):
                num_tokens = 0
            for name in role.states if self._trains else ():
                state = state_in_update(config, role, name)
                awake = self._peaks.awake_bytes(sized, role, engine)
                room = self._card.usable - state.total - memory[name].fixed - awake
                if room < state.late:
                    num_tokens = min(num_tokens, 0)
                elif name == "critic" and config.critic.max_tokens_per_micro_batch:  # it is used as given
                    needed_bytes = memory[name].per_token * self._peaks.num_tokens(config, config.critic_max_tokens)
                    num_tokens = num_tokens if room >= needed_bytes else 0
                else:
                    num_tokens = min(num_tokens, room // memory[name].per_token)
        return _Budget(config, for_engine, num_tokens)

    def _fraction(self, config: Config, for_engine: float, engine: EngineMemory) -> tuple[float, str]:
        if given := config.rollout.gpu_memory_fraction:
            return given, ""
        if math.isinf(for_engine):
            return self._card.fraction(self._card.usable - engine.beside), "no other role uses the GPU"
        parts = f"{format_bytes(engine.weights)} of weights, {format_bytes(engine.kv)} of KV cache for "
        parts += f"{count_of(self._num_sequences, 'sequence')} at full length, {format_bytes(engine.other)} besides"
        most = self._card.fraction(max(0.0, for_engine))
        if engine.total <= for_engine:
            return min(self._card.fraction(engine.total, rounds_up=True), most), parts
        if config.rollout.sleep == "never" and engine.enough < for_engine:
            wanted = self._peaks.num_tokens(config, config.actor.max_tokens_per_micro_batch or self._aim(config))
            roles = [role for role in self._peaks.roles(config) if role.engine]
            beside = min(self._peaks.left_for_engine(config, role, engine, wanted) for role in roles)
            return self._card.fraction(min(max(beside, engine.enough), for_engine)), (
                f"what micro-batches of {wanted:,} tokens leave free, and at least {format_bytes(engine.enough_kv)} of "
                "KV cache"
            )
        return most, f"what the learner leaves free; all sequences would need {parts}"

    def _problem(
        self, config: Config, given: Config, peaks: Mapping[str, int], engine: EngineMemory, for_engine: float
    ) -> str:
        """Return what does not fit, and what to change. `given` has the settings as the user gave them."""
        usable, rollout, more_ranks = self._card.usable, config.rollout, "give the learner more ranks"
        if (learner := peaks.get(self._busiest, 0)) > usable:
            if self._trains:
                remedies = self._remedies_of_update(config, given, engine)
            else:
                remedies = [*self._remedy_of_sleep(given), "set actor.offload=always"]
            what = f"{'an' if self._trains else 'the'} {self._busiest} needs {format_bytes(learner)}"
            return f"{what}; {_either(*remedies, more_ranks)}"
        if (scoring := peaks.get(LOGPROBS, 0)) > usable:
            remedies = [*self._remedy_of_sleep(given), "lower inference.max_tokens_per_micro_batch"]
            return f"the {LOGPROBS} needs {format_bytes(scoring)}; {_either(*remedies, more_ranks)}"
        if not any(role.engine for role in self._peaks.roles(config)):
            return ""
        if rollout.kv_cache_mb and engine.kv < engine.least_kv:
            least = math.ceil(engine.least_kv / (1 << 20))
            got = f"rollout.kv_cache_mb: got {rollout.kv_cache_mb}, but one sequence of full length needs {least}"
            return f"{got}; raise it"
        room, needed = max(0, int(min(for_engine, WHOLE_GPU * self._card.total))), engine.least
        remedies = ["raise rollout.tensor_parallel_size"]
        if math.isfinite(for_engine):
            remedies.append("place engine and learner on different ranks")
        share = int(given.rollout.gpu_memory_fraction * self._card.whole)
        if rollout.kv_cache_mb:
            needed, remedies = engine.total, ["lower rollout.kv_cache_mb", *remedies]
        elif share and share < min(needed, room):
            room, remedies = share, [f"raise {FRACTION}", *remedies[:1]]
        if needed > room:
            text = f"an engine needs at least {format_bytes(needed)}, and {format_bytes(room)} are left for it"
            return f"{text}; {_either(*self._remedy_of_sleep(given), *remedies)}"
        if peaks["rollout"] > usable:
            return f"a rollout needs {format_bytes(peaks['rollout'])}; lower {FRACTION}"
        return ""

    def _remedy_of_sleep(self, given: Config) -> list[str]:
        """Return how to let engine and learner take turns, if that is enough."""
        remedies = self._words_of_turns(given)
        if not remedies or self.choose(with_values(given, {SLEEP: "auto", KEEP_KV: False})).problem:
            return []
        return remedies

    def _words_of_turns(self, given: Config) -> list[str]:
        """Return what to change so that engine and learner take turns, if the user has asked for the opposite."""
        words = [f"set {KEEP_KV}=false"] if self._keeps_kv(given) else []
        words += [f"leave {SLEEP} out"] if given.rollout.sleep == "never" else []
        return [" and ".join(words)] if words else []

    def _remedies_of_update(self, config: Config, given: Config, engine: EngineMemory) -> list[str]:
        """Return what would lower the peak of an update."""
        remedies = self._remedy_of_sleep(given) if given.rollout.keep_kv else self._words_of_turns(given)
        longest = longest_sequence(config)
        if given.actor.recompute == "none" and not self.choose(with_values(given, {RECOMPUTE: "head"})).problem:
            remedies.append(f"set {RECOMPUTE}=head")
        if {given.actor.offload, given.actor.recompute} != {"auto"}:
            remedies.append("leave actor.offload and actor.recompute out")
        limits = {TOKENS: given.actor.max_tokens_per_micro_batch}
        if config.algo.has_critic:
            limits["critic.max_tokens_per_micro_batch"] = given.critic.max_tokens_per_micro_batch
        lower = [name for name, limit in limits.items() if self._peaks.num_tokens(config, limit) > longest]
        if not lower and self._peaks.of_learner(config, engine, has_activations=False)[UPDATE] <= self._card.usable:
            lower = ["environment.max_conversation_tokens" if config.environment.is_set else "rollout.max_new_tokens"]
        return [*remedies, *(f"lower {name}" for name in lower)]


def _either(*remedies: str) -> str:
    return ", or ".join(filter(None, [", ".join(remedies[:-1]), remedies[-1]]))


def _count(number: float) -> str:
    return f"{number:,.0f}" if math.isfinite(number) else "any number"


def _candidates(config: Config) -> Iterator[Config]:
    """Yield the config with each choice that it leaves open, the cheapest first."""
    offload, recompute = config.actor.offload, config.actor.recompute
    recomputes = ["head", "selective", "full"] if recompute == "auto" else [recompute]
    for offloads in (["none", "moments", "rollout"], ["always"]) if offload == "auto" else ([offload],):
        for layers in recomputes:
            for where in offloads:
                yield with_values(config, {OFFLOAD: where, RECOMPUTE: layers})
