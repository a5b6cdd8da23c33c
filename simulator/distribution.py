"""Exact figures of values too many to hold: mean, standard deviation and percentiles, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Sample = tuple[Floats, NDArray[np.int64]]

#: Bits of a double that sort it into a bin: sign, exponent and eight bits of mantissa.
_BIN_SHIFT = 44
_BINS = 1 << (63 - _BIN_SHIFT)


class Distribution:
    """Mean, standard deviation and exact percentiles of non-negative values with integer weights, in two passes.

    Give every part of the values to `count`, then every part again to `collect`: the first pass counts values per bin,
    the second keeps the few bins that hold the order statistics asked for. Percentiles are `numpy.percentile` of the
    repeated list; all figures are NaN without values.
    """

    def __init__(self, percents: Sequence[float]) -> None:
        self._percents = percents
        self._counts = np.zeros(_BINS, np.int64)
        self._total = 0
        self._sum = self._squares = 0.0
        self._kept: list[Sample] = []

    def count(self, values: Floats, weights: NDArray[np.int64]) -> None:
        """First pass over a part."""
        np.add.at(self._counts, _bins(values), weights)
        self._total += int(weights.sum())
        self._sum += float(values @ weights)

    @property
    def mean(self) -> float:
        return self._sum / self._total if self._total else float("nan")

    @property
    def std(self) -> float:
        return float(np.sqrt(self._squares / self._total)) if self._total else float("nan")

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Values in each bin and all before it."""
        return np.cumsum(self._counts)

    @cached_property
    def _ranks(self) -> list[int]:
        """Order statistics between which the percentiles lie."""
        places = [self._place(percent) for percent in self._percents] if self._total else []
        return sorted({rank for place in places for rank in self._neighbours(place)})

    @cached_property
    def _wanted(self) -> NDArray[np.int64]:
        """Bins that hold them."""
        return np.unique(np.searchsorted(self._ends, self._ranks, side="right"))

    def collect(self, values: Floats, weights: NDArray[np.int64]) -> None:
        """Second pass over a part."""
        self._squares += float((values - self.mean) ** 2 @ weights)
        chosen = np.isin(_bins(values), self._wanted)
        self._kept.append((values[chosen], weights[chosen]))

    def percentiles(self) -> list[float]:
        """The percentiles asked for, after both passes."""
        if not self._total:
            return [float("nan")] * len(self._percents)
        values = np.concatenate([part for part, _ in self._kept])
        weights = np.concatenate([part for _, part in self._kept])
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        bins = _bins(values)
        statistic: dict[int, float] = {}
        for bin_ in self._wanted:
            inside = bins == bin_
            first = int(self._ends[bin_] - self._counts[bin_])
            ends = first + np.cumsum(weights[inside])
            for rank in self._ranks:
                if first <= rank < ends[-1]:
                    statistic[rank] = float(values[inside][np.searchsorted(ends, rank, side="right")])
        return [self._between(statistic, self._place(percent)) for percent in self._percents]

    def _place(self, percent: float) -> float:
        return (self._total - 1) * percent / 100

    def _neighbours(self, place: float) -> tuple[int, int]:
        return int(place), min(int(place) + 1, self._total - 1)

    def _between(self, statistic: dict[int, float], place: float) -> float:
        low, high = (statistic[rank] for rank in self._neighbours(place))
        return low + (high - low) * (place - int(place))


def _bins(values: Floats) -> NDArray[np.int64]:
    """Bin of every value; bins are in the order of the values, whose bits sort as integers do."""
    bits = (np.ascontiguousarray(values) + 0.0).view(np.int64)
    bins: NDArray[np.int64] = bits >> _BIN_SHIFT
    return bins
