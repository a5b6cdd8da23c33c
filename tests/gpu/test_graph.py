"""A captured step reads, at every replay, what its operands hold then; memory of other frameworks is used in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels_cupy import reference
from kernels_cupy.gate import DECODING
from kernels_cupy.sessions import SESSIONS, CudaSession
from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, SessionSpec
from lab.trees import DraftTree

pytestmark = pytest.mark.gpu

HEADS = LayerHeads(2, 4, 128, 128, "float32")
BATCH = 3
#: Method and tree: a chain where the method takes no other.
CASES = [
    *((method, DraftTree.chain(0)) for method in DECODING),
    ("storeall", DraftTree.chain(3)), ("replayssm", DraftTree.chain(3)),
    *((method, DraftTree.from_widths([2, 2])) for method in ("storeall", "treewy", "bole", "treelog")),
]  # fmt: skip


def random_operands(cp: Any, tree: DraftTree, seed: int) -> Operands:
    parents = np.tile(tree.parent_array(), (BATCH, 1))
    return reference.random_operands(cp, np.random.default_rng(seed), BATCH, tree.num_rows, HEADS, parents)


def make(cp: Any, method: str, tree: DraftTree) -> CudaSession:
    initial = np.random.default_rng(4).standard_normal((BATCH + 1, 4, 128, 128), np.float32)
    spec = SessionSpec.for_tree(HEADS, tree, BATCH, log_rows=6 if method == "treelog" else 0)
    return SESSIONS[method](spec, cp.asarray(initial), np.array([2, 0, 3], np.int32))


@pytest.mark.parametrize(("method", "tree"), CASES)
def test_replays_read_new_operands_accepted_rows_and_cursors(cp: Any, method: str, tree: DraftTree) -> None:
    rng = np.random.default_rng(3)
    captured, eager = make(cp, method, tree), make(cp, method, tree)
    operands, accepted = random_operands(cp, tree, 0), cp.full(BATCH, -1, np.int32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        for _ in range(2):  # loads the kernels and fills the memory pool; commits nothing
            captured.verify(operands)
            captured.commit(accepted)
        captured.pool[...] = eager.pool  # recurrent commits all the same
        stream.begin_capture()
        captured.verify(operands)
        captured.commit(accepted)
        graph = stream.end_capture()
    for step in range(8):
        fresh = random_operands(cp, tree, 10 + step)
        rows = cp.asarray(rng.integers(-1, tree.num_rows, BATCH).astype(np.int32))
        cp.cuda.Device().synchronize()  # what this stream made, the other one reads
        with stream:
            for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias"):
                getattr(operands, name)[...] = getattr(fresh, name)
            accepted[...] = rows
            graph.launch(stream)
        stream.synchronize()
        expected = eager.verify(fresh)
        eager.commit(rows)
        cp.cuda.Device().synchronize()
        assert bool((captured.outputs == expected).all()), f"outputs of replay {step}"
    for request in range(BATCH):
        np.testing.assert_array_equal(captured.materialise(request), eager.materialise(request))


@pytest.mark.parametrize(("method", "tree"), CASES)
def test_torch_tensors_are_used_in_place(cp: Any, method: str, tree: DraftTree) -> None:
    torch = pytest.importorskip("torch")
    operands = random_operands(cp, tree, 1)
    expected = make(cp, method, tree).verify(operands)
    tensors = {name: torch.from_dlpack(getattr(operands, name).view(np.int16)) for name in "qkvab"}
    packed = torch.cat([tensors[name].flatten(2) for name in "qkv"], dim=2)  # one row as the convolution leaves it
    widths = [tensors[name].flatten(2).shape[2] for name in "qkv"]
    q, k, v = (
        part.unflatten(2, tensors[name].shape[2:])
        for name, part in zip("qkv", packed.split(widths, dim=2), strict=True)
    )
    same = Operands(q, k, v, tensors["a"], tensors["b"], operands.A_log, operands.dt_bias, operands.parent)
    found = make(cp, method, tree).verify(same)
    assert bool((found == expected).all())


def test_operands_that_would_be_misread_are_refused(cp: Any) -> None:
    tree = DraftTree.chain(3)
    operands = random_operands(cp, tree, 2)
    wrong = {
        "A_log is float64": replace(operands, A_log=operands.A_log.astype(np.float64)),
        "parent is int64": replace(operands, parent=operands.parent.astype(np.int64)),
        "a and b have types": replace(operands, a=operands.a.astype(np.float32)),
        "a has strides": replace(operands, a=cp.asfortranarray(operands.a)),
        "q has type": replace(operands, q=operands.q.astype(np.float32)),
    }
    for words, bad in wrong.items():
        for method in ("storeall", "treelog"):
            with pytest.raises(UsageError, match=words):
                make(cp, method, tree).verify(bad)
