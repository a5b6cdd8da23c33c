"""INV-2: thousands of closed-loop steps on the GPU against the float64 recurrence.

`python -m kernels_cupy.drift --out drift.json [--steps 10000]` prints, for every method, the relative error of the
committed state (worst request and head) at several step counts, and its ratio to the plain fp32 recurrence.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels_cupy import reference
from kernels_cupy.compiler import load_cupy, source_hash
from kernels_cupy.gate import dense_states, state_error
from kernels_cupy.sessions import SESSIONS
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, SessionSpec
from lab.trees import DraftTree

#: Name -> tree and the methods that run on it; the first method is the plain fp32 recurrence.
GROUPS = {
    "decode": (DraftTree.chain(0), ("recurrent", "deltalog", "treelog")),
    "chain of 4 rows": (DraftTree.chain(3), ("storeall", "treewy", "bole", "treelog", "replayssm")),
    "tree 2,2 of 7 rows": (DraftTree.from_widths([2, 2]), ("storeall", "treewy", "bole", "treelog")),
}
BATCH, PREPARED = 4, 97


def trained_operands(cp: Any, rng: np.random.Generator, heads: LayerHeads, tree: DraftTree) -> Operands:
    """Operands with decays as trained layers have them: exp(g) from about 0.9 to 0.9999 by head."""
    parents = np.tile(tree.parent_array(), (BATCH, 1))
    operands = reference.random_operands(cp, rng, BATCH, tree.num_rows, heads, parents)
    gates = rng.standard_normal((2, BATCH, tree.num_rows, heads.value_heads)).astype(np.float32)
    keys = rng.standard_normal((BATCH, tree.num_rows, heads.key_heads, heads.key_dim)).astype(np.float32)
    rates = np.geomspace(1e-4, 0.1, heads.value_heads).astype(np.float32)
    return replace(
        operands, k=reference.device_bits(cp, keys), a=cp.asarray(gates[0]), b=cp.asarray(gates[1]),
        A_log=cp.asarray(np.log(rates)),
    )  # fmt: skip


def run_group(name: str, steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Errors of the methods of one group over `steps` steps."""
    cp = load_cupy()
    tree, methods = GROUPS[name]
    heads = LayerHeads(2, 4, 128, 128, "float32")
    rng = np.random.default_rng(seed)
    prepared = [trained_operands(cp, rng, heads, tree) for _ in range(PREPARED)]
    prepared = [replace(x, A_log=prepared[0].A_log, dt_bias=prepared[0].dt_bias) for x in prepared]
    parents = np.tile(tree.parent_array(), (BATCH, 1))
    initial = rng.standard_normal((BATCH, heads.value_heads, 128, 128)).astype(np.float32)
    spec = SessionSpec.for_tree(heads, tree, BATCH)
    slots = np.arange(BATCH, dtype=np.int32)
    sessions = {method: SESSIONS[method](spec, cp.asarray(initial), slots) for method in methods}
    state = cp.asarray(initial, np.float64)
    marks = sorted({steps, *(round(steps * share) for share in (0.01, 0.03, 0.1, 0.3))})
    found: dict[str, list[float]] = {method: [] for method in methods}
    accepted_rows = rng.integers(0, tree.num_rows, (steps, BATCH)).astype(np.int32)
    order = rng.integers(0, PREPARED, steps)
    accepted_device = cp.asarray(accepted_rows)
    for step in range(steps):
        operands = prepared[int(order[step])]
        expected = reference.recurrence(cp, state, operands, parents)
        state = expected.states[cp.arange(BATCH), accepted_device[step]]
        for session in sessions.values():
            session.verify(operands)
            session.commit(accepted_device[step])
        if step + 1 in marks:
            for method, session in sessions.items():
                error = state_error(cp, dense_states(cp, session, slots), state)
                found[method].append(float(error.max()))
    plain = found[methods[0]]
    return [
        {
            "group": name, "method": method, "steps": marks, "state_error": errors,
            "ratio_to_plain_fp32": errors[-1] / plain[-1],
        }
        for method, errors in found.items()
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Closed-loop drift of the state against the float64 recurrence.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    rows = [row for name in GROUPS for row in run_group(name, options.steps)]
    for row in rows:
        errors = "  ".join(f"{error:.1e}" for error in row["state_error"])
        print(f"{row['group']:20} {row['method']:10} {errors}  x{row['ratio_to_plain_fp32']:.1f}")
    if options.out:
        record = {"source_hash": source_hash(), "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    red = [row for row in rows if row["method"] != "replayssm" and max(row["state_error"]) > 1e-5]
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
