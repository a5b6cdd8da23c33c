"""A captured step reads, at every replay, what its operands hold then; memory of other frameworks is used in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels_cupy import reference
from kernels_cupy.closed_form import Fold, Layer, Log, Verification, tree_masks
from kernels_cupy.compiler import load_cupy
from kernels_cupy.gate import dense_states, state_error
from kernels_cupy.sessions import SESSIONS
from lab.errors import MissingError
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, SessionSpec
from lab.trees import DraftTree

pytestmark = pytest.mark.gpu

HEADS = LayerHeads(2, 4, 128, 128, "float32")
TREE = DraftTree.from_widths([2, 2])
BATCH = 3


@pytest.fixture
def cp() -> Any:
    try:
        return load_cupy()
    except MissingError as error:
        pytest.skip(str(error))


def random_operands(cp: Any, seed: int) -> Operands:
    parents = np.tile(TREE.parent_array(), (BATCH, 1))
    return reference.random_operands(cp, np.random.default_rng(seed), BATCH, TREE.num_rows, HEADS, parents)


def copy_into(target: Operands, source: Operands) -> None:
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias"):
        getattr(target, name)[...] = getattr(source, name)


def test_replays_read_new_operands_accepted_rows_and_cursors(cp: Any) -> None:
    rng = np.random.default_rng(3)
    initial = cp.asarray(rng.standard_normal((BATCH, 4, 128, 128), np.float32))
    operands = random_operands(cp, 0)
    slots = cp.arange(BATCH, dtype=np.int32)
    accepted = cp.zeros(BATCH, np.int32)
    masks = tree_masks(operands.parent)
    log = Log(BATCH, TREE.num_rows, capacity=6, reserve=3)
    layer = Layer(initial.copy(), HEADS, BATCH, log.record_rows)
    output = cp.zeros((BATCH, TREE.num_rows, 4, 128), np.uint16)
    verify = Verification(layer, slots, operands, masks, output, log)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        log.advance(accepted, masks)  # loads the kernel; with an empty log and no rows it is undone below
        verify()
        stream.synchronize()
        log.length.fill(0)
        log.row_list[...] = cp.arange(log.record_rows, dtype=np.int32)
        layer.pool[...] = initial
        stream.begin_capture()
        verify()
        log.advance(accepted, masks)
        graph = stream.end_capture()

    spec = SessionSpec(HEADS, BATCH, TREE.num_rows, 3, False, log_rows=6)
    session = SESSIONS["treelog"](spec, initial, np.arange(BATCH, dtype=np.int32))
    for step in range(6):
        fresh = random_operands(cp, 10 + step)
        rows = rng.integers(-1, TREE.num_rows, BATCH).astype(np.int32)
        cp.cuda.Device().synchronize()  # what this stream made, the other one reads
        with stream:
            copy_into(operands, fresh)
            accepted[...] = cp.asarray(rows)
            graph.launch(stream)
        stream.synchronize()
        expected = session.verify(fresh)
        session.commit(cp.asarray(rows))
        cp.cuda.Device().synchronize()
        assert bool((output == expected).all()), f"outputs of replay {step}"
        assert log.length.get().tolist() == session.log.length.get().tolist()
    fold = Fold([layer], slots, TREE.num_rows)
    fold.log(log)
    session.flush()
    live = np.arange(BATCH)
    assert float(state_error(cp, layer.pool, dense_states(cp, session, live)).max()) == 0


def test_torch_tensors_are_used_in_place(cp: Any) -> None:
    torch = pytest.importorskip("torch")
    operands = random_operands(cp, 1)
    initial = np.random.default_rng(4).standard_normal((BATCH, 4, 128, 128), np.float32)
    spec = SessionSpec.for_tree(HEADS, TREE, BATCH)
    slots = np.arange(BATCH, dtype=np.int32)
    expected = SESSIONS["bole"](spec, initial, slots).verify(operands)
    tensors = {name: torch.from_dlpack(getattr(operands, name).view(np.int16)) for name in "qkvab"}
    packed = torch.cat([tensors[name].flatten(2) for name in "qkv"], dim=2)  # one row as the convolution leaves it
    widths = [tensors[name].flatten(2).shape[2] for name in "qkv"]
    q, k, v = (
        part.unflatten(2, tensors[name].shape[2:])
        for name, part in zip("qkv", packed.split(widths, dim=2), strict=True)
    )
    same = Operands(q, k, v, tensors["a"], tensors["b"], operands.A_log, operands.dt_bias, operands.parent)
    found = SESSIONS["bole"](spec, initial, slots).verify(same)
    assert bool((found == expected).all())
