"""Small Numba functions that both kernel families share: gates, norms, dot products, rows of a state in
either type.

All arithmetic is float32. The fast-math set allows vectorised sums but keeps NaN and infinity meaningful.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

#: Reductions may be reassociated (vectorised); NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


class Inputs(NamedTuple):
    """Contiguous float32 arrays: q, k `[B, N, HK, K]`, v `[B, N, HV, V]`, a, b `[B, N, HV]`, A_log, dt_bias `[HV]`."""

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any


@njit(fastmath=FASTMATH, cache=True)
def gate(a: Any, b: Any, A_log: Any, dt_bias: Any) -> Any:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) and write strength beta = sigmoid(b) of one row and
    head."""
    x = a + dt_bias
    softplus = x if x > np.float32(20) else np.log1p(np.exp(x))
    beta = np.float32(1) / (np.float32(1) + np.exp(-b))
    return -np.exp(A_log) * softplus, beta


@njit(fastmath=FASTMATH, cache=True)
def dot(x: Any, y: Any) -> Any:
    """Inner product of two float32 vectors."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@njit(fastmath=FASTMATH, cache=True)
def axpy(weight: Any, x: Any, y: Any) -> None:
    """y += weight x, in place."""
    for i in range(len(x)):
        y[i] += weight * x[i]


@njit(cache=True)
def copy(x: Any, y: Any) -> None:
    """y = x for vectors of one length; compiles far faster than a checked slice assignment."""
    for i in range(len(x)):
        y[i] = x[i]


@njit(fastmath=FASTMATH, cache=True)
def unit_rows(x: Any, eps: Any, scale: Any, out: Any) -> None:
    """out[t] = scale x[t] / sqrt(sum(x[t]^2) + eps) for rows `[N, K]`."""
    for t in range(len(x)):
        factor = scale / np.sqrt(dot(x[t], x[t]) + eps)
        for i in range(x.shape[1]):
            out[t, i] = factor * x[t, i]


@njit(cache=True)
def _rounded_bits(bits: Any) -> Any:
    """Upper half of float32 bits after rounding to nearest even; NaN stays NaN."""
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint32(0x7FC0)
    return np.uint32((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(cache=True)
def round_to_bf16(rows: Any) -> None:
    """Round a contiguous float32 array `[N, X]` to bfloat16 values in place."""
    bits = rows.view(np.uint32)
    for t in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            bits[t, i] = _rounded_bits(bits[t, i]) << np.uint32(16)


@njit(cache=True)
def load_row(stored: Any, row: Any) -> None:
    """One row `[K]` of a state into a float32 buffer; `stored` holds float32 values or bfloat16 bits
    (uint16)."""
    if stored.itemsize == 2:
        bits = row.view(np.uint32)
        for i in range(len(row)):
            bits[i] = np.uint32(stored[i]) << np.uint32(16)
    else:
        for i in range(len(row)):
            row[i] = stored[i]


@njit(cache=True)
def store_row(row: Any, stored: Any) -> None:
    """One row `[K]` of a state from its float32 buffer, rounded to bfloat16 bits where the pool holds
    those."""
    if stored.itemsize == 2:
        bits = row.view(np.uint32)
        for i in range(len(row)):
            stored[i] = _rounded_bits(bits[i])
    else:
        for i in range(len(row)):
            stored[i] = row[i]
