"""What rank 0 does: asks the ranks, and makes the rows of the table."""

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from launch.checks import checks
from launch.checks.control import Hub, Unanswered, every
from launch.checks.links import Link, rounds, slow_links
from launch.checks.needs import Needs, check_placement
from launch.checks.table import FAILED, OK, WARNING, Names, Row
from rl.config.schema import Config, ConfigError
from rl.watch.text import count_of

DESCRIBE_S = 25.0  # torch is imported for it where there are GPUs
ANSWER_S = 8.0
UNMARK_S = 1.0
TCP_FLOOR = 0.3e9  # bytes a second; faster links are fast enough, however they differ
NO_FLOOR = float("inf")
LEAST = 0.1e9  # between nodes, below what one gigabit a second carries
SEND_S, MIN_SEND_S, ALL_SENDS_S = 0.2, 0.05, 4.0
NUM_AGAIN = 3


class Survey:
    def __init__(self, hub: Hub, num_ranks: int, num_local: int, config: Config, saves: bool, trains: bool):
        self._hub, self._config, self._saves, self._trains = hub, config, saves, trains
        self._num_nodes, self._num_local = num_ranks // num_local, num_local
        self._ranks = range(num_ranks)
        self._leads = list(range(0, num_ranks, num_local))
        self.is_whole = True

    def rows(self) -> list[Row]:
        told = self._hub.ask("describe", every(self._ranks), DESCRIBE_S)
        errors = [f"{about['host']}: {about['config_error']}" for about in told.values() if "config_error" in about]
        if errors:
            raise ConfigError(errors[0])
        if [rank for rank, about in sorted(told.items()) if "versions" in about] != self._leads:
            raise ConfigError(
                f"got {count_of(len(told), 'rank')}, {self._num_local} of them on the node of rank 0; all nodes "
                "need equally many: give the same --nproc-per-node on each"
            )
        self._about = [told[lead] for lead in self._leads]
        numbers = [about["number"] for about in self._about]
        is_known = None not in numbers and len({*numbers}) == len(numbers)
        self._names = Names([about["host"] for about in self._about], numbers if is_known else None)
        self._rank_names = Names([told[rank]["host"] for rank in self._ranks], word="rank")
        heads = [node for node, about in enumerate(self._about) if about["is_head"]]
        self._head = heads[0] if heads else 0
        gpus = [told[rank]["gpu"] for rank in self._ranks]
        has_gpus = all("total" in gpu for gpu in gpus)
        placement, needs = check_placement(self._config, self._num_nodes, self._num_local, gpus, self._trains)
        rows = [
            Row("nodes", OK, f"{count_of(self._num_nodes, 'node')} with {count_of(self._num_local, 'rank')} each"),
            checks.check_versions(self._about, self._names),
            self._check_gpus(gpus),
        ]
        rows += self._check_network(told) if self._num_nodes > 1 else []
        rows += self._check_port() + self._check_inside(told)
        rows += [self._check_folder(needs), self._check_memory(needs, has_gpus), placement]
        if has_gpus and not self._config.debug.share_gpu and len(gpus) > 1:
            rows += self._check_nccl()  # last: ranks that hang in it answer nothing more
        return rows

    def _check_gpus(self, gpus: Sequence[Mapping[str, Any]]) -> Row:
        users = [about["gpu_users"] for about in self._about]
        return checks.check_gpus(gpus, self._num_local, self._config.debug.share_gpu, users, self._names)

    def _check_network(self, told: Mapping[int, Mapping[str, Any]]) -> list[Row]:
        addresses = self._hub.addresses()
        self._places = {rank: (addresses[rank], told[rank]["sink"]) for rank in self._ranks}
        others = {a: {str(b): self._places[b] for b in self._leads if b != a} for a in self._leads}
        answers = self._hub.ask("unreachable", {a: {"places": others[a]} for a in self._leads}, ANSWER_S)
        node_of = {lead: node for node, lead in enumerate(self._leads)}
        errors = {(node_of[a], node_of[int(b)]): why for a, found in answers.items() for b, why in found.items()}
        num_links = self._num_nodes * (self._num_nodes - 1)
        rows = [checks.check_clocks(self._offsets(), self._names), checks.check_reach(errors, num_links, self._names)]
        schedule = [
            [(a, b) for a, b in pairs if not {(a, b), (b, a)} & errors.keys()] for pairs in rounds(self._num_nodes)
        ]
        lead_rounds = [[(self._leads[a], self._leads[b]) for a, b in pairs] for pairs in schedule]
        rates = {(node_of[a], node_of[b]): rate for (a, b), rate in self._rates(lead_rounds).items()}
        if rates:
            rows.append(checks.check_rates("between nodes", rates, TCP_FLOOR, self._names, least=LEAST))
        return rows

    def _check_inside(self, told: Mapping[int, Mapping[str, Any]]) -> list[Row]:
        """The first two ranks of each node: all of them use the same loopback."""
        if self._num_local == 1:
            return []
        self._places = {rank: ("127.0.0.1", told[rank]["sink"]) for rank in self._ranks}
        rates = self._rates([[(lead, lead + 1) for lead in self._leads]])
        return [checks.check_rates("inside nodes", rates, TCP_FLOOR, self._rank_names)]

    def _rates(self, schedule: Sequence[Sequence[Link]]) -> dict[Link, float]:
        """By link, in both directions; what looks slow is measured again, alone, and counts at its best."""
        seconds = min(SEND_S, max(MIN_SEND_S, ALL_SENDS_S / (2 * len(schedule))))
        rates: dict[Link, float] = {}
        for pairs in schedule:
            for links in (pairs, [(b, a) for a, b in pairs]):
                rates |= self._send(links, seconds)
        for _ in range(NUM_AGAIN):
            for link in slow_links(rates, TCP_FLOOR):
                rates[link] = max(rates[link], self._send([link], seconds)[link])
        return rates

    def _send(self, links: Sequence[Link], seconds: float) -> dict[Link, float]:
        wanted = {a: (b, self._places[b]) for a, b in links}
        arguments = {a: {"address": place[0], "port": place[1], "seconds": seconds} for a, (_, place) in wanted.items()}
        answers = self._hub.ask("send", arguments, ANSWER_S)
        return {(a, wanted[a][0]): answer.get("rate", 0.0) for a, answer in answers.items()}

    def _offsets(self) -> dict[int, float]:
        """Of the quickest of three round trips, in the middle of which the clock was read."""
        offsets = {}
        for node, lead in enumerate(self._leads):
            trips = []
            for _ in range(3):
                sent, begun = time.time(), time.perf_counter()
                there = self._hub.ask("clock", every([lead]), ANSWER_S)[lead]
                took = time.perf_counter() - begun
                trips.append((took, there - sent - took / 2))
            offsets[node] = min(trips)[1]
        return offsets

    def _check_port(self) -> list[Row]:
        head, port = self._about[self._head]["head"], self._about[self._head]["port"]
        if not port:  # no launcher: the rendezvous that brought the ranks here is the one of the training
            return []
        lead = self._leads[self._head]
        held_by = self._hub.ask("hold_port", every([lead], port=port), ANSWER_S)[lead]
        errors: dict[int, str] = {}
        if not held_by:
            others = [other for other in self._leads if other != lead]
            answers = self._hub.ask("unreachable", every(others, places={"head": (head, port)}), ANSWER_S)
            errors = {other // self._num_local: found["head"] for other, found in answers.items() if found}
        self._hub.ask("free_port", every([lead]), ANSWER_S)
        return [checks.check_port(port, held_by, errors, self._names.one(self._head), self._names)]

    def _check_nccl(self) -> list[Row]:
        """All GPUs: with those at the same place on other nodes, then with those of their node."""
        local, schedule = self._num_local, []
        for pairs in rounds(self._num_nodes):
            schedule.append([(a * local + i, b * local + i) for a, b in pairs for i in range(local)])
        for pairs in rounds(local):
            schedule.append([(lead + a, lead + b) for lead in self._leads for a, b in pairs])
        partner = [dict(pairs) | {b: a for a, b in pairs} for pairs in schedule]
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        store = (self._hub.addresses()[0], port)
        arguments = {
            rank: {"size": len(self._ranks), "store": store, "partners": [of.get(rank) for of in partner]}
            for rank in self._ranks
        }
        try:
            answers = self._hub.ask("measure_gpus", arguments, DESCRIBE_S)
        except Unanswered as error:
            self.is_whole = False
            return [Row("GPUs over NCCL", FAILED, f"{error}; NCCL_DEBUG=INFO says more")]
        between: dict[Link, float] = {}
        inside: dict[Link, float] = {}
        for rank, rates in answers.items():
            for of, rate in zip(partner, rates, strict=True):
                if rate is not None:
                    (inside if of[rank] // local == rank // local else between)[rank, of[rank]] = rate
        # Inside a node a pair may be slower for the way that its slots are wired.
        kinds = [("GPUs between nodes", between, FAILED, LEAST), ("GPUs inside nodes", inside, WARNING, 0.0)]
        return [
            checks.check_rates(name, rates, NO_FLOOR, self._rank_names, state, least)
            for name, rates, state, least in kinds
            if rates
        ]

    def _check_folder(self, needs: Needs | None) -> Row:
        word = secrets.token_hex(6)
        marks = [f".preflight-{word}-{node}" for node in range(self._num_nodes)]
        paths = [about["folder"] for about in self._about]
        places = {lead: {"folder": path, "mark": mark} for lead, path, mark in zip(self._leads, paths, marks)}
        looked = {lead: {"folder": path, "marks": marks} for lead, path in zip(self._leads, paths)}
        try:
            left = self._hub.ask("mark", places, ANSWER_S)
            seen = self._hub.ask("seen", looked, ANSWER_S)
        finally:
            for lead, place in places.items():  # one by one: those that hang or are gone keep no other from it
                with suppress(Unanswered):
                    self._hub.ask("unmark", {lead: place}, UNMARK_S)
        groups = checks.sharing([[marks.index(mark) for mark in seen[lead]] for lead in self._leads])
        folders = [left[lead] | {"path": path} for lead, path in zip(self._leads, paths)]
        need = needs.checkpoint_by_node(len(groups) > 1) if needs and self._saves else None
        return checks.check_folder(folders, groups, need, needs.num_kept if needs else 0, self._names)

    def _check_memory(self, needs: Needs | None, has_gpus: bool) -> Row:
        need = needs.host_by_node(has_gpus) if needs else None
        return checks.check_memory(self._about, need, has_gpus, self._names)
