"""Sums, means and other figures over ranks.

Names have stable prefixes: reward/ loss/ policy/ rollout/ environment/ optim/ critic/ eval/ time/ perf/ gpu/ host/.
A figure is kept as sums until the ranks are summed up: a mean as a total and a count, a standard deviation as a count,
a sum and a sum of squares. So it does not depend on which rank held which sequences.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl.algo.advantages import moments
from rl.report.histogram import Histogram
from rl.watch.heart import HEART

Finish = Callable[[list[float]], float | None]  # from sums over all ranks to the figure; None: leave it out
LEAST_VARIANCE = 1e-12  # of the mean square; what is smaller is a rounding error of the sums


class Measures:
    """Figures by name. Every rank adds the same names in the same order, even if it has nothing to count. No method but
    `reduce` waits for a device that is still computing the arguments."""

    def __init__(self) -> None:
        self._terms: dict[str, list[tuple[Tensor, ...]]] = {}  # to be summed up; any number per figure, on any device
        self._finish: dict[str, Finish] = {}
        self._maxima: dict[str, list[Tensor]] = {}
        self._edges: dict[str, Sequence[float]] = {}  # of histograms
        self.histograms: dict[str, Histogram] = {}  # over all ranks, once they were reduced

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean. It is 0 if the count is 0 on all ranks."""
        self.combine(name, (total, count), lambda sums: sums[0] / sums[1] if sums[1] else 0.0)

    def mean_if_any(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean that `reduce` leaves out if the count is 0 on all ranks."""
        self.combine(name, (total, count), lambda sums: sums[0] / sums[1] if sums[1] else None)

    def sum(self, name: str, total: Tensor | float) -> None:
        self.combine(name, (total,), lambda sums: sums[0])

    def deviation(self, name: str, values: Tensor) -> None:
        """Add values, [N], to a standard deviation over all values (divided by their number)."""
        self.combine(name, (moments(values),), lambda sums: math.sqrt(variance(*sums)))

    def maximum(self, name: str, values: Tensor) -> None:
        """Add values, [N], to a maximum. They must not be negative; without values, it is 0."""
        values = values.detach().double()
        self._maxima.setdefault(name, []).append(torch.cat([values, values.new_zeros(1)]).max())

    def histogram(self, name: str, values: Tensor, edges: Sequence[float]) -> None:
        """Count values, [N], in bins. One beyond the first or the last edge counts in the bin next to it. `reduce` puts
        the counts into `histograms`."""
        inner = torch.tensor(edges[1:-1], dtype=torch.float64, device=values.device)
        counts = torch.bincount(torch.bucketize(values.detach().double(), inner), minlength=len(edges) - 1)
        self._edges[name] = edges
        self.combine(name, (counts,), lambda sums: None)

    def combine(self, name: str, terms: Sequence[Tensor | float], finish: Finish) -> None:
        """Add terms, numbers or tensors of at most one dimension, which are summed up over calls and ranks. `finish`
        gets the sums as one list."""
        converted = tuple(torch.as_tensor(term, dtype=torch.float64).detach() for term in terms)
        self._terms.setdefault(name, []).append(converted)
        self._finish[name] = finish

    def include(self, other: "Measures") -> None:
        """Add everything that `other` has."""
        self._finish |= other._finish
        self._edges |= other._edges
        for name, terms in other._terms.items():
            self._terms.setdefault(name, []).extend(terms)
        for name, values in other._maxima.items():
            self._maxima.setdefault(name, []).extend(values)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._terms, *self._maxima)

    def reduce(self, pg: dist.ProcessGroup, *only: str) -> dict[str, float]:
        """Return the values over all ranks of the group, which all call this."""
        names = only or self.names
        summed, maxima = ([name for name in names if name in known] for known in (self._terms, self._maxima))
        reduced: dict[str, float] = {}
        if summed:
            parts = [[torch.stack(term).sum(0).reshape(-1) for term in zip(*self._terms[name])] for name in summed]
            rows = [torch.cat(terms) for terms in _to_host(parts)]
            table = torch.cat(rows)
            with HEART.in_collective("actor"):
                dist.all_reduce(table, group=pg)
            for name, row in zip(summed, table.split([len(row) for row in rows]), strict=True):
                if name in self._edges:
                    self.histograms[name] = Histogram(self._edges[name], row.long().tolist())
                elif (value := self._finish[name](row.tolist())) is not None:
                    reduced[name] = value
        if maxima:
            table = torch.stack([torch.stack(self._maxima[name]).max().cpu() for name in maxima])
            with HEART.in_collective("actor"):
                dist.all_reduce(table, dist.ReduceOp.MAX, group=pg)
            reduced |= dict(zip(maxima, table.tolist(), strict=True))
        return reduced


def _to_host(parts: list[list[Tensor]]) -> list[list[Tensor]]:
    """Copy tensors of one dimension and dtype, on any devices, to the host. Wait for each device only once."""
    flat = [part for terms in parts for part in terms]
    by_device: dict[torch.device, list[int]] = {}
    for index, part in enumerate(flat):
        by_device.setdefault(part.device, []).append(index)
    for device, indices in by_device.items():
        if device.type != "cpu":
            together = torch.cat([flat[index] for index in indices]).cpu()
            sizes = [flat[index].numel() for index in indices]
            for index, part in zip(indices, together.split(sizes), strict=True):
                flat[index] = part
    moved = iter(flat)
    return [[next(moved) for _ in terms] for terms in parts]


def variance(count: float, total: float, squares: float) -> float:
    """Return the variance of values, from their moments. It is exactly 0 if they are all equal."""
    if not count:
        return 0.0
    found = squares / count - (total / count) ** 2
    return 0.0 if found <= LEAST_VARIANCE * squares / count else found  # NaN stays NaN
