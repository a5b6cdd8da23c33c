"""bfloat16 without a bfloat16 type: the upper half of a float32, as NumPy arrays of bits or of rounded
values.

A bfloat16 number travels as `uint16` bits where its two bytes count (state pools, operands on a GPU) and as a
float32 that is exactly representable where only its value counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """bfloat16 bits of `values`, rounded to nearest even; NaN stays NaN."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits."""
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_bf16(values: NDArray[Any]) -> NDArray[np.float32]:
    """`values` rounded to the nearest bfloat16, as float32."""
    return from_bits(to_bits(values))
