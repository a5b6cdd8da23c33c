"""Device arrays: views of other frameworks' memory, row pitches, bfloat16 bits on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_cupy.compiler import load_cupy
from lab.bf16 import from_bits
from lab.errors import UsageError
from lab.methods.protocol import Operands

#: Bits of a bfloat16 NaN.
NAN_BITS = 0x7FC0


def as_device(x: Any) -> Any:
    """A CuPy array of `x` without a copy where `x` is on the GPU (CuPy, `__cuda_array_interface__`, DLPack).

    bfloat16 tensors of other frameworks come as 16-bit integers: pass `tensor.view(torch.int16)`.
    """
    cp = load_cupy()
    if isinstance(x, cp.ndarray):
        return x
    if not hasattr(x, "__cuda_array_interface__") and not isinstance(x, np.ndarray) and hasattr(x, "__dlpack__"):
        return cp.from_dlpack(x)
    return cp.asarray(x)


def bf16_operand(x: Any, name: str) -> Any:
    """bfloat16 bits `[B, N, heads, width]` on the GPU, heads and width contiguous."""
    x = as_device(x)
    if x.dtype == np.int16:
        x = x.view(np.uint16)
    if x.dtype != np.uint16:
        raise UsageError(f"operand {name} has type {x.dtype}; bfloat16 bits as uint16 are needed (lab.bf16.to_bits)")
    row_pitch(x, name)
    return x


def row_pitch(x: Any, name: str) -> int:
    """Elements from one row to the next of `[B, N, heads, width]`, which may be a slice of a packed buffer."""
    batch, rows, heads, width = x.shape
    item = x.itemsize
    pitch = x.strides[1] // item if rows > 1 or batch > 1 else heads * width
    if rows == 1 and batch > 1:
        pitch = x.strides[0] // item
    fits = (width == 1 or x.strides[3] == item) and (heads == 1 or x.strides[2] == width * item)
    even = batch == 1 or rows == 1 or x.strides[0] == rows * x.strides[1]
    if not fits or not even or pitch % 8 or x.data.ptr % 16:
        raise UsageError(
            f"operand {name} has strides {x.strides}; heads and width must be contiguous, "
            "rows evenly spaced and 16-byte aligned"
        )
    return int(pitch)


def gate_operands(operands: Operands) -> tuple[Any, Any]:
    """a and b `[B, N, HV]`, both float32 or both bfloat16 bits, in place: a captured graph reads them again."""
    found = []
    for name in ("a", "b"):
        x = as_device(getattr(operands, name))
        if x.dtype == np.int16:
            x = x.view(np.uint16)
        if x.dtype not in (np.float32, np.uint16):
            raise UsageError(f"operand {name} has type {x.dtype}; float32 or bfloat16 bits as uint16 are needed")
        if not x.flags.c_contiguous:
            raise UsageError(f"operand {name} has strides {x.strides}; a contiguous array is needed")
        found.append(x)
    if found[0].dtype != found[1].dtype:
        raise UsageError(f"operands a and b have types {found[0].dtype} and {found[1].dtype}; one type is needed")
    return found[0], found[1]


def state_bits(states: Any, state_dtype: str) -> Any:
    """A copy of dense states on the GPU in their storage type (float32, or bfloat16 bits)."""
    cp = load_cupy()
    if state_dtype == "float32":
        return cp.array(states, dtype=np.float32, order="C")
    single = cp.asarray(states, dtype=np.float32)
    bits = cp.ascontiguousarray(single).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return cp.where(cp.isnan(single), np.uint16(NAN_BITS), rounded)


def host_floats(x: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 values on the host of a device array of float32 or bfloat16 bits."""
    host = load_cupy().asnumpy(x)
    return from_bits(host) if host.dtype == np.uint16 else host.astype(np.float32, copy=False)


def nan_bits(shape: tuple[int, ...]) -> Any:
    return load_cupy().full(shape, NAN_BITS, np.uint16)
