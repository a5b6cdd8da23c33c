"""Chained launches give what the same launches give one after another, bit for bit.

A case runs the steps of a few layers twice from equal memory, as CUDA graphs: once layer after layer, once with each
layer chained to the one before. The operands of a layer are the outputs of the layer before (`Step`, `fed`), so that a
launch which reads them too early, or whose results are read too early, leaves a trace. `python -m kernels_cupy.gate`
runs all cases and keeps their records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernels_cupy.arrays import NAN_BITS
from kernels_cupy.choice import plan_here
from kernels_cupy.compiler import compile_variants, load_cupy
from kernels_cupy.device import trim_pool
from kernels_cupy.launch import chains_here
from kernels_cupy.plans import VerifyPlan
from kernels_cupy.problems import LOG_METHODS
from kernels_cupy.steps import Shape, Step
from kernels_cupy.timer import graph_of
from lab.methods import SERIAL_METHODS
from lab.methods.base import LayerHeads
from lab.methods.protocol import STATE_DTYPES
from lab.trees import parse_tree

LAYERS = 3
#: Steps of a case at least, and of one request, whose short launches overlap the most; more where the log of a request
#: takes longer to fill, so that every log is folded.
STEPS, STEPS_OF_ONE = 7, 49
TREES = ("chain:0", "chain:1", "chain:3", "chain:7", "binary:15", "binary:31", "binary:63")
BATCHES = (1, 5, 32)
#: The batch of other heads than 16/32 of 128, and of other methods than treelog.
SMALL_BATCH = 5
#: Other methods and the tree of each.
OTHERS = {
    "recurrent": "chain:0", "storeall": "chain:3", "bole": "binary:15", "treewy": "binary:15", "deltalog": "chain:0",
    "replayssm": "chain:3",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One method on one layer shape, batch and tree, with the plan that is chosen for it on this GPU."""

    method: str
    value_heads: int
    state_dtype: str
    batch: int
    tree: str
    head_dim: int = 128

    @property
    def name(self) -> str:
        heads = f"H16x{self.value_heads}x{self.head_dim}"
        return f"{self.method}-{self.state_dtype}-{heads}-B{self.batch}-{self.tree}"

    @property
    def shape(self) -> Shape:
        heads = LayerHeads(16, self.value_heads, self.head_dim, self.head_dim, self.state_dtype)
        return Shape(self.method, heads, self.batch, parse_tree(self.tree))

    @property
    def steps(self) -> int:
        steps = STEPS_OF_ONE if self.batch == 1 else STEPS
        if self.method not in LOG_METHODS:
            return steps
        return max(steps, int(self.shape.cycles().max()) + 1)

    def plan(self) -> VerifyPlan | None:
        """How the current GPU cuts the verification; None: a serial method."""
        if self.method in SERIAL_METHODS:
            return None
        return plan_here(self.shape.problem, self.batch)

    def record(self) -> dict[str, Any]:
        """What identifies the case in a record."""
        return {
            "method": self.method, "heads": f"16/{self.value_heads}", "state_dtype": self.state_dtype,
            "head_dim": self.head_dim, "batch": self.batch, "tree": self.tree,
        }  # fmt: skip


def cases(quick: bool = False) -> Iterator[Case]:
    """treelog on every tree, the other methods on one; `quick` leaves out other heads and all but one batch."""
    for dtype in STATE_DTYPES:
        for tree in TREES:
            for batch in (SMALL_BATCH,) if quick else BATCHES:
                yield Case("treelog", 32, dtype, batch, tree)
            if not quick:
                yield Case("treelog", 48, dtype, SMALL_BATCH, tree)
                yield Case("treelog", 32, dtype, SMALL_BATCH, tree, head_dim=64)
        for method, tree in OTHERS.items():
            yield Case(method, 32, dtype, SMALL_BATCH, tree)


def run(case: Case) -> list[str]:
    """Names of the arrays that chained launches leave different from launches one after another."""
    return differing(written(case, chained=False), written(case, chained=True))


def written(case: Case, chained: bool) -> dict[str, Any]:
    """All that the steps of a case have written, on the host."""
    cp = load_cupy()
    step = Step(case.shape, LAYERS, plan=case.plan(), fed=True)
    try:
        for name, array in step.arrays().items():
            if name.startswith("output"):  # nothing writes those of a padding request
                array.fill(NAN_BITS)
        graph, stream = graph_of(step.chained_step if chained else step.phases["step"])
        for _ in range(case.steps):
            graph.launch(stream)
        stream.synchronize()
        return {name: cp.asnumpy(array) for name, array in step.arrays().items()}
    finally:
        step.release()
        del step
        trim_pool(0)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the arrays that are not the same bit for bit; NaNs of the same bits are."""
    return [name for name, array in one.items() if array.tobytes() != other[name].tobytes()]


def records(quick: bool = False, processes: int = 8) -> list[dict[str, Any]]:
    """Every case, the name of its plan and the arrays that differ, or what it failed with; nothing where none chain."""
    if not chains_here():
        return []
    wanted = list(cases(quick))
    plans = [case.plan() for case in wanted]
    compile_variants([(plan.file, plan.kernel, plan.macros) for plan in plans if plan], processes)
    found = []
    for case, plan in zip(wanted, plans, strict=True):
        try:
            differs = run(case)
        except Exception as error:  # one broken case must not hide the others
            differs = [f"{type(error).__name__}: {error}"]
        found.append({**case.record(), "plan": plan and plan.name, "differs": differs})
    return found


def report(found: list[dict[str, Any]]) -> int:
    """Print the cases that differ and how many there are; returns their number."""
    red = [entry for entry in found if entry["differs"]]
    for entry in red:
        print(entry, flush=True)
    print(f"{len(found)} cases of chained launches, {len(red)} differ from launches one after another")
    return len(red)
