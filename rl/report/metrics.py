"""Sums and means over ranks.

Names have stable prefixes: reward/ loss/ policy/ rollout/ environment/ optim/ eval/ time/ perf/ gpu/. A mean is kept as
a sum and a count until the ranks are summed up, so it does not depend on which rank held which sequences.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rl.watch.heart import HEART


class Measures:
    """Sums and means by name. Every rank adds the same names in the same order, even if it has nothing to count."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}  # totals and counts, on any device
        self._sums: set[str] = set()
        self._optional: set[str] = set()  # means that are left out if they are over nothing

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean. This does not wait for a device that is still computing the arguments."""
        total, count = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (total, count))
        self._pairs.setdefault(name, []).append((total, count))

    def mean_if_any(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean that `reduce` leaves out if the count is 0 on all ranks."""
        self._optional.add(name)
        self.mean(name, total, count)

    def sum(self, name: str, total: Tensor | float) -> None:
        self._sums.add(name)
        self.mean(name, total, 0)

    def include(self, other: "Measures") -> None:
        """Add everything that `other` has."""
        self._sums |= other._sums
        self._optional |= other._optional
        for name, pairs in other._pairs.items():
            self._pairs.setdefault(name, []).extend(pairs)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._pairs)

    def reduce(self, pg: dist.ProcessGroup, *only: str) -> dict[str, float]:
        """Return the values over all ranks of the group, which all call this. A mean over nothing is 0, or left out."""
        names = only or self.names
        parts = [part for name in names for part in zip(*self._pairs[name])]  # totals and counts in turn
        table = torch.stack([torch.stack(part).sum().cpu() for part in parts]).reshape(-1, 2)
        with HEART.in_collective("actor"):
            dist.all_reduce(table, group=pg)
        reduced = {}
        for name, (total, count) in zip(names, table.tolist(), strict=True):
            if name in self._optional and not count:
                continue
            reduced[name] = total if name in self._sums else total / count if count else 0.0
        return reduced
