"""Parse the `placement` section of a config into the roles of every rank and the engines that they host.

docs/placement.md describes the grammar. An entry such as `actor,rollout: 0-7` gives ranks to one or more roles, either
absolutely (all, 0-3,8) or for any size of the world (4 ranks, 25%). Each rank belongs to exactly one entry.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.common.text import count_of, format_ranges, format_ranks
from rl.config.schema import PLACEMENT_SETTINGS, PLACEMENT_SIZES, ConfigError, Phase
from rl.placement.nodes import Nodes, parse_weights

ROLES = ("rollout", "inference", "actor")
IDLE = ("idle",)  # the roles of a rank that has nothing to do in a phase
PHASE_ROLES: dict[Phase, tuple[str, ...]] = {"both": ROLES, "rollout": ("rollout",), "update": ("inference", "actor")}
NEEDED_ROLES: dict[Phase, list[str]] = {"both": ["actor", "rollout"], "rollout": ["rollout"], "update": ["actor"]}
Entry = tuple[str, str]  # roles in the order of ROLES, joined by commas, and the text that gives their ranks


@dataclass(frozen=True)
class Placement:
    """The roles of every rank. An engine is the tuple of its ranks, and the first of them is its lead."""

    nodes: Nodes
    roles: tuple[tuple[str, ...], ...]
    engines: tuple[tuple[int, ...], ...]
    num_replicas: int = 1  # copies of the policy; each is sharded over consecutive actors
    rank_weights: tuple[float, ...] | None = None  # shares of rollout work by node; None: by measured speed

    @property
    def world_size(self) -> int:
        return len(self.roles)

    def ranks(self, role: str) -> list[int]:
        return [rank for rank, roles in enumerate(self.roles) if role in roles]

    @property
    def actors(self) -> list[int]:
        """The ranks that drive the run and send the weights. In the phase rollout, which has no actors, it is the lead
        of the first engine."""
        return self.ranks("actor") or list(self.engines[0][:1])

    @property
    def scorers(self) -> list[int]:
        """The ranks that hold a copy of the policy to compute logprobs. Empty if the actors compute them."""
        inference = self.ranks("inference")
        return [] if inference == self.actors else inference

    @property
    def leader(self) -> int:
        """The first actor, which reads the prompt stream and writes the metrics."""
        return self.actors[0]

    @property
    def replicas(self) -> list[list[int]]:
        """The actors of each replica. The i-th actor of a replica holds the i-th shard."""
        size = len(self.actors) // self.num_replicas
        return [self.actors[start : start + size] for start in range(0, len(self.actors), size)]

    @property
    def owners(self) -> list[int]:
        """The actor that sends each shard. All replicas hold the shard, and they share the work of sending."""
        shards = len(self.replicas[0])
        return [self.replicas[shard % self.num_replicas][shard] for shard in range(shards)]

    def shard_of(self, actor: int) -> int:
        """Return the number of the shard that this actor holds."""
        return self.actors.index(actor) % len(self.replicas[0])

    @property
    def num_nodes(self) -> int:
        return self.nodes.num_nodes

    @property
    def node_leads(self) -> list[int]:
        """The first rank of each node, which handles the node's disk for the other ranks."""
        return self.nodes.leads

    @property
    def engine_shares(self) -> dict[int, float] | None:
        """The stated share of rollout work of each engine, by its lead. The engines of a node share its weight.
        None: shares follow from measured speeds."""
        if self.rank_weights is None:
            return None
        hosts = [self.nodes.node_of(ranks[0]) for ranks in self.engines]
        weights = [self.rank_weights[node] / hosts.count(node) for node in hosts]
        return {ranks[0]: weight / sum(weights) for ranks, weight in zip(self.engines, weights)}

    @property
    def receivers(self) -> list[int]:
        """The ranks that receive every version of the weights, for an engine or for logprobs."""
        return sorted({*self.ranks("rollout"), *self.scorers})

    def sync_ranks(self, owner: int) -> list[int]:
        """Return the ranks that take part when this owner sends its slices."""
        return sorted({owner, *self.receivers})

    def engine_of(self, rank: int) -> int | None:
        return next((index for index, ranks in enumerate(self.engines) if rank in ranks), None)

    def summary(self) -> str:
        parts = [f"{role} {format_ranges(self.ranks(role))}" for role in ROLES if self.ranks(role)]
        world = f"{count_of(self.world_size, 'rank')} on {self.nodes.describe()}"
        return f"{world}: {', '.join(parts)}; {count_of(len(self.engines), 'engine')}"

    def table(self) -> str:
        rows = [("rank", "node", "roles", "engine")]
        for rank, roles in enumerate(self.roles):
            engine = self.engine_of(rank)
            place = str(rank), str(self.nodes.node_of(rank)), ",".join(roles)
            rows.append((*place, "-" if engine is None else str(engine)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def plan(
    spec: dict[str, Any],
    num_nodes: int,
    num_ranks_per_node: int | Sequence[int],  # the same on every node, or one number per node
    tensor_parallel_size: int = 1,
    num_replicas: int = 1,
    phase: Phase = "both",
) -> Placement:
    """Turn the placement section into the roles of every rank. A ConfigError contains a corrected example.

    In a phase, ranks keep only the roles that it needs. A rank that is left without a role is idle.
    """
    nodes = Nodes.of(num_nodes, num_ranks_per_node)
    _check_sizes(spec, nodes)
    entries = [
        (_parse_roles(name), ",".join(map(str, value)) if isinstance(value, list) else str(value).strip())
        for name, value in spec.items()
        if name not in PLACEMENT_SETTINGS
    ]
    if not entries:
        raise ConfigError("placement names no role; for example {'actor,rollout': all}")
    assigned = _assign(entries, nodes.num_ranks, tensor_parallel_size)
    roles = _roles_by_rank(entries, assigned, nodes.num_ranks)
    roles = tuple(tuple(role for role in own if role in PHASE_ROLES[phase]) or IDLE for own in roles)
    rollout = [rank for rank, own in enumerate(roles) if "rollout" in own]
    engines = _group_engines(rollout, nodes, tensor_parallel_size)
    num_replicas = 1 if phase == "rollout" else num_replicas
    placement = Placement(nodes, roles, engines, num_replicas, parse_weights(spec.get("rank_weights"), nodes))
    _check_roles(placement, tensor_parallel_size, phase)
    return placement


def _check_sizes(spec: dict[str, Any], nodes: Nodes) -> None:
    """Compare the sizes that the config states, if any, with those of the world."""
    sizes = [*nodes.sizes]
    real: dict[str, Any] = {"num_nodes": nodes.num_nodes, "num_gpus_per_node": nodes.size if nodes.are_equal else sizes}
    stated = {name: spec[name] if spec.get(name) is not None else real[name] for name in PLACEMENT_SIZES}
    for name in PLACEMENT_SIZES:
        if stated[name] in (real[name], sizes):
            continue
        num_nodes, each = stated.values()
        start = f"{num_nodes} x {each} = {num_nodes * each}"
        if isinstance(each, list):
            start = f"{' + '.join(map(str, each))} = {sum(each)}"
        said, got = (str(value).strip("[]").replace(" ", "") for value in (stated[name], real[name]))
        raise ConfigError(
            f"placement.{name}: the config says {said}, but the world that torchrun started has {got}; "
            f"start {start} ranks as the config says, or set placement.{name}={got}"
        )


def _parse_roles(name: str) -> str:
    roles = [part.strip() for part in name.split(",")]
    for role in roles:
        if role not in ROLES:
            raise ConfigError(
                f"placement: got the role {role!r} in {name!r}; roles are {', '.join(ROLES)}, for example "
                "'actor,rollout: all'"
            )
    if len(set(roles)) < len(roles):
        unique = ",".join(dict.fromkeys(roles))
        raise ConfigError(f"placement: got {name!r}, which names a role twice; write {unique!r}")
    return ",".join(role for role in ROLES if role in roles)


def _assign(entries: list[Entry], world_size: int, tp: int) -> list[list[int]]:
    """Return the ranks of each entry, in the order of the entries."""
    sizes = [_parse_size(name, text, world_size) for name, text in entries]
    rests = [name for name, text in entries if text == "rest"]
    if len(rests) > 1:
        example = "{'rollout': '75%', 'actor': 'rest'}"
        raise ConfigError(f"placement: 'rest' is written twice; only one entry can take it, for example {example}")
    if any(size is not None for size in sizes):
        absolute = [text for (_, text), size in zip(entries, sizes) if size is None and text != "rest"]
        if absolute:
            raise ConfigError(
                f"placement: got the ranks {absolute[0]!r} and also counts or shares; write all entries the same "
                "way, for example {'rollout': '75%', 'actor': 'rest'} or {'rollout': '0-2', 'actor': '3'}"
            )
        return _assign_sizes(entries, sizes, world_size, tp)
    ranks = [[] if text == "rest" else _parse_ranks(name, text, world_size) for name, text in entries]
    left = sorted(set(range(world_size)).difference(*ranks))
    if rests and not left:
        raise ConfigError(
            f"placement.{rests[0]}: got 'rest', but the other entries take all of {count_of(world_size, 'rank')}; an "
            "entry needs at least one rank: take ranks from another entry, or remove this one"
        )
    return [part or left for part in ranks]


def _parse_size(name: str, text: str, world_size: int) -> float | None:
    """Return a count or a share as a number of ranks, not yet rounded. Return None for every other form."""
    match = re.fullmatch("(.*?)(%|ranks?)", text)
    if match is None:
        return None
    try:
        value = float(match[1])
    except ValueError:
        raise ConfigError(f"placement.{name}: got {text!r}; a count is '4 ranks', a share '25%'") from None
    is_share = match[2] == "%"
    if not 0 < value <= (100 if is_share else world_size) or not (is_share or value.is_integer()):
        raise ConfigError(
            f"placement.{name}: got {text!r} in a world of {count_of(world_size, 'rank')}; a count is a whole "
            f"number from 1 to {world_size}, a share lies above 0% and up to 100%"
        )
    return value * world_size / 100 if is_share else value


def _assign_sizes(entries: list[Entry], sizes: list[float | None], world_size: int, tp: int) -> list[list[int]]:
    """Return consecutive ranks for each entry. Counts are exact. Shares are rounded to whole engines, and the error is
    carried over to the next share. Shares shrink if another entry would get no rank."""
    units = [tp if "rollout" in name else 1 for name, _ in entries]
    shares = [index for index, (_, text) in enumerate(entries) if text.endswith("%")]
    counts = [unit if size is None else round(size) for unit, size in zip(units, sizes)]
    owed = 0.0
    for index in shares:
        owed += sizes[index] or 0.0
        counts[index] = max(units[index], round(owed / units[index]) * units[index])
        owed -= counts[index]
    if sum(size or 0.0 for size in sizes) <= world_size:  # otherwise the error below shows the sizes of the config
        while sum(counts) > world_size and (wide := [index for index in shares if counts[index] > units[index]]):
            largest = max(wide, key=lambda index: counts[index])
            counts[largest] -= units[largest]
    if None in sizes:
        counts[sizes.index(None)] += world_size - sum(counts)
    if sum(counts) != world_size or min(counts) < 1:
        got = ", ".join(f"{name}: {text} = {count}" for (name, text), count in zip(entries, counts))
        raise ConfigError(
            f"placement: got {got} ranks, which is {sum(counts)} of {world_size}; counts and shares must give each "
            "entry at least one rank and cover the world: write 'rest' beside one of them"
        )
    ends = itertools.accumulate(counts)
    return [list(range(end - count, end)) for end, count in zip(ends, counts)]


def _parse_ranks(name: str, text: str, world_size: int) -> list[int]:
    if text == "all":
        return list(range(world_size))
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"placement.{name}: got {text!r}; write ranks as 0-3,8, or all, rest, '4 ranks', '25%'")
        low, high = int(first), int(last or first)
        if low > high:
            raise ConfigError(f"placement.{name}: got {part.strip()!r}, which runs backwards; write {high}-{low}")
        if high >= world_size:
            last_rank = world_size - 1
            raise ConfigError(
                f"placement.{name}: got rank {high} in a world of {count_of(world_size, 'rank')}, 0 to {last_rank}; "
                f"write for example {min(low, last_rank)}-{last_rank}, or a share such as '25%'"
            )
        ranks.extend(range(low, high + 1))
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        once = format_ranges(set(ranks))
        raise ConfigError(f"placement.{name}: got {text!r}, which names {format_ranks(twice)} twice; write {once}")
    return ranks


def _roles_by_rank(entries: list[Entry], assigned: list[list[int]], world_size: int) -> tuple[tuple[str, ...], ...]:
    names = [""] * world_size
    for (name, _), ranks in zip(entries, assigned):
        shared = [rank for rank in ranks if names[rank]]
        if shared:
            other = names[shared[0]]
            both = ",".join(role for role in ROLES if role in f"{name},{other}")
            raise ConfigError(
                f"placement: {format_ranks(shared)} {'is' if len(shared) == 1 else 'are'} in the entry {other!r} and "
                f"in the entry {name!r}; a rank belongs to one entry. To give it both roles, write {both!r}: "
                f"{format_ranges(shared)}, and take it out of the other entries"
            )
        for rank in ranks:
            names[rank] = name
    missing = [rank for rank, name in enumerate(names) if not name]
    if missing:
        raise ConfigError(
            f"placement: {format_ranks(missing)} of {count_of(world_size, 'rank')} "
            f"{'has' if len(missing) == 1 else 'have'} no role; every rank needs one: extend an entry, for example "
            f"{entries[-1][0]}: {format_ranges(assigned[-1] + missing)}, or start fewer ranks"
        )
    return tuple(tuple(name.split(",")) for name in names)


def _group_engines(rollout: list[int], nodes: Nodes, tp: int) -> tuple[tuple[int, ...], ...]:
    if len(rollout) % tp:
        raise ConfigError(
            f"rollout.tensor_parallel_size: got {tp}, but the rollout role has {count_of(len(rollout), 'rank')} "
            f"({format_ranks(rollout)}); their number must be a multiple of it: give the role "
            f"{count_of(max(tp, len(rollout) // tp * tp), 'rank')}, or set rollout.tensor_parallel_size=1"
        )
    engines = tuple(tuple(rollout[start : start + tp]) for start in range(0, len(rollout), tp))
    for ranks in engines:
        one_node = nodes.node_of(ranks[0]) == nodes.node_of(ranks[-1])
        if ranks[-1] - ranks[0] != tp - 1 or not one_node:
            why = "not consecutive" if one_node else f"on different nodes of {nodes.describe_sizes()}"
            raise ConfigError(
                f"rollout.tensor_parallel_size: got {tp}, but ranks {', '.join(map(str, ranks))} of one engine are "
                f"{why}; an engine's ranks must be consecutive ranks of one node: {_remedy(ranks[0], nodes, tp)}"
            )
    return engines


def _remedy(rank: int, nodes: Nodes, tp: int) -> str:
    """Return how to change ranges or engines if the engine that begins at this rank is not on one node."""
    if tp > max(nodes.sizes):
        return f"set for example rollout.tensor_parallel_size={max(nodes.sizes)}"
    if nodes.are_equal:
        start = nodes.lead_of(rank)
        return f"start the rollout range at a multiple of {tp}, for example rollout: {start}-{start + tp - 1}"
    whole = [range(lead, lead + size // tp * tp) for lead, size in zip(nodes.leads, nodes.sizes)]
    fitting = format_ranges(rank for ranks in whole for rank in ranks)
    return f"leave out the ranks of a node that do not fill an engine, for example rollout: {fitting}"


def _check_roles(placement: Placement, tp: int, phase: Phase) -> None:
    for role in NEEDED_ROLES[phase]:
        if not placement.ranks(role):
            needs = "" if phase == "both" else f", which the phase {phase} needs"
            raise ConfigError(
                f"placement: no rank has the role {role!r}{needs}; for example {{'rollout': '75%', 'actor': 'rest'}} "
                "or {'actor,rollout': 'all'}"
            )
    num_actors = len(placement.actors)
    if num_actors % placement.num_replicas:
        divisors = [str(n) for n in range(1, num_actors + 1) if num_actors % n == 0]
        raise ConfigError(
            f"actor.num_replicas: got {placement.num_replicas}, but the actor role has {count_of(num_actors, 'rank')} "
            f"({format_ranks(placement.actors)}), which must divide into replicas of equal size: choose one of "
            f"{', '.join(divisors)}"
        )
    for ranks in placement.engines:
        if len({placement.roles[rank] for rank in ranks}) > 1:
            got = "; ".join(f"rank {rank} is {','.join(placement.roles[rank])}" for rank in ranks)
            raise ConfigError(
                f"placement: the ranks of one engine have different roles: {got}; with rollout.tensor_parallel_size="
                f"{tp} each {tp} rollout ranks in a row need the same roles: move the boundary of the ranges to a "
                f"multiple of {tp}"
            )
    shared = set(placement.scorers) & set(placement.actors)
    if shared:
        raise ConfigError(
            f"placement: {format_ranks([*shared])} {'is' if len(shared) == 1 else 'are'} actor and inference, but "
            "other ranks have only one of these roles. Separate the roles, for example {'actor,rollout': '0-2', "
            "'inference': '3'}, or leave out inference: then the actors compute logprobs themselves"
        )
    if tp > 1 and set(placement.scorers) & set(placement.ranks("rollout")):
        raise ConfigError(
            "placement: ranks that are inference and rollout need rollout.tensor_parallel_size=1; otherwise the two "
            "kinds of collectives could wait for each other. Set it, or use separate inference ranks, for example "
            "{'rollout': '50%', 'inference': '25%', 'actor': 'rest'}"
        )
