"""The numbers that fill a measurement's layers, with NumPy in CuPy's place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels_cupy import fill
from kernels_cupy.fill import PERIOD, layer_operands, layer_outputs, layer_states, random_bits
from lab.bf16 import from_bits
from lab.methods.base import LayerHeads

HEADS = LayerHeads(2, 4, 64, 64, "float32")


def test_numbers_are_finite_bfloat16_of_both_signs_from_an_eighth_to_one() -> None:
    numbers = from_bits(random_bits(np, 7, (4, 50_000)))
    assert len(numbers) == 200_000
    assert (np.abs(numbers).min(), np.abs(numbers).max()) == (0.125, pytest.approx(1, rel=1e-2))
    assert np.mean(numbers > 0) == pytest.approx(0.5, abs=0.01)
    assert len(np.unique(numbers)) > 500


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_every_request_of_every_layer_has_a_state_of_its_own(state_dtype: str) -> None:
    heads = LayerHeads(2, 4, 64, 64, state_dtype)
    layers = layer_states(np, 0, 3, 5, heads)
    assert [layer.shape for layer in layers] == [(5, 4, 64, 64)] * 3
    assert {layer.dtype for layer in layers} == {np.dtype(np.uint16 if state_dtype == "bfloat16" else np.float32)}
    assert len({state.tobytes() for layer in layers for state in layer}) == 15
    values = np.stack(layers) if state_dtype == "float32" else from_bits(np.stack(layers))
    assert (np.abs(values).min(), np.abs(values).max()) == (0.125, pytest.approx(1, rel=1e-2))


def test_numbers_repeat_after_a_period_and_fill_all(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, sizes = LayerHeads(1, 1, 64, 64, "bfloat16"), []
    for period in (1 << 20, 8191, 4096):
        monkeypatch.setattr(fill, "PERIOD", period)
        flat = np.stack(layer_states(np, 0, 3, 2, heads)).reshape(-1)
        sizes.append(len(flat))
        assert (flat[period:] == flat[:-period] if period < len(flat) else flat != 0).all()
    assert set(sizes) == {3 * 2 * 64 * 64}
    assert all(PERIOD % divisor for divisor in range(2, 2049)), "a prime: no size divides it"


def test_operands_are_rows_of_q_k_and_v_side_by_side() -> None:
    layers = layer_operands(np, 0, 3, 5, 7, HEADS)
    pitch = 2 * (2 * 2 * 64 + 4 * 64)
    for x in layers:
        assert (x.q.shape, x.k.shape, x.v.shape) == ((5, 7, 2, 64), (5, 7, 2, 64), (5, 7, 4, 64))
        assert {array.strides[1] for array in (x.q, x.k, x.v)} == {pitch}
        assert x.k.ctypes.data - x.q.ctypes.data == 2 * 2 * 64
        assert x.a.shape == x.b.shape == (5, 7, 4)
        assert x.a.flags.c_contiguous
        assert x.b.flags.c_contiguous
        assert not (x.a == x.b).all()
    assert len({array.tobytes() for x in layers for array in (x.q, x.k, x.a, x.b)}) == 12
    assert {array.dtype for x in layers for array in (x.q, x.k, x.v, x.a, x.b)} == {np.dtype(np.uint16)}
    first, second = (layers[i].q.ctypes.data for i in (0, 1))
    assert second - first == 5 * 7 * pitch, "one array for all layers"


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 3), (5, 7)])
def test_layers_share_no_line_of_a_cache(batch: int, rows: int) -> None:
    heads = LayerHeads(2, 8, 64, 64, "float32")
    layers = layer_operands(np, 0, 3, batch, rows, heads)
    for names in (("q", "k", "v"), ("a", "b"), ("A_log",), ("dt_bias",)):
        spans = []
        for x in layers:
            arrays = [getattr(x, name) for name in names]
            bounds = [np.lib.array_utils.byte_bounds(array) for array in arrays]
            spans.append((min(low for low, _ in bounds), max(high for _, high in bounds)))
        first = spans[0][0]
        assert all((low - first) % fill.ALIGNED == 0 for low, _ in spans)
        assert all(high <= low for (_, high), (low, _) in pairwise(spans))
    assert {x.A_log.shape for x in layers} == {(8,)}
    assert not any(x.A_log.any() or x.dt_bias.any() for x in layers)


def test_outputs_of_layers_do_not_overlap() -> None:
    outputs = layer_outputs(np, 2, 5, 7, HEADS)
    assert [each.shape for each in outputs] == [(5, 7, 4, 64)] * 2
    assert not np.shares_memory(*outputs)
