"""Run the checks from rank 0: ask all ranks, and turn their answers into the rows of the table."""

import itertools
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from launch.checks import rules
from launch.checks.bandwidth import Link, pair_rounds, slow_links
from launch.checks.memory import check_placement
from launch.checks.results import FAILED, OK, WARNING, CheckResult
from launch.checks.rpc import Coordinator, NoAnswer
from rl.common.text import count_of
from rl.config.schema import Config, ConfigError, Phase
from rl.model.memory import num_kept
from rl.placement.nodes import Nodes

DESCRIBE_S = 25.0  # ranks with GPUs import torch before they answer
REMOVE_S = 1.0
TCP_FLOOR = 0.3e9  # bytes per second; links above it are fast enough, even if others are much faster
NO_FLOOR = float("inf")
LEAST = 0.1e9  # bytes per second between nodes; a little less than one gigabit per second
SEND_S, MIN_SEND_S, ALL_SENDS_S = 0.2, 0.05, 4.0
NUM_REPEATS = 3


class ClusterCheck:
    """All checks of a cluster, as rank 0 runs them. `all_alive` is False if a rank died or hung in the last check."""

    def __init__(self, coordinator: Coordinator, config: Config, saves: bool, trains: bool, phase: Phase = "both"):
        self._coordinator, self._ask = coordinator, coordinator.ask
        self._config, self._saves, self._trains, self._phase = config, saves, trains, phase
        self._ranks = range(coordinator.num_ranks)
        self._world = Nodes((coordinator.num_ranks,))  # until the ranks have said which of them are first on a node
        self.all_alive = True

    @property
    def num_nodes(self) -> int:
        return self._world.num_nodes

    @property
    def _firsts(self) -> list[int]:
        return self._world.leads

    def run(self) -> list[CheckResult]:
        facts = self._ask("describe", {rank: {} for rank in self._ranks}, DESCRIBE_S)
        for fact in facts.values():
            if fact["config_error"]:
                raise ConfigError(f"{fact['host']}: {fact['config_error']}")
        firsts = [rank for rank in self._ranks if "node" in facts[rank]]
        self._world = Nodes(tuple(end - first for first, end in itertools.pairwise([*firsts, len(self._ranks)])))
        self._nodes = [facts[first]["node"] for first in self._firsts]
        numbers = [node["number"] for node in self._nodes]
        if None in numbers or len({*numbers}) < len(numbers):
            numbers = [*range(self.num_nodes)]
        hosts = [facts[first]["host"] for first in self._firsts]
        self._names = [f"node {number} ({host})" for number, host in zip(numbers, hosts)]
        self._rank_names = [f"rank {rank} ({facts[rank]['host']})" for rank in self._ranks]
        self._sinks = {rank: facts[rank]["sink"] for rank in self._ranks}
        gpus = [facts[rank]["gpu"] for rank in self._ranks]
        has_gpus, share_gpu = all("total" in gpu for gpu in gpus), self._config.debug.share_gpu
        placement, memory, disk = check_placement(
            self._config, self.num_nodes, self._world.sizes, gpus, self._trains, self._phase
        )
        each = f"{self._world.describe_sizes()}{' each' if self._world.are_equal else ''}"
        size = f"{count_of(self.num_nodes, 'node')} with {each}"
        results = [CheckResult("nodes", OK, size), rules.check_versions(self._nodes, self._names)]
        users = [node["gpu_users"] for node in self._nodes]
        results.append(rules.check_gpus(gpus, self._world, share_gpu, users, self._names))
        results += self._check_network() if self.num_nodes > 1 else []
        results += self._check_port()
        results += [self._check_loopback()] if max(self._world.sizes) > 1 else []
        results.append(self._check_folder(disk if self._saves else []))
        results += [rules.check_memory(self._nodes, memory, has_gpus, self._names), placement]
        if has_gpus and not share_gpu and len(gpus) > 1:
            results += self._check_nccl()  # last, because a rank that hangs in it answers no more questions
        return results

    def _check_network(self) -> list[CheckResult]:
        node_of, firsts, addresses = self._world.node_of, self._firsts, self._coordinator.addresses()
        places = {str(first): (addresses[first], self._sinks[first]) for first in firsts}
        questions = {a: {"places": {b: place for b, place in places.items() if b != str(a)}} for a in firsts}
        answers = self._ask("find_unreachable", questions)
        failed = [(a, b, found[b]) for a, found in answers.items() for b in places if b in found]
        errors = {(node_of(a), node_of(int(b))): why for a, b, why in failed}
        results = [rules.check_clocks(self._clock_offsets(), self._names), rules.check_reach(errors, self._names)]
        schedule = []
        for pairs in pair_rounds(self.num_nodes):
            schedule.append([(firsts[a], firsts[b]) for a, b in pairs if not {(a, b), (b, a)} & errors.keys()])
        rates = {(node_of(a), node_of(b)): rate for (a, b), rate in self._measure(schedule, addresses).items()}
        if rates:
            results.append(rules.check_rates("between nodes", rates, TCP_FLOOR, self._names, least=LEAST))
        return results

    def _check_loopback(self) -> CheckResult:
        """Measure between the first two ranks of each node: all of its ranks use the same loopback."""
        schedule = [[(first, first + 1) for first, size in zip(self._firsts, self._world.sizes) if size > 1]]
        rates = self._measure(schedule, dict.fromkeys(self._ranks, "127.0.0.1"))
        return rules.check_rates("inside nodes", rates, TCP_FLOOR, self._rank_names)

    def _measure(self, schedule: Sequence[Sequence[Link]], addresses: Mapping[int, str]) -> dict[Link, float]:
        """Measure each link in both directions. A slow one is measured again, alone, and its best rate counts."""
        seconds = min(SEND_S, max(MIN_SEND_S, ALL_SENDS_S / (2 * len(schedule))))

        def send(links: Sequence[Link]) -> dict[Link, float]:
            questions = {a: {"address": addresses[b], "port": self._sinks[b], "seconds": seconds} for a, b in links}
            answers = self._ask("measure_rate", questions)
            return {(a, b): answers[a] for a, b in links}

        rates: dict[Link, float] = {}
        for pairs in schedule:
            rates |= send(pairs)
            rates |= send([(b, a) for a, b in pairs])
        for _ in range(NUM_REPEATS):
            for link in slow_links(rates, TCP_FLOOR):
                rates[link] = max(rates[link], send([link])[link])
        return rates

    def _clock_offsets(self) -> list[float]:
        """Return by how many seconds each node's clock is ahead of rank 0's, from the quickest of three round trips."""
        offsets = []
        for first in self._firsts:
            trips = []
            for _ in range(3):
                sent, begun = time.time(), time.perf_counter()
                there = self._ask("read_clock", {first: {}})[first]
                took = time.perf_counter() - begun
                trips.append((took, there - sent - took / 2))  # as if read in the middle of the trip
            offsets.append(min(trips)[1])
        return offsets

    def _check_port(self) -> list[CheckResult]:
        head = next((number for number, node in enumerate(self._nodes) if node["is_head"]), 0)
        first, address, port = self._firsts[head], self._nodes[head]["head"], self._nodes[head]["port"]
        if not port:  # without a launcher, torchrun has already met at the port that training uses
            return []
        held_by = self._ask("hold_port", {first: {"port": port}})[first]
        others = [other for other in self._firsts if other != first and not held_by]
        answers = self._ask("find_unreachable", {other: {"places": {"head": (address, port)}} for other in others})
        errors = {self._world.node_of(other): found["head"] for other, found in answers.items() if "head" in found}
        return [rules.check_port(port, held_by, errors, self._names[head], self._names)]

    def _check_nccl(self) -> list[CheckResult]:
        """Measure the rates of GPUs with the same local rank on different nodes, then of GPUs on the same node."""
        world, names = self._world, self._rank_names
        members = [world.ranks_of(node) for node in range(world.num_nodes)]
        schedule = []
        for pairs in pair_rounds(world.num_nodes):
            schedule.append([link for a, b in pairs for link in zip(members[a], members[b])])
        for pairs in pair_rounds(max(world.sizes)):
            schedule.append([(ranks[a], ranks[b]) for ranks in members for a, b in pairs if b < len(ranks)])
        partners = [dict(pairs) | {b: a for a, b in pairs} for pairs in schedule]
        with socket.create_server(("", 0)) as server:
            store = (self._coordinator.addresses()[0], server.getsockname()[1])
        shared = {"size": len(self._ranks), "store": store}
        questions = {rank: shared | {"partners": [pairs.get(rank) for pairs in partners]} for rank in self._ranks}
        try:
            answers = self._ask("measure_gpus", questions, DESCRIBE_S)
        except NoAnswer as error:
            self.all_alive = False
            return [CheckResult("GPUs over NCCL", FAILED, f"{error}; NCCL_DEBUG=INFO says more")]
        rates: dict[Link, float] = {}
        for rank, found in answers.items():
            rates |= {(rank, pairs[rank]): rate for pairs, rate in zip(partners, found) if rate is not None}
        inside = {link: rate for link, rate in rates.items() if world.node_of(link[0]) == world.node_of(link[1])}
        between = {link: rate for link, rate in rates.items() if link not in inside}
        # Inside a node a pair may be slower because of how its slots are wired.
        kinds = [("GPUs between nodes", between, FAILED, LEAST), ("GPUs inside nodes", inside, WARNING, 0.0)]
        return [rules.check_rates(name, part, NO_FLOOR, names, state, low) for name, part, state, low in kinds if part]

    def _check_folder(self, checkpoint: list[int]) -> CheckResult:
        """Let each node write a marker file into run.dir. Nodes that see each other's markers share a disk."""
        word = secrets.token_hex(6)
        markers = [f".preflight-{word}-{node}" for node in range(self.num_nodes)]
        paths = {rank: node["folder"] for rank, node in zip(self._firsts, self._nodes)}
        own = {rank: {"folder": path, "marker": marker} for (rank, path), marker in zip(paths.items(), markers)}
        try:
            written = self._ask("write_marker", own)
            seen = self._ask("find_markers", {r: {"folder": path, "markers": markers} for r, path in paths.items()})
        finally:
            for rank, place in own.items():  # one by one: a rank that hangs or is gone must not stop the others
                with suppress(NoAnswer):
                    self._ask("remove_marker", {rank: place}, REMOVE_S)
        visible = [[node for node, marker in enumerate(markers) if marker in seen[rank]] for rank in self._firsts]
        groups = rules.group_by_disk(visible)
        folders = [written[rank] | {"path": path} for rank, path in paths.items()]
        copies = self._config.checkpoint.copies if len(groups) > 1 else 1
        sizes = [copies * size for size in checkpoint]
        return rules.check_folder(folders, groups, sizes, num_kept(self._config), self._names)
