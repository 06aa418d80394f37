"""Run the checks from rank 0: ask all ranks, and turn their answers into the rows of the table."""

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from launch.checks import rules
from launch.checks.bandwidth import Link, pair_rounds, slow_links
from launch.checks.placement import MemoryPlan, check_placement
from launch.checks.results import FAILED, OK, WARNING, CheckResult, Names
from launch.checks.rpc import Coordinator, NoAnswer
from rl.common.text import count_of
from rl.config.schema import Config, ConfigError

DESCRIBE_S = 25.0  # ranks with GPUs import torch before they answer
ANSWER_S = 8.0
REMOVE_S = 1.0
TCP_FLOOR = 0.3e9  # bytes per second; links above it are fast enough, even if others are much faster
NO_FLOOR = float("inf")
LEAST = 0.1e9  # bytes per second between nodes; a little less than one gigabit per second
SEND_S, MIN_SEND_S, ALL_SENDS_S = 0.2, 0.05, 4.0
NUM_REPEATS = 3


class ClusterCheck:
    """All checks of a cluster, as rank 0 runs them. `all_alive` is False if a rank died or hung in the last check."""

    def __init__(
        self, coordinator: Coordinator, num_ranks: int, num_local: int, config: Config, saves: bool, trains: bool
    ):
        self._coordinator, self._config, self._saves, self._trains = coordinator, config, saves, trains
        self._num_nodes, self._num_local = num_ranks // num_local, num_local
        self._ranks = range(num_ranks)
        self._firsts = self._ranks[::num_local]  # the first rank of each node
        self.all_alive = True

    def run(self) -> list[CheckResult]:
        facts = self._coordinator.ask("describe", {rank: {} for rank in self._ranks}, DESCRIBE_S)
        errors = [f"{fact['host']}: {fact['config_error']}" for fact in facts.values() if "config_error" in fact]
        if errors:
            raise ConfigError(errors[0])
        if [rank for rank, fact in sorted(facts.items()) if "versions" in fact] != [*self._firsts]:
            raise ConfigError(
                f"got {count_of(len(facts), 'rank')}, {self._num_local} of them on the node of rank 0; all nodes "
                "need equally many: give the same --nproc-per-node on each"
            )
        self._nodes = [facts[first] for first in self._firsts]
        numbers = [node["number"] for node in self._nodes]
        has_numbers = None not in numbers and len({*numbers}) == len(numbers)
        self._names = Names([node["host"] for node in self._nodes], numbers if has_numbers else None)
        self._rank_names = Names([facts[rank]["host"] for rank in self._ranks], word="rank")
        gpus = [facts[rank]["gpu"] for rank in self._ranks]
        has_gpus = all("total" in gpu for gpu in gpus)
        share_gpu = self._config.debug.share_gpu
        gpu_users = [node["gpu_users"] for node in self._nodes]
        placement, needs = check_placement(self._config, self._num_nodes, self._num_local, gpus, self._trains)
        size = f"{count_of(self._num_nodes, 'node')} with {count_of(self._num_local, 'rank')} each"
        ports = {rank: facts[rank]["sink"] for rank in self._ranks}
        results = [
            CheckResult("nodes", OK, size),
            rules.check_versions(self._nodes, self._names),
            rules.check_gpus(gpus, self._num_local, share_gpu, gpu_users, self._names),
        ]
        results += self._check_network(ports) if self._num_nodes > 1 else []
        results += self._check_port()
        results += self._check_loopback(ports) if self._num_local > 1 else []
        need = needs.host_by_node(has_gpus) if needs else None
        results += [self._check_folder(needs), rules.check_memory(self._nodes, need, has_gpus, self._names), placement]
        if has_gpus and not share_gpu and len(gpus) > 1:
            results += self._check_nccl()  # last, because a rank that hangs in it answers no more questions
        return results

    def _check_network(self, ports: Mapping[int, int]) -> list[CheckResult]:
        addresses = self._coordinator.addresses()
        places = {rank: (addresses[rank], ports[rank]) for rank in self._ranks}
        questions = {a: {"places": {str(b): places[b] for b in self._firsts if b != a}} for a in self._firsts}
        answers = self._coordinator.ask("find_unreachable", questions, ANSWER_S)
        node_of = {first: node for node, first in enumerate(self._firsts)}
        errors = {(node_of[a], node_of[int(b)]): why for a, found in answers.items() for b, why in found.items()}
        num_links = self._num_nodes * (self._num_nodes - 1)
        results = [
            rules.check_clocks(self._clock_offsets(), self._names),
            rules.check_reach(errors, num_links, self._names),
        ]
        schedule = [
            [(self._firsts[a], self._firsts[b]) for a, b in pairs if not {(a, b), (b, a)} & errors.keys()]
            for pairs in pair_rounds(self._num_nodes)
        ]
        rates = {(node_of[a], node_of[b]): rate for (a, b), rate in self._measure(schedule, places).items()}
        if rates:
            results.append(rules.check_rates("between nodes", rates, TCP_FLOOR, self._names, least=LEAST))
        return results

    def _check_loopback(self, ports: Mapping[int, int]) -> list[CheckResult]:
        """Measure between the first two ranks of each node: all of its ranks use the same loopback."""
        places = {rank: ("127.0.0.1", ports[rank]) for rank in self._ranks}
        rates = self._measure([[(first, first + 1) for first in self._firsts]], places)
        return [rules.check_rates("inside nodes", rates, TCP_FLOOR, self._rank_names)]

    def _measure(self, schedule: Sequence[Sequence[Link]], places: Mapping[int, tuple[str, int]]) -> dict[Link, float]:
        """Measure each link in both directions. A slow one is measured again, alone, and its best rate counts."""
        seconds = min(SEND_S, max(MIN_SEND_S, ALL_SENDS_S / (2 * len(schedule))))

        def send(links: Sequence[Link]) -> dict[Link, float]:
            questions = {a: {"address": places[b][0], "port": places[b][1], "seconds": seconds} for a, b in links}
            answers = self._coordinator.ask("measure_rate", questions, ANSWER_S)
            return {(a, b): answers[a].get("rate", 0.0) for a, b in links}

        rates: dict[Link, float] = {}
        for pairs in schedule:
            rates |= send(pairs)
            rates |= send([(b, a) for a, b in pairs])
        for _ in range(NUM_REPEATS):
            for link in slow_links(rates, TCP_FLOOR):
                rates[link] = max(rates[link], send([link])[link])
        return rates

    def _clock_offsets(self) -> dict[int, float]:
        """Return by how many seconds each node's clock is ahead of rank 0's.

        The quickest of three round trips counts. The node is assumed to read its clock in the middle of it.
        """
        offsets = {}
        for node, first in enumerate(self._firsts):
            trips = []
            for _ in range(3):
                sent, begun = time.time(), time.perf_counter()
                there = self._coordinator.ask("read_clock", {first: {}}, ANSWER_S)[first]
                took = time.perf_counter() - begun
                trips.append((took, there - sent - took / 2))
            offsets[node] = min(trips)[1]
        return offsets

    def _check_port(self) -> list[CheckResult]:
        head = next((number for number, node in enumerate(self._nodes) if node["is_head"]), 0)
        address, port = self._nodes[head]["head"], self._nodes[head]["port"]
        if not port:  # without a launcher, torchrun has already met at the port that training uses
            return []
        first = self._firsts[head]
        held_by = self._coordinator.ask("hold_port", {first: {"port": port}}, ANSWER_S)[first]
        errors: dict[int, str] = {}
        if not held_by:
            others = [other for other in self._firsts if other != first]
            questions = {other: {"places": {"head": (address, port)}} for other in others}
            answers = self._coordinator.ask("find_unreachable", questions, ANSWER_S)
            errors = {other // self._num_local: found["head"] for other, found in answers.items() if found}
        self._coordinator.ask("free_port", {first: {}}, ANSWER_S)
        return [rules.check_port(port, held_by, errors, self._names.one(head), self._names)]

    def _check_nccl(self) -> list[CheckResult]:
        """Measure the rates of GPUs with the same local rank on different nodes, then of GPUs on the same node."""
        local = self._num_local
        schedule = [
            [(a * local + i, b * local + i) for a, b in pairs for i in range(local)]
            for pairs in pair_rounds(self._num_nodes)
        ]
        schedule += [
            [(first + a, first + b) for first in self._firsts for a, b in pairs] for pairs in pair_rounds(local)
        ]
        partners = [dict(pairs) | {b: a for a, b in pairs} for pairs in schedule]
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        store = (self._coordinator.addresses()[0], port)
        questions = {
            rank: {"size": len(self._ranks), "store": store, "partners": [pairs.get(rank) for pairs in partners]}
            for rank in self._ranks
        }
        try:
            answers = self._coordinator.ask("measure_gpus", questions, DESCRIBE_S)
        except NoAnswer as error:
            self.all_alive = False
            return [CheckResult("GPUs over NCCL", FAILED, f"{error}; NCCL_DEBUG=INFO says more")]
        between: dict[Link, float] = {}
        inside: dict[Link, float] = {}
        for rank, rates in answers.items():
            for partner_of, rate in zip(partners, rates, strict=True):
                if rate is not None:
                    partner = partner_of[rank]
                    (inside if partner // local == rank // local else between)[rank, partner] = rate
        # Inside a node a pair may be slower because of how its slots are wired.
        kinds = [("GPUs between nodes", between, FAILED, LEAST), ("GPUs inside nodes", inside, WARNING, 0.0)]
        return [
            rules.check_rates(name, rates, NO_FLOOR, self._rank_names, state, least)
            for name, rates, state, least in kinds
            if rates
        ]

    def _check_folder(self, needs: MemoryPlan | None) -> CheckResult:
        """Let each node write a marker file into run.dir. Nodes that see each other's markers share a disk."""
        word = secrets.token_hex(6)
        markers = [f".preflight-{word}-{node}" for node in range(self._num_nodes)]
        paths = [node["folder"] for node in self._nodes]
        own = {rank: {"folder": path, "marker": mark} for rank, path, mark in zip(self._firsts, paths, markers)}
        everyone = {rank: {"folder": path, "markers": markers} for rank, path in zip(self._firsts, paths)}
        try:
            written = self._coordinator.ask("write_marker", own, ANSWER_S)
            seen = self._coordinator.ask("find_markers", everyone, ANSWER_S)
        finally:
            for rank, place in own.items():  # one by one: a rank that hangs or is gone must not stop the others
                with suppress(NoAnswer):
                    self._coordinator.ask("remove_marker", {rank: place}, REMOVE_S)
        groups = rules.group_by_disk([[markers.index(marker) for marker in seen[rank]] for rank in self._firsts])
        folders = [written[rank] | {"path": path} for rank, path in zip(self._firsts, paths)]
        checkpoint = needs.checkpoint_by_node(len(groups) > 1) if needs and self._saves else None
        return rules.check_folder(folders, groups, checkpoint, needs.num_kept if needs else 0, self._names)
