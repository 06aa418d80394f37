"""Answer rank 0's questions about this rank's GPU and, on the first rank of a node, about the node."""

import dataclasses
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from launch.checks import gpus, host
from launch.checks.bandwidth import accept_all, find_unreachable, measure_rate, receive_all
from launch.checks.facts import GpuFacts, NodeFacts, RankFacts
from launch.checks.sockets import is_own_address, listen
from rl.common.versions import read_commit, read_versions
from rl.config.functions import files_of
from rl.config.schema import ROOT, Config, ConfigError
from rl.environments.find import own_files as environment_files
from rl.rewards.find import own_files


class Answers:
    """The answers of one rank. `load` reads this node's settings. `note` tells rank 0 what this rank is doing."""

    def __init__(self, rank: int, local_rank: int, load: Callable[[], Config], note: Callable[[str], None]):
        self._rank, self._local_rank, self._load, self._note = rank, local_rank, load, note
        sink = listen(0)
        self._sink_port: int = sink.getsockname()[1]
        self._listeners = [receive_all(sink)]
        self._gpu: GpuFacts = {}

    def handlers(self) -> dict[str, Callable[..., Any]]:
        found: list[Callable[..., Any]] = [self.describe, self.hold_port, self.measure_gpus]
        found += [find_unreachable, measure_rate, host.write_marker, host.find_markers, host.remove_marker]
        return {"read_clock": time.time} | {handler.__name__: handler for handler in found}

    def describe(self) -> RankFacts:
        """Return facts about this rank, and on the first rank of a node also about the node."""
        found: RankFacts = {"host": socket.gethostname(), "config_error": "", "gpu": {}, "sink": self._sink_port}
        try:
            config = self._load()
            own = own_files(config.reward) | files_of("algo.loss", config.algo.loss)
            own |= files_of("algo.advantage", config.algo.advantage) | environment_files(config.environment)
        except ConfigError as error:
            return found | {"config_error": str(error)}
        self._gpu = gpus.describe(self._local_rank, config.debug.share_gpu)
        found["gpu"] = self._gpu
        if not self._local_rank:
            found["node"] = self._describe_node(config, host.code_digest(own))
        return found

    def _describe_node(self, config: Config, code: str) -> NodeFacts:
        versions = read_versions() | {key: self._gpu[key] for key in ("nccl", "hip") if key in self._gpu}
        number = os.environ.get("ONEWORLD_NODE_RANK", "")
        return {
            "number": int(number) if number else None,
            "is_head": is_head(),
            "head": os.environ.get("ONEWORLD_HEAD", ""),
            "port": int(os.environ.get("ONEWORLD_PORT") or 0),
            "folder": config.run.dir,
            "versions": versions | {"code": code, "settings": settings_digest(config)},
            "commit": read_commit(ROOT),
            "memory": host.read_memory(),
            "shared_memory": host.read_shared_memory(),
            "gpu_users": gpus.list_gpu_processes() if self._gpu else [],
        }

    def hold_port(self, port: int) -> str:
        """Listen on a port until this process ends. Return who holds it already, or an empty string."""
        try:
            self._listeners.append(accept_all(listen(port)))
        except OSError as error:
            return host.port_holder(port, error)
        return ""

    def measure_gpus(self, size: int, store: Sequence[Any], partners: Sequence[int | None]) -> list[float | None]:
        return gpus.measure_rates(self._rank, size, f"cuda:{self._gpu['index']}", store, partners, self._note)


def is_head() -> bool:
    """Return whether this node hosts the rendezvous: launch/run_node.sh says so, or the head's address is its own."""
    head, number = os.environ.get("ONEWORLD_HEAD", ""), os.environ.get("ONEWORLD_NODE_RANK", "")
    return bool(head) and (number == "0" if number else is_own_address(head))


def settings_digest(config: Config) -> str:
    """Hash the settings that must be the same on all nodes. run.dir may differ, because disks may differ."""
    values = dataclasses.asdict(config)
    values["run"].pop("dir")
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]
