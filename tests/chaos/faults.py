"""Faults that a running cluster survives: what is done to it, who must be named for it, what is repaired."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from rl.watch.board import CUT_S
from tests.chaos.harness import FLOOR_S, Cluster, Report

NAMED_S = 5.0  # after the deadline of silence, where there is one
ALSO_GONE = r"(\n  .*)*\n  also gone: ranks? "  # in the same report


@dataclass(frozen=True)
class Fault:
    name: str
    do: Callable[[Cluster], list[Report]]  # causes it, and returns what must be reported
    mend: Callable[[Cluster], None] | None = None  # brings back what training needs to go on
    deadline_s: float = 0.0  # silence after which a rank is named
    needs_loop: bool = False  # torchrun alone does not survive it, outer loops around it do
    is_of_head: bool = False  # nothing can go on without the head

    def happen(self, world: Cluster) -> float:
        """Cause the fault, and return the seconds from the deadline until it is reported. The cluster asserts before
        its next fault and at its end that nothing else was reported."""
        world.assert_reported()
        reports = self.do(world)
        world.expect(*reports)
        started = time.monotonic()
        world.wait_until(f"{reports}", lambda: all(map(world.reported, reports)), self.deadline_s + NAMED_S)
        return max(0.0, time.monotonic() - started - self.deadline_s)


def _place(world: Cluster, *ranks: int) -> str:
    """Return a pattern of how a report begins that names one of the ranks."""
    rows = world.status()
    places = [rf"oneworld: rank {rank} \({rows[rank]['roles']}\) on {rows[rank]['host']}, " for rank in ranks]
    return rf"({'|'.join(places)})stage \w+, step \d+: "


def kill(role: str) -> Fault:
    def do(world: Cluster) -> list[Report]:
        rank = 0 if role == "rank 0" else world.rank_of(role)
        place = _place(world, rank)
        world.signal(rank, signal.SIGKILL)
        return [(None, rf"{place}its process was killed by signal 9 \(SIGKILL\)")]

    return Fault(f"killed {role}", do)


def stop(rank: int) -> Fault:
    def do(world: Cluster) -> list[Report]:
        place = _place(world, rank)
        world.signal(rank, signal.SIGSTOP)
        return [(None, f"{place}its process was stopped by a signal; silent for ")]

    return Fault(f"stopped rank {rank}", do, deadline_s=FLOOR_S)


def kill_agent(node: int) -> Fault:
    """Kill torchrun on a node; its ranks end with it."""

    def do(world: Cluster) -> list[Report]:
        place = _place(world, *world.ranks_on(node))
        world.kill_agent(node)
        return [(None, f"{place}its process ended with torchrun on its node{ALSO_GONE}")]

    return Fault("killed agent", do, needs_loop=True)


def kill_node(node: int) -> Fault:
    def do(world: Cluster) -> list[Report]:
        place = _place(world, *world.ranks_on(node))
        world.kill_node(node)
        return [(None, f"{place}its process .*{ALSO_GONE}")]

    return Fault("killed node", do, lambda world: world.start(node), needs_loop=True)


def kill_head() -> Fault:
    """Kill the first node. Rendezvous and board are gone, and each other node reports it."""

    def do(world: Cluster) -> list[Report]:
        world.kill_node(0)
        return [(node, "oneworld: rank 0 is gone: ") for node in range(1, len(world.nodes))]

    return Fault("killed head", do, lambda world: world.start(0), needs_loop=True, is_of_head=True)


def pull_cable(node: int) -> Fault:
    """Cut a node off; both sides report it."""

    def do(world: Cluster) -> list[Report]:
        place = _place(world, *world.ranks_on(node))
        world.nodes[node].cut_off()
        return [(0, f"{place}no word from its host for "), (node, "oneworld: rank 0 has not been heard of for ")]

    return Fault("pulled cable", do, lambda world: world.nodes[node].connect(), deadline_s=CUT_S, needs_loop=True)


def lose_node(node: int) -> Fault:
    """Lose a node for good, as when its power fails: no connection is closed."""

    def do(world: Cluster) -> list[Report]:
        place = _place(world, *world.ranks_on(node))
        world.nodes[node].cut_off()
        world.kill_node(node)
        return [(None, f"{place}no word from its host for ")]

    return Fault("lost node", do, deadline_s=CUT_S)


KILLS = [kill("rollout"), kill("inference"), kill("actor"), kill("rank 0")]
FAULTS = [*KILLS, stop(0), stop(5), kill_agent(2), kill_node(1), kill_head(), pull_cable(2)]
