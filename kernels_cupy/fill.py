"""Numbers that fill the layers of a measurement: random bits of ordinary sizes, one array for all layers.

The layers are slices of it, so that filling takes as many launches for hundreds of small layers as for one large one.
Small arrays are kept 512 bytes apart: a layer must not find its gates in the cache because the one before read its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands

#: Numbers that are made before they repeat, a prime: no two requests or layers near each other hold the same ones.
PERIOD = 4_194_301
#: Bytes that a layer's gates, A_log and dt_bias start at a multiple of.
ALIGNED = 512


def layer_states(cp: Any, seed: int, layers: int, slots: int, heads: LayerHeads) -> list[Any]:
    """Random dense states `[slots, HV, V, K]` of each layer in their storage type, all of them bfloat16 numbers."""
    shape = (layers, slots, heads.value_heads, heads.value_dim, heads.key_dim)
    bits = random_bits(cp, seed, shape)
    if heads.state_dtype != "bfloat16":
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    return _slices(_repeated(cp, bits, shape))


def layer_operands(cp: Any, seed: int, layers: int, batch: int, rows: int, heads: LayerHeads) -> list[Operands]:
    """Operands of each layer as the convolution leaves them: q, k and v packed row by row; gates bf16.

    A_log and dt_bias are zero.
    """
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    wide, count = (layers, batch, rows, 2 * keys + values), batch * rows * heads.value_heads
    narrow = (layers, _padded(2 * count, 2))
    packed = _slices(_repeated(cp, random_bits(cp, seed + 101, wide), wide))
    gates = _slices(_repeated(cp, random_bits(cp, seed + 202, narrow), narrow))
    constants = cp.zeros((layers, 2, _padded(heads.value_heads, 4)), np.float32)
    return [
        Operands(
            x[..., :keys].reshape(batch, rows, heads.key_heads, heads.key_dim),
            x[..., keys : 2 * keys].reshape(batch, rows, heads.key_heads, heads.key_dim),
            x[..., 2 * keys :].reshape(batch, rows, heads.value_heads, heads.value_dim),
            both[:count].reshape(batch, rows, -1), both[count : 2 * count].reshape(batch, rows, -1),
            zeros[0, : heads.value_heads], zeros[1, : heads.value_heads], None,
        )
        for x, both, zeros in zip(packed, gates, _slices(constants), strict=True)
    ]  # fmt: skip


def layer_outputs(cp: Any, layers: int, batch: int, rows: int, heads: LayerHeads) -> list[Any]:
    """Room for the outputs `[B, N, HV, V]` of each layer, as bfloat16 bits."""
    return _slices(cp.empty((layers, batch, rows, heads.value_heads, heads.value_dim), np.uint16))


def random_bits(cp: Any, seed: int, shape: tuple[int, ...]) -> Any:
    """bfloat16 numbers of random sign and mantissa with sizes from 1/8 to 1, as bits, hashed from their place.

    They are as many as `shape` holds, `PERIOD` at most.
    """
    count = min(int(np.prod(shape)), PERIOD)
    x = cp.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed * 40503 + 12345)
    x ^= x >> 15
    x *= np.uint32(2246822519)
    x ^= x >> 13
    sign, rest = (x >> 16) & 0x8000, x & 0xFF
    return (sign + 0x3E00 + (x >> 8 & 0x80) + rest % 0x80 + (x >> 17 & 0x80)).astype(np.uint16)


def _repeated(cp: Any, numbers: Any, shape: tuple[int, ...]) -> Any:
    """An array of that shape, filled with the numbers again and again."""
    filled = cp.empty(shape, numbers.dtype)
    flat, period = filled.reshape(-1), len(numbers)
    times, rest = divmod(flat.size, period)
    flat[: times * period].reshape(times, period)[...] = numbers
    if rest:
        flat[-rest:] = numbers[:rest]
    return filled


def _padded(count: int, itemsize: int) -> int:
    """`count` numbers and what is free up to the next multiple of `ALIGNED` bytes."""
    step = ALIGNED // itemsize
    return -(-count // step) * step


def _slices(array: Any) -> list[Any]:
    return [array[layer] for layer in range(len(array))]
