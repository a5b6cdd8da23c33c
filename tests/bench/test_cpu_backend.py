"""The CPU backend times every phase of every method; its bytes are those of the methods' laws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernels_cupy.problems import log_limits
from lab.bench.backend import Effort
from lab.bench.cpu_backend import CpuBackend, _flush_steps, _Layers, _log_limits, layer_bytes
from lab.bench.points import Point
from lab.cpu import SESSIONS
from lab.cpu.log_sessions import TreeLogSession
from lab.methods import get_method
from lab.methods.base import LayerHeads
from lab.methods.protocol import SessionSpec
from lab.methods.treelog import TreeLog
from lab.trees import DraftTree

BACKEND = CpuBackend()
SHORT = Effort(relative_spread=1.0, limit_s=0.0, min_samples=3, cycle_bytes=1)
TREES = {"root": DraftTree.chain(0), "chain": DraftTree.chain(3), "tree": DraftTree.from_widths((2, 2))}


def point(method: str, shape: str, dtype: str = "float32", batch: int = 3) -> Point:
    tree = TREES[shape]
    return Point(method, LayerHeads(1, 2, 32, 32, dtype), batch, tree, shape)


def runs(method: str, shape: str) -> bool:
    topology = get_method(method).topology
    return shape == "root" or (topology != "decode" and (shape == "chain" or topology == "tree"))


CASES = [(method, shape) for method in SESSIONS for shape in TREES if runs(method, shape)]


@pytest.mark.parametrize(("method", "shape"), CASES)
def test_every_phase_has_a_time(method: str, shape: str) -> None:
    where = point(method, shape)
    phases = BACKEND.phases(where)
    found = list(BACKEND.measure(where, phases, SHORT))
    assert [phase for phase, _, _ in found] == list(phases)
    assert phases[0] == "verify"
    assert phases[-1] == "step"
    for _, timer, timing in found:
        assert timer == "eager"
        assert 0 < timing.p20_us <= timing.p50_us <= timing.p80_us
        assert timing.samples >= 3


def test_a_bfloat16_state_is_timed_too() -> None:
    where = point("treelog", "chain", "bfloat16")
    assert len(list(BACKEND.measure(where, ("step",), SHORT))) == 1
    assert BACKEND.limits(where).state == 2e-2


def test_phases_are_the_launches_that_a_method_has() -> None:
    assert BACKEND.phases(point("recurrent", "root")) == ("verify", "step")
    assert BACKEND.phases(point("storeall", "chain")) == ("verify", "step")
    assert BACKEND.phases(point("storeall", "tree")) == ("verify", "commit", "step")
    assert BACKEND.phases(point("treewy", "tree")) == ("verify", "step")
    assert BACKEND.phases(point("treelog", "tree")) == ("verify", "flush", "step")
    assert BACKEND.phases(point("replayssm", "chain")) == ("verify", "flush", "step")


@pytest.mark.parametrize(("method", "shape"), CASES)
def test_bytes_follow_the_law_and_grow_with_the_batch(method: str, shape: str) -> None:
    small, large = point(method, shape, batch=1), point(method, shape, batch=4)
    law = get_method(method).phases(small.heads, small.tree, small.rows_committed)
    assert BACKEND.bytes_moved(small, "step") == pytest.approx(sum(phase.bytes for phase in law))
    for phase in BACKEND.phases(small):
        assert BACKEND.bytes_moved(small, phase) > 0
        assert BACKEND.bytes_moved(large, phase) == pytest.approx(4 * BACKEND.bytes_moved(small, phase))


def test_a_step_alternates_layers_and_its_requests_are_out_of_phase() -> None:
    where = point("treelog", "chain", batch=16)
    layers = _Layers(where, layers=3)
    before, call = layers.phase("step")
    counts = [session.log.count.copy() for session, _ in layers._layers]  # type: ignore[attr-defined]
    assert all(len(set(count.tolist())) > 3 for count in counts)
    turns = []
    for _ in range(6):
        before()
        turns.append(layers._turn)
        call()
    assert turns == [1, 2, 0, 1, 2, 0]


def test_a_step_flushes_as_often_as_the_law_says() -> None:
    where = point("treelog", "chain", batch=64)
    layers = _Layers(where, layers=1)
    before, call = layers.phase("step")
    session = layers._layers[0][0]
    flushes = 0
    rounds = 200
    for _ in range(rounds):
        before()
        flushes += int((session.log.count + where.tree.num_rows > 16).sum())  # type: ignore[attr-defined]
        call()
    assert flushes / rounds / 64 == pytest.approx(1 / _flush_steps(where), rel=0.1)


@pytest.mark.parametrize("drafts", [0, 3, 4, 7, 8, 15, 31])
def test_treelogs_log_is_the_same_in_the_law_the_sessions_and_the_bench(drafts: int) -> None:
    where = Point("treelog", LayerHeads(1, 2, 32, 32, "float32"), 1, DraftTree.chain(drafts), f"chain:{drafts}")
    spec = SessionSpec.for_tree(where.heads, where.tree, 1)
    policy = TreeLogSession(spec, np.zeros((1, 2, 32, 32)), [0]).policy
    capacity = TreeLog().log_rows(where.tree)
    assert (capacity, drafts + 1) == (policy.capacity, policy.reserve) == _log_limits(where)
    assert (capacity, drafts + 1) == log_limits("treelog", drafts + 1, drafts + 1), "as on the GPU"


def test_a_flush_reads_a_full_log_by_the_law() -> None:
    for dtype, record in (("float32", 4 * 64 + 2 * 32 + 8), ("bfloat16", 2 * 64 + 2 * 32 + 8)):
        where = point("treelog", "chain", dtype, batch=1)
        assert BACKEND.bytes_moved(where, "flush") == 2 * where.heads.state_bytes + 16 * record


def test_accepted_rows_have_the_mean_that_the_grid_assumes() -> None:
    for shape in TREES:
        where = point("treelog", shape, batch=4000)
        layers = _Layers(point("treelog", shape), layers=1)
        layers.point = where
        depth = np.array(where.tree.depth)[layers._accepted_rows()] + 1
        assert depth.mean() == pytest.approx(where.rows_committed, rel=0.03)


def test_verify_alone_never_flushes() -> None:
    layers = _Layers(point("treelog", "chain"), layers=1)
    before, call = layers.phase("verify")
    session = layers._layers[0][0]
    for _ in range(5):
        before()
        kept = session.log.count.copy()  # type: ignore[attr-defined]
        call()
        assert (session.log.count == kept).all()  # type: ignore[attr-defined]
        assert kept.min() > 0


def test_a_point_larger_than_the_memory_is_refused() -> None:
    assert BACKEND.refusal(point("treelog", "chain")) is None
    huge = Point("storeall", LayerHeads(16, 64, 128, 128, "float32"), 4096, DraftTree.chain(40), "chain:40")
    assert layer_bytes(huge) > 2**38
    assert "more than half of the memory" in str(BACKEND.refusal(huge))


def test_the_device_is_described() -> None:
    device = BACKEND.device()
    assert device["name"]
    assert device["cores"] >= 1
    assert device["memory_bytes"] > 2**30
    assert math.isfinite(BACKEND.copy_bandwidth(1 << 20))
