"""Runs every kernel on small shapes, for compute-sanitizer.

    for tool in memcheck racecheck initcheck synccheck; do
      compute-sanitizer --tool $tool --error-exitcode 1 python -m kernels_cupy.sanitize
    done

Every array has an allocation of its own, so that a read past its end or before its first write is seen.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

from kernels_cupy import reference
from kernels_cupy.compiler import load_cupy
from kernels_cupy.sessions import SESSIONS
from lab.methods.base import LayerHeads
from lab.methods.protocol import SessionSpec


def main() -> int:
    cp = load_cupy()
    cp.cuda.set_allocator(None)
    rng = np.random.default_rng(0)
    runs = 0
    for dtype, rows in itertools.product(("float32", "bfloat16"), (1, 3, 16, 17, 40)):
        heads = LayerHeads(1, 2, 128, 128, dtype)
        for method in SESSIONS:
            if rows > 1 and method in ("recurrent", "deltalog"):
                continue
            chain = method == "replayssm" or (method == "storeall" and rows % 2 == 1)
            longest = rows if chain else min(rows, 6)
            spec = SessionSpec(heads, 3, rows, longest, chain, 2 if method == "deltalog" else 0)
            states = rng.standard_normal((4, 2, 128, 128), np.float32)
            session = SESSIONS[method](spec, cp.asarray(states), np.array([2, -1, 0], np.int32))
            for _ in range(4):
                parents = np.tile(np.arange(-1, rows - 1, dtype=np.int32), (3, 1))
                if not chain:
                    parents = reference.random_parents(rng, 3, rows, longest)
                session.verify(reference.random_operands(cp, rng, 3, rows, heads, parents))
                session.commit(cp.asarray(rng.integers(-1, rows, 3).astype(np.int32)))
            session.flush()
            session.materialise(0)
            runs += 1
    cp.cuda.Device().synchronize()
    print(f"{runs} sessions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
