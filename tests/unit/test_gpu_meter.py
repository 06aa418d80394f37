"""rl/watch/gpu.py with a stand-in for NVML: the right card, its changes, and machines that have none of it."""

from pathlib import Path

import pytest

from rl.watch import gpu
from rl.watch.gpu import GpuMeter
from tests.launcher import until
from tests.nvml import HUNG, StandIn


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    standing = StandIn(tmp_path)
    monkeypatch.setattr(gpu, "LIBRARY", str(standing.path))
    return standing


def wait_for(meter: GpuMeter, **values: int) -> None:
    until(lambda: meter.look() == {f"gpu_{name}": value for name, value in values.items()}, f"{values}", 10)


def test_a_card_is_found_by_its_uuid_and_followed(nvml: StandIn) -> None:
    nvml.show("GPU-other", 1, 2)
    nvml.show("GPU-own", 81_000, 100)
    meter = GpuMeter("GPU-own")
    assert meter.look() == {}  # nothing waits for the first measurement
    wait_for(meter, memory_mb=81_000, utilization=100)
    nvml.show("GPU-own", 0, 0)
    wait_for(meter, memory_mb=0, utilization=0)
    nvml.show("GPU-own", 140_000, -1)  # a part of a card has no utilization
    wait_for(meter, memory_mb=140_000)
    nvml.lose("GPU-own")
    wait_for(meter)
    nvml.show("GPU-own", 7, 8)
    wait_for(meter, memory_mb=7, utilization=8)


def test_a_driver_that_hangs_delays_nobody_and_old_values_go(nvml: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.show("GPU-own", 5, 6)
    meter = GpuMeter("GPU-own")
    wait_for(meter, memory_mb=5, utilization=6)
    nvml.show("GPU-own", HUNG, 6)
    until(lambda: meter.look() and nvml.is_hung, "a thread that hangs")
    hung = meter._thread
    assert meter.look() == {"gpu_memory_mb": 5, "gpu_utilization": 6}
    monkeypatch.setattr(gpu, "STALE_S", 0.0)
    assert meter.look() == {} and meter._thread is hung  # no second thread


@pytest.mark.parametrize("library", ["no-such-library.so", "libc.so.6"])
def test_a_machine_without_nvml_shows_nothing(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", library)
    meter = GpuMeter("GPU-own")
    assert meter.look() == {}
    until(lambda: meter._is_absent, "the end of the attempt")
    attempt = meter._thread
    assert meter.look() == {} and meter._thread is attempt  # no second attempt


def test_a_rank_without_a_card_asks_nobody(nvml: StandIn) -> None:
    meter = GpuMeter("")
    assert meter.look() == {} and meter._thread is None
