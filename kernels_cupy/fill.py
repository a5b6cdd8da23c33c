"""Numbers that fill the layers of a measurement: random bits of ordinary sizes, one array for all layers.

The layers are slices of it, so that filling takes as many launches for hundreds of small layers as for one large one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands

#: Numbers that are made before they repeat, a prime: no two requests or layers near each other hold the same ones.
PERIOD = 4_194_301


def layer_states(cp: Any, seed: int, layers: int, slots: int, heads: LayerHeads) -> list[Any]:
    """Random dense states `[slots, HV, V, K]` of each layer in their storage type, all of them bfloat16 numbers."""
    shape = (layers, slots, heads.value_heads, heads.value_dim, heads.key_dim)
    bits = random_bits(cp, seed, shape)
    if heads.state_dtype != "bfloat16":
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    return _slices(_repeated(cp, bits, shape))


def layer_operands(cp: Any, seed: int, layers: int, batch: int, rows: int, heads: LayerHeads) -> list[Operands]:
    """Operands of each layer as the convolution leaves them: q, k and v packed row by row; gates bf16."""
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    wide, narrow = (layers, batch, rows, 2 * keys + values), (layers, 2, batch, rows, heads.value_heads)
    packed = _slices(_repeated(cp, random_bits(cp, seed + 101, wide), wide))
    a_and_b = _slices(_repeated(cp, random_bits(cp, seed + 202, narrow), narrow))
    nothing = cp.zeros(heads.value_heads, np.float32)
    return [
        Operands(
            x[..., :keys].reshape(batch, rows, heads.key_heads, heads.key_dim),
            x[..., keys : 2 * keys].reshape(batch, rows, heads.key_heads, heads.key_dim),
            x[..., 2 * keys :].reshape(batch, rows, heads.value_heads, heads.value_dim),
            gates[0], gates[1], nothing, nothing, None,
        )
        for x, gates in zip(packed, a_and_b, strict=True)
    ]  # fmt: skip


def layer_outputs(cp: Any, layers: int, batch: int, rows: int, heads: LayerHeads) -> list[Any]:
    """Room for the outputs `[B, N, HV, V]` of each layer, as bfloat16 bits."""
    return _slices(cp.empty((layers, batch, rows, heads.value_heads, heads.value_dim), np.uint16))


def random_bits(cp: Any, seed: int, shape: tuple[int, ...]) -> Any:
    """bfloat16 numbers of random sign and mantissa with sizes from 1/8 to 1, as bits: as many as `shape` holds, or a
    period of them; hashed from their place.
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


def _slices(array: Any) -> list[Any]:
    return [array[layer] for layer in range(len(array))]
