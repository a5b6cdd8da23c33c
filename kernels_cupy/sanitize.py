"""Every kernel and plan on small shapes, for compute-sanitizer: sessions of all methods, the copies of the bench.

`compute-sanitizer --tool memcheck --error-exitcode 1 python -m kernels_cupy.sanitize` and likewise with racecheck,
initcheck and synccheck. CuPy's memory pool is off, so that each array is an allocation of its own.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import numpy as np

from kernels_cupy import reference, timer
from kernels_cupy.compiler import load_cupy
from kernels_cupy.gate import DECODING, Case, planned, shapes_of
from kernels_cupy.sessions import SESSIONS
from lab.methods.protocol import SessionSpec

#: Key and value heads, head dimension, and rows with the longest path.
SHAPES = (
    *(((1, 2, 128), size) for size in ((1, 1), (3, 3), (16, 6), (17, 6), (17, 17), (40, 6))),
    *(((1, value_heads, 128), (8, 4)) for value_heads in (1, 3, 4, 8)),
    ((1, 2, 64), (16, 6)), ((1, 4, 128), (64, 6)),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Small sessions: every method on the first shapes; where heads differ, one method of each kernel."""
    for dtype, ((HK, HV, dim), (rows, path)) in itertools.product(("float32", "bfloat16"), SHAPES):
        for method in SESSIONS if (HK, HV, dim) == (1, 2, 128) else ("recurrent", "storeall", "bole", "treelog"):
            size = (1, 1) if method in DECODING else (rows, path)
            for chain in shapes_of(method, *size):
                case = Case(method, dtype, HK, HV, dim, *size, chain, 3, log_rows=2 if method == "deltalog" else 0)
                yield from planned(case)


def run(case: Case, rng: np.random.Generator) -> None:
    """Four steps of one session, one request of it padding, then a flush."""
    cp, heads = load_cupy(), case.heads
    spec = SessionSpec(heads, case.batch, case.rows, case.max_path, case.chain, case.log_rows)
    states = rng.standard_normal((4, heads.value_heads, heads.value_dim, heads.key_dim), np.float32)
    session = SESSIONS[case.method](spec, cp.asarray(states), np.array([2, -1, 0], np.int32))
    session.plan = case.plan
    for _ in range(4):
        parents = np.tile(np.arange(-1, case.rows - 1, dtype=np.int32), (case.batch, 1))
        if not case.chain:
            parents = reference.random_parents(rng, case.batch, case.rows, case.max_path)
        session.verify(reference.random_operands(cp, rng, case.batch, case.rows, heads, parents))
        session.commit(cp.asarray(rng.integers(-1, case.rows, case.batch).astype(np.int32)))
    session.flush()
    session.materialise(0)


def main() -> int:
    cp = load_cupy()
    cp.cuda.set_allocator(None)
    rng = np.random.default_rng(0)
    wanted = list(dict.fromkeys(cases()))
    for case in wanted:
        run(case, rng)
    timer.copy_bandwidth(1 << 20)
    timer.read_bandwidth(1 << 20)
    cp.cuda.Device().synchronize()
    print(f"{len(wanted)} sessions, {len({case.plan for case in wanted})} plans")
    return 0


if __name__ == "__main__":
    sys.exit(main())
