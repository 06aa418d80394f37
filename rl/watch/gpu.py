"""Memory and utilization of GPUs, for tools/status.py and TensorBoard.

    watchdog of each rank: GpuMeter --> board --> watchdog of the leader --> leader: GpuUse --> TensorBoard

The watchdog asks NVML, so the numbers stay current while its rank hangs. It calls the driver's own library, which every
NVIDIA driver installs, and so needs neither torch nor a package. The rank says which card it uses.
"""

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"
STALE_S = 10.0  # after which a measurement is not shown any more, because the driver hangs
MEMORY, UTILIZATION = "gpu_memory_mb", "gpu_utilization"  # in status files; used MiB, and percent of the time


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class GpuMeter:
    """Measure one card, in a thread because a call may hang. Without NVML or the card, there are no measurements."""

    def __init__(self, uuid: str):
        """`uuid` is written as nvidia-smi writes it, such as GPU-8e0b...; empty if the rank has no card."""
        self._uuid = uuid.encode()
        self._library: ctypes.CDLL | None = None
        self._newest: dict[str, int] = {}
        self._measured_at = 0.0
        self._thread: threading.Thread | None = None
        self._is_absent = not uuid

    def look(self) -> dict[str, int]:
        """Return the newest measurement by the keys MEMORY and UTILIZATION, and start another one."""
        if not self._is_absent and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._measure, name="gpu", daemon=True)
            self._thread.start()
        return self._newest if time.monotonic() - self._measured_at < STALE_S else {}

    def _measure(self) -> None:
        try:
            if self._library is None:
                self._library = ctypes.CDLL(LIBRARY)
                self._library.nvmlInit_v2()  # if it fails, all other calls do
            self._newest, self._measured_at = _read_card(self._library, self._uuid), time.monotonic()
        except (OSError, AttributeError):  # there is no such library, or another one has its name
            self._is_absent = True


def _read_card(library: ctypes.CDLL, uuid: bytes) -> dict[str, int]:
    """Return what NVML says about a card. Leave out what it does not know, which is everything for a lost card."""
    card, memory, utilization = ctypes.c_void_p(), _Memory(), _Utilization()
    found: dict[str, int] = {}
    if not library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(card)):  # 0 is success
        if not library.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory)):
            found[MEMORY] = memory.used >> 20
        if not library.nvmlDeviceGetUtilizationRates(card, ctypes.byref(utilization)):
            found[UTILIZATION] = utilization.gpu
    return found


class Measurement(NamedTuple):
    """A measurement of a rank's card on its way to the leader. -1 means that the value is not known."""

    rank: int
    memory_mb: int
    utilization: int


def measurements(abouts: Mapping[int, Mapping[str, int]]) -> list[Measurement]:
    """Return the measurements in what watchdogs said about their ranks. Ranks without a card are left out."""
    values = {rank: (about.get(MEMORY, -1), about.get(UTILIZATION, -1)) for rank, about in abouts.items()}
    return [Measurement(rank, *pair) for rank, pair in values.items() if pair != (-1, -1)]


class GpuUse:
    """The measurements of all ranks since the last report. The I/O thread adds them, the main thread takes them."""

    def __init__(self) -> None:
        self._seen: dict[int, list[Measurement]] = defaultdict(list)
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Iterable[Any]]) -> None:
        with self._lock:
            for row in rows:
                measurement = Measurement(*row)
                self._seen[measurement.rank].append(measurement)

    def take(self) -> dict[str, float]:
        """Return metrics for each rank: the highest memory in GB and the mean utilization in percent."""
        with self._lock:
            seen, self._seen = self._seen, defaultdict(list)
        metrics: dict[str, float] = {}
        for rank, rows in sorted(seen.items()):
            memory = [row.memory_mb for row in rows if row.memory_mb >= 0]
            busy = [row.utilization for row in rows if row.utilization >= 0]
            metrics |= {f"gpu/memory_gb/rank_{rank}": max(memory) * 2**20 / 1e9} if memory else {}
            metrics |= {f"gpu/utilization/rank_{rank}": sum(busy) / len(busy)} if busy else {}
        return metrics
