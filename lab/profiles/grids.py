"""Look-ups on measured points: a curve along one axis, a grid along two, and rules beyond the last point.

Between points both interpolate linearly. Beyond the last point they hold its rate (time per row, per request,
per token), and say so in a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Lookup(NamedTuple):
    """Times in microseconds, and a mask that is True where a time lies outside the measured points."""

    latency_us: Floats
    extrapolated: Bools


@dataclass(frozen=True, slots=True)
class Curve:
    """Time along one axis, such as rows, bytes or requests; `points` ascend."""

    points: Floats
    latency_us: Floats

    def at(self, x: ArrayLike) -> Lookup:
        """Linear between points, the first value below them, the last point's rate beyond them."""
        wanted = np.asarray(x, dtype=np.float64)
        last = self.points[-1]
        held = np.interp(wanted, self.points, self.latency_us) * np.maximum(wanted / last, 1.0)
        return Lookup(held, (wanted > last) | (wanted < self.points[0]))

    def despiked(self) -> Curve:
        """The curve with every value replaced by the smallest one at the same or a larger point."""
        return Curve(self.points, np.minimum.accumulate(self.latency_us[::-1])[::-1].copy())


def mixed(low: Curve, high: Curve, weight: float) -> Curve:
    """The curve between two curves with the same points: `(1 - weight) * low + weight * high`."""
    return Curve(low.points, (1 - weight) * low.latency_us + weight * high.latency_us)


@dataclass(frozen=True, slots=True)
class Grid:
    """Time by batch and length: `latency_us[batch, length]`, `measured` False where one was filled in.

    `power` 2 marks times that grow as the square of the length: they are interpolated on the square root, and
    held beyond the last length in proportion to the square.
    """

    batches: Floats
    lengths: Floats
    latency_us: Floats
    measured: Bools
    power: int = 1

    @classmethod
    def from_points(
        cls, batch: Sequence[float], length: Sequence[float], latency_us: Sequence[float], power: int = 1
    ) -> Grid:
        """Grid over all batches and lengths that occur.

        A pair that was not measured (large batch and long length) holds the rate of the largest batch
        measured at that length; a hole between measured batches is interpolated.
        """
        batches, rows = np.unique(np.asarray(batch, dtype=np.float64), return_inverse=True)
        lengths, columns = np.unique(np.asarray(length, dtype=np.float64), return_inverse=True)
        values = np.full((len(batches), len(lengths)), np.nan)
        values[rows, columns] = latency_us
        measured = ~np.isnan(values)
        for column in range(len(lengths)):
            known = measured[:, column]
            curve = Curve(batches[known], values[known, column])
            values[:, column] = np.where(known, values[:, column], curve.at(batches).latency_us)
        return cls(batches, lengths, values, measured, power)

    def at(self, batch: ArrayLike, length: ArrayLike) -> Lookup:
        """Times at broadcast batches and lengths; below the first point the first point's value counts."""
        wanted_batch, wanted_length = np.broadcast_arrays(
            np.asarray(batch, dtype=np.float64), np.asarray(length, dtype=np.float64)
        )
        row, row_weight = _bracket(self.batches, wanted_batch)
        column, column_weight = _bracket(self.lengths, wanted_length)
        row_next = np.minimum(row + 1, len(self.batches) - 1)
        column_next = np.minimum(column + 1, len(self.lengths) - 1)
        values = self.latency_us if self.power == 1 else np.sqrt(self.latency_us)
        low = (1 - column_weight) * values[row, column] + column_weight * values[row, column_next]
        high = (1 - column_weight) * values[row_next, column] + column_weight * values[row_next, column_next]
        latency = (1 - row_weight) * low**self.power + row_weight * high**self.power
        latency = latency * np.maximum(wanted_batch / self.batches[-1], 1.0)
        latency = latency * np.maximum(wanted_length / self.lengths[-1], 1.0) ** self.power
        known = self._known(row, column, column_next, column_weight) | (row_weight == 1)
        known &= self._known(row_next, column, column_next, column_weight) | (row_weight == 0)
        outside = (wanted_batch > self.batches[-1]) | (wanted_length > self.lengths[-1])
        outside |= (wanted_batch < self.batches[0]) | (wanted_length < self.lengths[0])
        return Lookup(latency, outside | ~known)

    def _known(
        self, row: NDArray[np.intp], column: NDArray[np.intp], column_next: NDArray[np.intp], weight: Floats
    ) -> Bools:
        """Whether every point that carries weight in this row was measured."""
        lower: Bools = self.measured[row, column] | (weight == 1)
        upper: Bools = self.measured[row, column_next] | (weight == 0)
        return lower & upper


def _bracket(points: Floats, wanted: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Index of the point at or below each wanted value, and the weight of the next; clamped to the ends."""
    clamped = np.clip(wanted, points[0], points[-1])
    index = np.clip(np.searchsorted(points, clamped, side="right") - 1, 0, max(len(points) - 2, 0))
    following = np.minimum(index + 1, len(points) - 1)
    width = np.where(following > index, points[following] - points[index], 1.0)
    return index, (clamped - points[index]) / width
