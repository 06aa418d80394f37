"""The events of a run for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class EventWriter:
    """Write a run's events. Those from `purge_step` on, of an earlier start, are no longer shown."""

    def __init__(self, run_dir: Path, purge_step: int):
        self._events = SummaryWriter(str(run_dir), purge_step=purge_step, flush_secs=5)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._events.add_text(name, text, step)

    def close(self) -> None:
        self._events.close()
