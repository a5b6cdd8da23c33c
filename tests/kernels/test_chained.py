"""Both ways to run a step, and the cases that hold one against the other, without a GPU; tests/gpu runs some."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kernels_cupy import chained, closed_form, steps
from kernels_cupy.chained import BATCHES, OTHERS, TREES, Case, cases, differing, records, report
from kernels_cupy.problems import LOG_METHODS
from kernels_cupy.steps import CUDA_METHODS, Shape, Step
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands
from lab.trees import parse_tree

HEADS = LayerHeads(2, 4, 64, 64, "float32")
METHODS = [("recurrent", "chain:0"), ("storeall", "chain:3"), ("storeall", "2,2"), ("bole", "2,2"), ("treelog", "2,2")]


class Told(NamedTuple):
    """What was launched: a layer, or what a step does once; and whether it was chained."""

    what: str
    chained: bool = False


class FakeGpu:
    """NumPy in place of CuPy, and launches that write down their operands when made and themselves when called."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.operands: list[Operands] = []
        self.outputs: list[Any] = []

    def layer(self, operands: Operands, output: Any) -> Any:
        name = f"layer {len(self.operands)}"
        self.operands.append(operands)
        self.outputs.append(output)
        return lambda chained=False: self.told.append(Told(name, chained))

    def once(self, *_: Any) -> None:
        self.told.append(Told("once"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake, cp = FakeGpu(), SimpleNamespace(**vars(np), asnumpy=np.asarray)
    for module in (steps, closed_form):
        monkeypatch.setattr(module, "load_cupy", lambda: cp)
    monkeypatch.setattr(steps, "tree_masks", lambda parent: np.zeros((1, len(parent)), np.uint64))
    monkeypatch.setattr(steps, "Verification", lambda _, slots, x, masks, out, *args, **more: fake.layer(x, out))
    monkeypatch.setattr(steps, "Recurrence", lambda _, x, out, *args: fake.layer(x, out))
    monkeypatch.setattr(steps, "Fold", lambda *_: SimpleNamespace(path=fake.once))
    monkeypatch.setattr(steps, "Scatter", lambda *_: fake.once)
    monkeypatch.setattr(steps, "commit_index", fake.once)
    monkeypatch.setattr(steps.Log, "advance", fake.once)
    return fake


def shape(method: str, tree: str) -> Shape:
    return Shape(method, HEADS, 3, parse_tree(tree))


@pytest.mark.parametrize(("method", "tree"), METHODS)
def test_a_chained_step_chains_each_layer_but_the_first_and_never_what_is_done_once(
    gpu: FakeGpu, method: str, tree: str
) -> None:
    step = Step(shape(method, tree), layers=3)
    once = [] if method == "recurrent" else [Told("once")]
    step.phases["step"]()
    assert gpu.told == [Told("layer 0"), Told("layer 1"), Told("layer 2"), *once]
    gpu.told.clear()
    step.chained_step()
    assert gpu.told == [Told("layer 0"), Told("layer 1", True), Told("layer 2", True), *once]
    gpu.told.clear()
    step.phases["verify"]()
    assert not any(told.chained for told in gpu.told)
    gpu.told.clear()
    step.release()
    step.chained_step()
    assert gpu.told == []


def test_a_single_layer_has_nothing_to_be_chained_to(gpu: FakeGpu) -> None:
    step = Step(shape("treelog", "2,2"), layers=1)
    step.chained_step()
    assert gpu.told == [Told("layer 0"), Told("once")]


def test_another_cut_is_launched_in_both_ways(gpu: FakeGpu) -> None:
    step = Step(shape("treelog", "2,2"), layers=2)
    step.cut(None)
    step.chained_step()
    step.phases["step"]()
    assert [told.what for told in gpu.told] == ["layer 2", "layer 3", "once"] * 2


@pytest.mark.parametrize(("method", "tree"), METHODS)
def test_a_fed_layer_reads_what_the_layer_before_puts_out(gpu: FakeGpu, method: str, tree: str) -> None:
    Step(shape(method, tree), layers=3, fed=True)
    assert not np.shares_memory(gpu.operands[0].v, gpu.outputs[0])
    for before, operands in zip(gpu.outputs, gpu.operands[1:], strict=False):
        assert operands.v is before
        for x in (operands.q, operands.k):
            assert x.shape == (3, before.shape[1], HEADS.key_heads, HEADS.key_dim)
            assert np.shares_memory(x, before)
        assert not np.shares_memory(operands.q, operands.k)


@pytest.mark.parametrize(
    ("method", "tree", "names"),
    [
        ("recurrent", "chain:0", {"output", "state"}),
        ("storeall", "2,2", {"output", "state", "row's states", "slots"}),
        ("bole", "2,2", {"output", "state", "u", "k", "g"}),
        ("treelog", "2,2", {"output", "state", "u", "k", "g", "log rows", "log length"}),
    ],
)
def test_a_step_lists_all_that_it_writes(gpu: FakeGpu, method: str, tree: str, names: set[str]) -> None:
    arrays = Step(shape(method, tree), layers=2).arrays()
    found = Counter(name.partition(" of layer ")[0] for name in arrays)
    assert set(found) == names
    assert {name for name, count in found.items() if count == 1} == names & {"slots", "log rows", "log length"}
    assert len({id(array) for array in arrays.values()}) == len(arrays)


def test_cases_have_every_method_tree_and_batch() -> None:
    found = list(cases())
    assert len({case.name for case in found}) == len(found)
    assert {case.method for case in found} == set(CUDA_METHODS) == {"treelog", *OTHERS}
    places = {
        (case.state_dtype, case.tree, case.batch)
        for case in found
        if (case.method, case.value_heads) == ("treelog", 32)
    }
    assert places == set(product(("float32", "bfloat16"), TREES, BATCHES))
    assert Counter(case.state_dtype for case in found if case.value_heads == 48) == {"float32": 7, "bfloat16": 7}
    assert set(cases(quick=True)) < set(found)
    assert {case.method for case in cases(quick=True)} == set(CUDA_METHODS)


def test_every_log_is_folded_within_a_case() -> None:
    for case in cases():
        if case.method in LOG_METHODS:
            capacity, reserve = case.shape.log_limits
            committed, length = case.shape.committed(), case.shape.committed() * (case.shape.turns() + 1)
            flushes = np.zeros(case.batch, int)
            for _ in range(case.steps):
                folds = length + reserve > capacity
                flushes += folds
                length = np.where(folds, committed, length + committed)
            assert flushes.min() >= 1, case.name


def test_one_bit_is_a_difference_and_a_nan_is_none() -> None:
    one = {"output": np.array([np.nan, 1.0], np.float32), "u": np.arange(3, dtype=np.uint16)}
    same = {name: array.copy() for name, array in one.items()}
    assert differing(one, same) == []
    same["output"][1] = np.nextafter(np.float32(1), np.float32(2))
    assert differing(one, same) == ["output"]
    assert differing({"x": np.float32([0.0])}, {"x": np.float32([-0.0])}) == ["x"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: Case) -> list[str]:
        if case.method == "bole":
            raise RuntimeError("illegal address")
        return ["u of layer 1"] if case.method == "treewy" else []

    monkeypatch.setattr(chained, "chains_here", lambda: True)
    monkeypatch.setattr(chained, "run", run)
    monkeypatch.setattr(chained, "compile_variants", lambda variants, processes: None)
    monkeypatch.setattr(
        chained, "plan_here", lambda problem, batch: SimpleNamespace(name="x", file="", kernel="", macros={})
    )


def test_records_tell_what_differs_and_what_failed(gate: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = records(quick=True)
    assert {entry["method"]: entry["plan"] for entry in found} == {
        method: None if method in ("recurrent", "storeall") else "x" for method in CUDA_METHODS
    }
    assert {entry["method"]: entry["differs"] for entry in found if entry["differs"]} == {
        "treewy": ["u of layer 1"], "bole": ["RuntimeError: illegal address"],
    }  # fmt: skip
    assert report(found) == 4
    out = capsys.readouterr().out
    assert f"{len(found)} cases of chained launches, 4 differ" in out
    assert out.count("illegal address") == 2


def test_a_gpu_without_chained_launches_has_no_records(gate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chained, "chains_here", lambda: False)
    assert records() == []
