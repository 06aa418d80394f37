"""The device memory of an actor's update, by what it holds. Nothing here waits for the device."""

from collections.abc import Sequence

import torch

from rl.learner.sharded_trainer import ShardedTrainer
from rl.report.metrics import Measures

KINDS = ("weights", "gradients", "optimizer")


class MemoryMeter:
    """Measure each update of an actor's trainers. On a CPU, there is nothing to measure.

    The sizes of the known kinds are those of their tensors. What else an update needs at its peak are activations,
    gathered layers and buffers: the peak of torch's allocator, less the known kinds, and less what was in use before
    the update and is none of them, such as a sleeping engine.
    """

    def __init__(self, trainers: Sequence[ShardedTrainer], is_on: bool = True):
        self._trainers, self._device = trainers, trainers[0].device
        self._is_on = is_on and self._device.type == "cuda"
        self._others = 0  # bytes in use at the beginning that are none of the known kinds

    def begin(self) -> None:
        """Begin an update."""
        if self._is_on:
            torch.cuda.reset_peak_memory_stats(self._device)
            known = sum(trainer.bytes_present() for trainer in self._trainers)
            self._others = torch.cuda.memory_allocated(self._device) - known

    def end(self, measures: Measures) -> None:
        """Add the memory of the update. It is that of the rank that needs most."""
        if not self._is_on:
            return
        known = [trainer.bytes_by_kind() for trainer in self._trainers]
        totals = {kind: sum(each[kind] for each in known) for kind in KINDS}
        peak = torch.cuda.max_memory_allocated(self._device)
        totals["other"] = max(0, peak - self._others - sum(totals.values()))
        for kind, size in totals.items():
            measures.maximum(f"gpu/memory_gb/{kind}", torch.tensor([size / 1e9]))
