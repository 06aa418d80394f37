"""The events of a run for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rl.report.histogram import Histogram


class EventWriter:
    """Write a run's events. Those from `purge_step` on, of an earlier start, are no longer shown."""

    def __init__(self, run_dir: Path, purge_step: int):
        self._events = SummaryWriter(str(run_dir), purge_step=purge_step, flush_secs=5)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def write_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """Write counts in bins. TensorBoard shows the bins from the first to the last that is not empty."""
        edges, counts = histogram
        bins = [(left, right, count) for left, right, count in zip(edges, edges[1:], counts, strict=False) if count]
        if bins:
            # TensorBoard reads sums only to show a mean, which rollout/length_mean has exactly.
            middles = [((left + right) / 2, count) for left, right, count in bins]
            self._events.add_histogram_raw(
                name,
                min=bins[0][0],
                max=bins[-1][1],
                num=sum(counts),
                sum=sum(middle * count for middle, count in middles),
                sum_squares=sum(middle * middle * count for middle, count in middles),
                bucket_limits=edges[1:],
                bucket_counts=counts,
                global_step=step,
            )

    def write_text(self, name: str, text: str, step: int) -> None:
        self._events.add_text(name, text, step)

    def close(self) -> None:
        self._events.close()
