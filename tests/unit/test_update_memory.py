"""Device memory of an update by kind. The allocator of a GPU is a stand-in here."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl.learner.memory import MemoryMeter
from rl.report.metrics import Measures

GB = 10**9


class Allocator:
    """Has `now` bytes in use, and had at most `peak` since it was reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.now))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)


class Trainer:
    """Has weights of this size, gradients of the same size during an update, and twice that of moments after one."""

    def __init__(self, size: int, kind: str = "cuda"):
        self.device, self._size, self.has_state = torch.device(kind), size, False

    def bytes_by_kind(self) -> dict[str, int]:
        return {"weights": self._size, "gradients": self._size, "optimizer": 2 * self._size * self.has_state}

    def bytes_present(self) -> int:
        return self._size + 2 * self._size * self.has_state


def measured(measures: Measures) -> dict[str, float]:
    return measures.reduce(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20)))


def test_what_is_neither_state_nor_was_there_before_is_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers of 3 GB and 1 GB, beside 20 GB of a sleeping engine. Activations take 5 GB at the peak. The first
    update makes the moments, which the second one finds."""
    allocator = Allocator(monkeypatch)
    trainers: list[Any] = [Trainer(3 * GB), Trainer(GB)]
    meter = MemoryMeter(trainers)
    for first in (True, False):
        allocator.now = (20 + 4 + (0 if first else 8)) * GB
        allocator.peak = 99 * GB  # of another stage
        meter.begin()
        for trainer in trainers:
            trainer.has_state = True
        allocator.peak = max(allocator.peak, (20 + 4 + 4 + 8 + 5) * GB)
        meter.end(measures := Measures())
        assert measured(measures) == {
            "gpu/memory_gb/weights": 4,
            "gpu/memory_gb/gradients": 4,
            "gpu/memory_gb/optimizer": 8,
            "gpu/memory_gb/other": 5,
        }


def test_nothing_is_measured_on_a_cpu_or_if_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    allocator.peak = 7
    for trainer, is_on in ((Trainer(1, "cpu"), True), (Trainer(1), False)):
        trainers: list[Any] = [trainer]
        meter, measures = MemoryMeter(trainers, is_on), Measures()
        meter.begin()
        meter.end(measures)
        assert measures.names == () and allocator.peak == 7
