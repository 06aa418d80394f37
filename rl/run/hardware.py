"""Tell the leader the hardware of every node, for the record of the run.

first rank of each node --NodeHardware--> leader: run.json
"""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rl.placement.roles import Placement
from rl.report.record import NodeRecord
from rl.world.messages import Message
from rl.world.world import World


@dataclass(frozen=True)
class NodeHardware(Message):
    """Tell the leader the hardware of a node."""

    node: NodeRecord
    awaited = "the hardware of the nodes"


def send_hardware(world: World, placement: Placement) -> None:
    """Called on every rank, once GPUs may be used."""
    if world.rank in placement.node_leads:
        world.mail.send(placement.leader, NodeHardware(read_hardware()))


def read_hardware() -> NodeRecord:
    cpus, memory_gb = len(os.sched_getaffinity(0)), round(psutil.virtual_memory().total / 1e9, 1)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return NodeRecord(_cpu_model(), cpus, memory_gb, gpus)


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
