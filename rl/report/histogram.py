"""A histogram of a step, such as the lengths of its responses."""

from collections.abc import Sequence
from typing import NamedTuple


class Histogram(NamedTuple):
    """Counts of values in bins. Bin i has the values above edges[i] and up to edges[i + 1]. The first bin also has the
    values that equal edges[0]."""

    edges: Sequence[float]  # one more than bins
    counts: Sequence[int]
