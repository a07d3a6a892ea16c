"""Histograms as plain data, in Prometheus' sense."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """How often values came to lie between bounds, and their sum; it only grows.

    Attributes:
        bounds: upper ends of the buckets, ascending; a value that equals one lies below it.
        counts: [len(bounds) + 1] of each bucket; the last one has what is above all bounds.
        sum: of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(`le`, values up to it) of each bucket, as Prometheus has them."""
        ends = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return list(zip(ends, accumulate(self.counts), strict=True))

    def copy(self) -> "Histogram":
        """One that does not grow with this."""
        copy = Histogram(self.bounds)
        copy.counts, copy.sum = self.counts[:], self.sum
        return copy
