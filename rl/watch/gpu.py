"""Memory and utilization of GPUs, for tools/status.py and TensorBoard (usage.py).

The watchdog asks NVML, so the numbers stay current while its rank hangs. It calls the driver's own library, which every
NVIDIA driver installs, and so needs neither torch nor a package. The rank says which card it uses.
"""

import ctypes
import threading
import time

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
        newest = self._newest if time.monotonic() - self._measured_at < STALE_S else {}
        if not self._is_absent and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._measure, name="gpu", daemon=True)
            self._thread.start()
        return newest

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
