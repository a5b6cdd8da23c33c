"""The CUDA backend's adapter: phases, bytes and layers without a GPU; see tests/gpu for one with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels_cupy import choice, device, passes
from kernels_cupy.choice import place_of
from kernels_cupy.passes import PASS_LAYERS, allocated_bytes, pass_layers
from kernels_cupy.plans import MAX_SHARED_BYTES, VerifyPlan
from kernels_cupy.steps import CUDA_METHODS, Shape
from lab.bench import cuda_backend
from lab.bench.backend import Effort
from lab.bench.cuda_backend import GATE_BATCH, POOL_BYTES, CudaBackend, problem_of
from lab.bench.points import Point
from lab.bench.reference import References
from lab.bf16 import from_bits, to_bits
from lab.cpu import SESSIONS
from lab.errors import MissingError
from lab.methods import get_method
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, SessionSpec
from lab.profiles.plans import PlanRow, PlanTable
from lab.trees import DraftTree, parse_tree

HAS_CUPY = importlib.util.find_spec("cupy") is not None
HEADS = LayerHeads(16, 32, 128, 128, "float32")
TREES = {"root": DraftTree.chain(0), "chain": DraftTree.chain(3), "tree": DraftTree.from_widths((2, 2))}
EFFORT = Effort(min_samples=3, limit_s=0.01)


def point(method: str, shape: str, batch: int = 8, heads: LayerHeads = HEADS) -> Point:
    return Point(method, heads, batch, TREES[shape], shape)


def cases() -> list[tuple[str, str]]:
    found = []
    for method in CUDA_METHODS:
        topology = get_method(method).topology
        found += [
            (method, shape)
            for shape in TREES
            if shape == "root" or (topology != "decode" and (shape == "chain" or topology == "tree"))
        ]
    return found


class HostSession(SESSIONS["treelog"]):  # type: ignore[misc]
    """A CPU session that takes and returns bfloat16 bits, as a CUDA session does."""

    made: list[HostSession] = []  # noqa: RUF012
    plan: VerifyPlan | None = None

    def __init__(self, spec: SessionSpec, states: Any, indices: Any) -> None:
        super().__init__(spec, states, indices)
        self.made.append(self)

    def verify(self, operands: Operands) -> Any:
        floats = {name: from_bits(getattr(operands, name)) for name in ("q", "k", "v", "a", "b")}
        rest = {name: getattr(operands, name) for name in ("A_log", "dt_bias", "parent")}
        return to_bits(super().verify(Operands(**floats, **rest)))


class FakeStep:
    """Layers whose phases only write down that they were launched."""

    made: list[tuple[Shape, int]] = []  # noqa: RUF012
    plans: list[VerifyPlan | None] = []  # noqa: RUF012
    launched: list[str] = []  # noqa: RUF012

    def __init__(self, shape: Shape, layers: int, plan: VerifyPlan | None) -> None:
        self.made.append((shape, layers))
        self.plans.append(plan)
        self.phases: dict[str, Callable[[], None]] = {
            name: partial(self.launched.append, name) for name in ("verify", "commit", "flush", "step")
        }
        self.chained_step = partial(self.launched.append, "chained step")

    def release(self) -> None:
        self.phases.clear()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NumPy in place of CuPy: 50 MB of L2, 100 GB free, a timer that tells what it was given."""
    pool = SimpleNamespace(free_bytes=lambda: 0)
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(attributes={"L2CacheSize": 50_000_000}),
        runtime=SimpleNamespace(memGetInfo=lambda: (100_000_000_000, 140_000_000_000)),
    )
    cp = SimpleNamespace(asarray=np.asarray, get_default_memory_pool=lambda: pool, cuda=cuda)
    timed: list[tuple[str, int]] = []

    def time_with(kind: str) -> Callable[..., list[float]]:
        def run(launch: Callable[[], None], enough: Callable[..., bool], calls: int) -> list[float]:
            launch()
            timed.append((kind, calls))
            return [1000.0] * 5

        return run

    monkeypatch.setattr(cuda_backend, "load_cupy", lambda: cp)
    monkeypatch.setattr(device, "load_driver", lambda: None)
    monkeypatch.setattr(device, "chains_here", lambda: True)
    monkeypatch.setattr(cuda_backend, "chains_here", lambda: True)
    monkeypatch.setattr(device, "load_cupy", lambda: cp)
    monkeypatch.setattr(passes, "load_cupy", lambda: cp)
    monkeypatch.setattr(choice, "gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(choice, "multiprocessors", lambda: 132)
    monkeypatch.setattr(choice, "shared_bytes_per_cta", lambda: MAX_SHARED_BYTES)
    monkeypatch.setattr(choice, "has_warpgroups", lambda: False)
    monkeypatch.setattr(cuda_backend, "Step", FakeStep)
    monkeypatch.setattr(cuda_backend, "host_floats", from_bits)
    monkeypatch.setattr(cuda_backend.timer, "time_graph", time_with("graph"))
    monkeypatch.setattr(cuda_backend.timer, "time_eager", time_with("eager"))
    FakeStep.made.clear()
    FakeStep.plans.clear()
    FakeStep.launched.clear()
    return timed


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed")
def test_without_cupy_the_backend_says_how_to_get_it() -> None:
    with pytest.raises(MissingError, match="pip install -e"):
        CudaBackend()


@pytest.mark.parametrize(("method", "shape"), cases())
def test_every_phase_moves_bytes_and_is_timed_per_layer(fake_gpu: Any, method: str, shape: str) -> None:
    backend, where = CudaBackend(), point(method, shape)
    phases = backend.phases(where)
    found = list(backend.measure(where, phases, EFFORT))
    ((made, layers),) = FakeStep.made
    assert [(phase, name) for phase, name, _ in found] == [*((phase, "graph") for phase in phases), ("step", "chained")]
    assert FakeStep.launched == [*phases, "chained step"]
    assert {timing.p50_us for _, _, timing in found} == {1000.0 / layers}
    assert layers * made.layer_bytes() >= 110_000_000
    assert all(backend.bytes_moved(where, phase) > 0 for phase in phases)


def test_a_sample_of_a_step_covers_a_whole_cycle_of_the_log(fake_gpu: Any) -> None:
    backend, where = CudaBackend(eager=True), point("treelog", "chain")
    list(backend.measure(where, ("verify", "step"), EFFORT))
    shape = Shape("treelog", HEADS, 8, TREES["chain"])
    assert set(shape.committed().tolist()) == {2, 3}, "60 % of 4 rows"
    assert sorted(set(shape.cycles().tolist())) == [5, 7]
    assert fake_gpu == [("graph", 1), ("eager", 1), ("graph", 35), ("graph", 35), ("eager", 35)]
    assert FakeStep.launched == ["verify", "verify", "step", "chained step", "step"]


def test_requests_of_a_large_batch_flush_out_of_phase_so_one_step_is_a_sample(fake_gpu: Any) -> None:
    list(CudaBackend().measure(point("treelog", "tree", batch=256), ("step",), EFFORT))
    assert fake_gpu == [("graph", 1)] * 2


def test_phases_are_the_launches_that_the_kernels_have(fake_gpu: Any) -> None:
    backend = CudaBackend()
    assert backend.phases(point("storeall", "chain")) == ("verify", "step")
    assert backend.phases(point("storeall", "tree")) == ("verify", "commit", "step")
    assert backend.phases(point("bole", "tree")) == ("verify", "commit", "step")
    assert backend.phases(point("treewy", "tree")) == ("verify", "step")
    assert backend.phases(point("treelog", "tree")) == ("verify", "flush", "step")


def test_the_gate_hands_over_bits_and_compares_with_the_oracle(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "SESSIONS", {"treelog": HostSession})
    heads = LayerHeads(1, 2, 64, 64, "float32")
    backend, where = CudaBackend(), point("treelog", "tree", heads=heads)
    errors = backend.gate(where, References()(heads, where.tree))
    assert errors.excess(backend.limits(where)) is None
    assert errors.state < 1e-6
    assert 1e-3 < errors.output < backend.limits(where).output, "outputs are rounded to bfloat16"


@pytest.mark.parametrize("cut", ["stream-w4-t4-s1-r12", "stream-w2-t4-s1-r12"])
def test_a_large_batch_is_gated_by_few_requests_with_the_plan_that_is_timed(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    monkeypatch.setattr(cuda_backend, "SESSIONS", {"treelog": HostSession})
    heads = LayerHeads(1, 4, 64, 64, "float32")
    backend, where = CudaBackend(), point("treelog", "tree", 512, heads)
    table = PlanTable([PlanRow(place_of(problem_of(where), 512), cut, 1, "x", 2)])
    monkeypatch.setattr(choice, "table_of", lambda name: table)
    HostSession.made.clear()
    assert backend.gate(where, References()(heads, where.tree)).excess(backend.limits(where)) is None
    (session,) = HostSession.made
    assert session.spec.batch == GATE_BATCH
    list(backend.measure(where, ("verify",), EFFORT))
    (timed,) = FakeStep.plans
    assert timed is not None
    assert timed.name == cut
    assert session.plan == timed


def test_serial_methods_are_gated_without_a_plan(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "SESSIONS", {"storeall": HostSession})
    heads = LayerHeads(1, 2, 64, 64, "float32")
    backend, where = CudaBackend(), point("storeall", "tree", 512, heads)
    HostSession.made.clear()
    backend.gate(where, References()(heads, where.tree))
    assert [(session.spec.batch, session.plan) for session in HostSession.made] == [(GATE_BATCH, None)]


@pytest.mark.parametrize(("free_bytes", "given_back"), [(POOL_BYTES, 0), (POOL_BYTES + 1, 1)])
def test_the_pool_keeps_what_small_points_need(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, given_back: int
) -> None:
    calls: list[int] = []
    pool = SimpleNamespace(free_bytes=lambda: free_bytes, free_all_blocks=lambda: calls.append(1))
    monkeypatch.setattr(device, "load_cupy", lambda: SimpleNamespace(get_default_memory_pool=lambda: pool))
    device.trim_pool(POOL_BYTES)
    assert len(calls) == given_back


def test_a_point_larger_than_the_free_memory_is_refused(fake_gpu: Any) -> None:
    backend = CudaBackend()
    assert backend.refusal(point("treelog", "tree", batch=256)) is None
    large = Point("storeall", LayerHeads(16, 64, 128, 128, "float32"), 512, DraftTree.chain(40), "chain:40")
    assert "GiB that are free may be used; give a smaller --batch" in str(backend.refusal(large))


@pytest.mark.parametrize(
    ("heads", "batch", "expected"),
    [
        (HEADS, 1, 48),  # four times the cache
        (HEADS, 256, PASS_LAYERS),
        (replace(HEADS, value_heads=64), 1024, 4),  # half of 140 GB, storeall's states twice
        (replace(HEADS, value_heads=64), 8192, 1),
    ],
)
def test_a_pass_has_layers_for_the_cache_and_as_a_model_where_they_fit(
    fake_gpu: Any, heads: LayerHeads, batch: int, expected: int
) -> None:
    shape = Shape("storeall", heads, batch, TREES["root"])
    assert pass_layers(shape) == expected
    assert expected in (1, 48) or allocated_bytes(shape, expected) <= 70e9


def test_batches_that_run_other_kernels_are_variants_of_their_own(fake_gpu: Any) -> None:
    backend = CudaBackend()
    assert backend.variant(point("storeall", "tree")) is None
    assert backend.variant(point("treelog", "tree", 256)) == backend.variant(point("treelog", "tree", 257))
    assert backend.variant(point("treelog", "tree", 256)) != backend.variant(point("treelog", "tree", 1))


def test_variants_are_compiled_with_their_own_source_and_kernel(fake_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PlanTable([PlanRow(place_of(problem_of(point("treelog", "tree")), 8), "stream-w4-t4-s1-r12", 1, "x", 2)])
    monkeypatch.setattr(choice, "table_of", lambda name: table)
    compiled: list[Any] = []
    monkeypatch.setattr(cuda_backend, "compile_variants", lambda variants, processes: compiled.extend(variants))
    heads = LayerHeads(16, 32, 64, 64, "float32")  # of which the table has no row
    backend, points = (
        CudaBackend(),
        [point("bole", "tree"), point("treelog", "tree"), point("treelog", "tree", 8, heads)],
    )
    backend.prepare([*points, point("storeall", "tree")])
    assert [(file, kernel) for file, kernel, _ in compiled] == [
        ("verify.cu", "verify"), ("stream.cu", "verify_stream"), ("verify.cu", "verify"),
    ]  # fmt: skip
    assert [macros for _, _, macros in compiled] == [plan.macros for each in points if (plan := backend.variant(each))]
    compiled.clear()
    backend.prepare(points[:2])
    assert compiled == [], "two are compiled as they come"


@pytest.mark.parametrize("tree", ["chain:1", "chain:3", "chain:7", "2,2,2", "binary:15"])
@pytest.mark.parametrize("batch", [64, 256])
def test_as_many_requests_flush_in_one_step_as_in_another(tree: str, batch: int) -> None:
    shape = Shape("treelog", HEADS, batch, parse_tree(tree))
    committed, turns = shape.committed(), shape.turns()
    capacity, reserve = shape.log_limits
    length = committed * (turns + 1)
    flushes = []
    for _ in range(30):
        flushed = length + reserve > capacity
        length = np.where(flushed, committed, length + committed)
        flushes.append(int(flushed.sum()))
    classes = len(set(committed.tolist()))
    assert max(flushes) - min(flushes) <= classes, flushes
    assert np.mean(flushes) == pytest.approx(float(np.sum(1 / shape.cycles())), rel=0.05)


def test_the_mean_of_committed_rows_is_that_of_the_point() -> None:
    for batch in (16, 64, 256):
        shape = Shape("treelog", HEADS, batch, DraftTree.chain(3))
        assert shape.committed().mean() == pytest.approx(2.4, abs=1 / batch)


@pytest.mark.parametrize(("chains", "wanted"), [(True, ("graph", "chained", "eager")), (False, ("graph", "eager"))])
def test_steps_are_timed_chained_where_the_gpu_chains(
    fake_gpu: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, chains: bool, wanted: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cuda_backend, "chains_here", lambda: chains)
    backend = CudaBackend(eager=True)
    assert backend.timers("step") == wanted
    assert backend.timers("verify") == ("graph", "eager")
