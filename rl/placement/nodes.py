"""The nodes of a world: which ranks each of them hosts, and its stated share of rollout work.

torchrun numbers the ranks node by node. Nodes may have different numbers of ranks.
"""

import itertools
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rl.common.text import count_of
from rl.config.schema import ConfigError


@dataclass(frozen=True)
class Nodes:
    """The number of ranks on each node. Each node has consecutive ranks."""

    sizes: tuple[int, ...]

    @staticmethod
    def of(num_nodes: int, num_ranks_per_node: int | Sequence[int]) -> "Nodes":
        if isinstance(num_ranks_per_node, int):
            return Nodes((num_ranks_per_node,) * num_nodes)
        assert len(num_ranks_per_node) == num_nodes, "one number per node"
        return Nodes(tuple(num_ranks_per_node))

    @staticmethod
    def from_local_ranks(local_ranks: Sequence[int]) -> "Nodes":
        """Return the nodes of a world, from the place of each rank on its node."""
        leads = [rank for rank, local in enumerate(local_ranks) if local == 0]
        sizes = tuple(end - lead for lead, end in itertools.pairwise([*leads, len(local_ranks)]))
        if [*local_ranks] != [local for size in sizes for local in range(size)]:
            raise ConfigError(
                f"got the local ranks {', '.join(map(str, local_ranks))} for ranks 0 to {len(local_ranks) - 1}; the "
                "ranks of a node must be consecutive, in the order of their local ranks, as torchrun starts them"
            )
        return Nodes(sizes)

    @property
    def num_nodes(self) -> int:
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        return sum(self.sizes)

    @property
    def are_equal(self) -> bool:
        return len({*self.sizes}) == 1

    @property
    def size(self) -> int:
        """The number of ranks on every node."""
        assert self.are_equal, self.sizes
        return self.sizes[0]

    @cached_property
    def leads(self) -> list[int]:
        """The first rank of each node."""
        return [0, *itertools.accumulate(self.sizes[:-1])]

    @cached_property
    def numbers(self) -> list[int]:
        """The node of each rank."""
        return [node for node, size in enumerate(self.sizes) for _ in range(size)]

    def node_of(self, rank: int) -> int:
        return bisect(self.leads, rank) - 1

    def lead_of(self, rank: int) -> int:
        return self.leads[self.node_of(rank)]

    def ranks_of(self, node: int) -> range:
        return range(self.leads[node], self.leads[node] + self.sizes[node])

    def describe(self) -> str:
        """Return the number of nodes and, if they differ, their sizes: 2 nodes (8 and 4 ranks)."""
        sizes = "" if self.are_equal else f" ({self.describe_sizes()})"
        return f"{count_of(self.num_nodes, 'node')}{sizes}"

    def describe_sizes(self) -> str:
        """Return the number of ranks per node: 8 ranks; 8, 8 and 4 ranks."""
        if self.are_equal:
            return count_of(self.size, "rank")
        *first, last = map(str, self.sizes)
        return f"{', '.join(first)} and {last} ranks"


def parse_weights(value: Any, nodes: Nodes) -> tuple[float, ...] | None:
    """Return placement.rank_weights as one positive number per node. Return None for auto, the default."""
    if value is None or value == "auto":
        return None
    parts = value if isinstance(value, list) else str(value).split(",")
    example = ",".join(["2", *["1"] * (nodes.num_nodes - 1)])
    forms = f"write one positive number per node, such as placement.rank_weights={example}, or auto"
    got = ",".join(str(part).strip() for part in parts)
    try:
        weights = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        raise ConfigError(f"placement.rank_weights: got {got!r}, which is not a list of numbers; {forms}") from None
    if len(weights) != nodes.num_nodes:
        raise ConfigError(
            f"placement.rank_weights: got {count_of(len(weights), 'number')} ({got}), but the world has "
            f"{count_of(nodes.num_nodes, 'node')}; {forms}"
        )
    wrong = [node for node, weight in enumerate(weights) if not 0 < weight < float("inf")]
    if wrong:
        raise ConfigError(
            f"placement.rank_weights: got {str(parts[wrong[0]]).strip()} for node {wrong[0]}; every weight must be a "
            "number above 0. To let a node do no rollout work, give its ranks no rollout role"
        )
    return weights
