"""Verify attention on the GPU: against float64, and what a captured launch reads at its replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels_cupy.arrays import NAN_BITS, host_floats
from kernels_cupy.attention import HEAD_DIM, VerifyAttention
from kernels_cupy.attention_gate import LIMIT, Case, cases, run
from kernels_cupy.timer import graph_of
from lab.bf16 import to_bits
from lab.errors import UsageError
from lab.trees import DraftTree

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", list(cases(quick=True)), ids=lambda case: case.name)
def test_outputs_are_those_of_float64(cp: Any, case: Case) -> None:
    assert run(case) <= LIMIT


def operands(cp: Any, lengths: list[int], rows: int) -> list[Any]:
    rng = np.random.default_rng(5)
    k, v = (cp.asarray(to_bits(rng.standard_normal((8, 64, 2, HEAD_DIM), np.float32))) for _ in range(2))
    q = cp.asarray(to_bits(rng.standard_normal((len(lengths), rows, 8, HEAD_DIM), np.float32)))
    table = cp.asarray(np.arange(8, dtype=np.int32).reshape(len(lengths), -1))
    masks = cp.asarray(DraftTree.chain(rows - 1).mask_array()[None])
    return [q, k, v, table, cp.asarray(np.array(lengths, np.int32)), masks, cp.full(q.shape, NAN_BITS, np.uint16)]


def test_a_replay_reads_lengths_and_masks_anew(cp: Any) -> None:
    arrays = operands(cp, [100, 37], rows=4)
    attention = VerifyAttention(*arrays)
    graph, stream = graph_of(attention)
    arrays[4][...] = cp.asarray(np.array([201, 250], np.int32))
    arrays[5][...] = cp.asarray(DraftTree.from_widths([3]).mask_array()[None])
    arrays[6][...] = NAN_BITS
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    replayed = arrays[6].copy()
    arrays[6][...] = NAN_BITS
    VerifyAttention(*arrays)()
    np.testing.assert_array_equal(cp.asnumpy(replayed), cp.asnumpy(arrays[6]))
    assert np.isfinite(host_floats(replayed)).all()


def test_two_runs_agree_to_the_bit(cp: Any) -> None:
    arrays = operands(cp, [256, 250], rows=16)
    attention = VerifyAttention(*arrays)
    attention()
    first = cp.asnumpy(arrays[6])
    arrays[6][...] = NAN_BITS
    attention()
    np.testing.assert_array_equal(first, cp.asnumpy(arrays[6]))


def test_pages_must_hold_groups_of_16_tokens(cp: Any) -> None:
    arrays = operands(cp, [30, 30], rows=2)
    arrays[1], arrays[2] = arrays[1][:, :60], arrays[2][:, :60]
    with pytest.raises(UsageError, match="multiple of 16"):
        VerifyAttention(*arrays)
