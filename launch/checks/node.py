"""What a rank answers when rank 0 asks: about its node where it is the first there, and about its GPU."""

import dataclasses
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from launch.checks import facts, gpus
from launch.checks.links import Sink, send_to, unreachable
from launch.checks.net import is_own, listen
from rl.config.schema import Config, ConfigError
from rl.rewards.find import own_files


class Answers:
    """`load`: reads the settings that this node was given."""

    def __init__(self, rank: int, local_rank: int, load: Callable[[], Config]):
        self._rank, self._local_rank, self._load = rank, local_rank, load
        self._sink = Sink()
        self._gpu: dict[str, Any] = {}
        self._held: socket.socket | None = None
        self.note: Callable[[str], None] = print

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "describe": self.describe,
            "clock": time.time,
            "unreachable": unreachable,
            "send": send_to,
            "hold_port": self.hold_port,
            "free_port": self.free_port,
            "measure_gpus": self.measure_gpus,
            "mark": facts.leave_mark,
            "seen": facts.seen_marks,
            "unmark": facts.remove_mark,
        }

    def describe(self) -> dict[str, Any]:
        try:
            config = self._load()
            rewards = own_files(config.reward)
        except ConfigError as error:
            return {"config_error": str(error), "host": socket.gethostname()}
        self._gpu = gpus.describe(self._local_rank, config.debug.share_gpu)
        found = {"gpu": self._gpu, "host": socket.gethostname(), "sink": self._sink.port}
        if self._local_rank:
            return found
        versions = facts.versions()
        versions |= {name: self._gpu[name] for name in ("nccl", "hip") if name in self._gpu}
        number = os.environ.get("ONEWORLD_NODE_RANK", "")
        return found | {
            "number": int(number) if number else None,
            "is_head": is_head(),
            "head": os.environ.get("ONEWORLD_HEAD", ""),
            "port": int(os.environ.get("ONEWORLD_PORT") or 0),
            "folder": config.run.dir,
            "settings": settings_digest(config),
            "versions": versions,
            "code": facts.code_digest(rewards),
            "commit": facts.commit(),
            "memory": facts.memory(),
            "shared_memory": facts.shared_memory(),
            "gpu_users": gpus.users() if self._gpu else [],
        }

    def hold_port(self, port: int) -> str:
        """Until it is freed; or who does already."""
        if by := facts.holder(port):
            return by
        with suppress(OSError):  # another was quicker: others will not reach it
            self._held = listen(port)
        return ""

    def free_port(self) -> None:
        if self._held is not None:
            self._held.close()

    def measure_gpus(self, size: int, store: Sequence[Any], partners: Sequence[int | None]) -> list[float | None]:
        place = (str(store[0]), int(store[1]))
        return gpus.measure(self._rank, size, f"cuda:{self._gpu['index']}", place, partners, self.note)


def is_head() -> bool:
    """As launch/run_node.sh says, or by its address; without a launcher nobody is."""
    head, number = os.environ.get("ONEWORLD_HEAD", ""), os.environ.get("ONEWORLD_NODE_RANK", "")
    return bool(head) and (number == "0" if number else is_own(head))


def settings_digest(config: Config) -> str:
    """Of what must be the same on all nodes; disks may have different names."""
    values: Mapping[str, Any] = dataclasses.asdict(config)
    values["run"].pop("dir")
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]
