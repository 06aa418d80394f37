"""The memory of ranks and the use of their GPUs, on their way from the watchdogs to the metrics.

    watchdog of each rank --> board --> watchdog of the leader --> leader: ResourceUse --> metrics

The watchdogs measure, so no rank spends time on it, and nothing waits for a device.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rl.common.members import metrics_of_members
from rl.watch.gpu import MEMORY, UTILIZATION

HOST_MEMORY = "memory_mb"  # in status files; resident MiB of the rank's process
MB = 2**20 / 1e9  # MiB in GB


class Measurement(NamedTuple):
    """A measurement of a rank on its way to the leader. -1 means that the value is not known."""

    rank: int
    host_mb: int
    gpu_mb: int
    gpu_utilization: int


def measurements(abouts: Mapping[int, Mapping[str, int]]) -> list[Measurement]:
    """Return the measurements in what watchdogs said about their ranks. Ranks without any are left out."""
    values = {
        rank: [about.get(name, -1) for name in (HOST_MEMORY, MEMORY, UTILIZATION)] for rank, about in abouts.items()
    }
    return [Measurement(rank, *each) for rank, each in values.items() if max(each) >= 0]


class ResourceUse:
    """The measurements of all ranks since the last report. The I/O thread adds them, the main thread takes them."""

    def __init__(self) -> None:
        self._window = _Window()
        self._host_mb: dict[int, int] = {}  # newest that was reported, by rank
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Iterable[Any]]) -> None:
        """Add measurements. Each row has the fields of a Measurement."""
        with self._lock:
            window = self._window
            for rank, host_mb, gpu_mb, utilization in rows:
                if host_mb >= 0:
                    window.host_mb[rank] = max(host_mb, window.host_mb.get(rank, 0))
                if gpu_mb >= 0:
                    window.gpu_mb[rank] = max(gpu_mb, window.gpu_mb.get(rank, 0))
                if utilization >= 0:
                    window.utilization[rank] = window.utilization.get(rank, 0) + utilization
                    window.count[rank] = window.count.get(rank, 0) + 1

    def take(self, nodes: Sequence[int]) -> dict[str, float]:
        """Return metrics since the last call: the highest memory of each rank's card in GB and its mean utilization in
        percent, and the memory of the ranks of each node in GB. Of many ranks or nodes there are only the smallest,
        median and largest value. A rank that was not measured since then counts with its last measurement, so that the
        memory of a node can be compared between steps. `nodes` are the nodes of all ranks."""
        with self._lock:
            window, self._window = self._window, _Window()
        self._host_mb |= window.host_mb
        utilization = {rank: total / window.count[rank] for rank, total in window.utilization.items()}
        node_mb = defaultdict[int, int](int)
        for rank, host_mb in self._host_mb.items():
            node_mb[nodes[rank]] += host_mb
        return (
            metrics_of_members("gpu/memory_gb/rank", window.gpu_mb, unit=MB)
            | metrics_of_members("gpu/utilization/rank", utilization)
            | metrics_of_members("host/memory_gb/node", node_mb, unit=MB)
        )


class _Window:
    """What ranks used since the last report. Ranks of which something is not known are missing there."""

    def __init__(self) -> None:
        self.host_mb: dict[int, int] = {}  # the highest
        self.gpu_mb: dict[int, int] = {}  # the highest
        self.utilization: dict[int, int] = {}  # the sum
        self.count: dict[int, int] = {}  # its terms
