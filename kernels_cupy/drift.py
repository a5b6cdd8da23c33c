"""INV-2: thousands of closed-loop steps on the GPU against the float64 recurrence.

`python -m kernels_cupy.drift --out drift.json [--steps 10000]` prints, for every method, tree and kind of decay, the
relative error of the committed state (worst request and head) at several step counts, and its ratio to the plain fp32
recurrence; then the same of bf16 states, beside `storeall`. One step in eight commits nothing, except where one row is
decoded.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import replace
from typing import Any

import numpy as np

from kernels_cupy import commandline, reference
from kernels_cupy.compiler import kernel_hash, load_cupy
from kernels_cupy.device import device_record
from kernels_cupy.gate import dense_states, record_text, state_error
from kernels_cupy.sessions import SESSIONS, LogSession
from lab.bf16 import round_bf16
from lab.files import replace_text
from lab.methods import SERIAL_METHODS
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands, SessionSpec
from lab.methods.treelog import log_capacity
from lab.trees import DraftTree

#: Name -> tree and the methods that run on it; the first method is the plain fp32 recurrence.
GROUPS = {
    "decode": (DraftTree.chain(0), ("recurrent", "deltalog", "treelog")),
    "chain of 4 rows": (DraftTree.chain(3), ("storeall", "treewy", "bole", "treelog", "replayssm")),
    "tree 2,2 of 7 rows": (DraftTree.from_widths([2, 2]), ("storeall", "treewy", "bole", "treelog")),
}
#: The same with a bf16 state, for a fifth of the steps; the first method rounds the state of every row.
BF16_GROUPS = {name: GROUPS[name] for name in ("chain of 4 rows", "tree 2,2 of 7 rows")}
#: exp(g) by head, from slow to fast: as trained layers have it, and so slow that errors have 10,000 steps to pile up.
DECAYS = {"trained": (1e-4, 0.1), "slow": (1e-7, 1e-3)}
BATCH, PREPARED = 4, 97
#: Largest error of the committed state, and how much larger it may be at the end than after `EARLY` of the steps:
#: what is rounded to nearest at every flush, with next to no decay to forget it, grows with the root of the steps;
#: what is rounded to one side grows with the steps.
LIMIT, EARLY = 1e-5, 0.03
GROWTH = EARLY**-0.5
#: Methods whose published record formats round more than fp32 does: shown, not judged.
ROUNDED_RECORDS = ("replayssm",)
#: How a record calls treelog with u in fp32 over a bf16 state.
FP32_RECORDS = "treelog, u in fp32"
#: What the others are compared with; their own growth is what fp32 does.
PLAIN = SERIAL_METHODS


class Fp32Records(LogSession):
    """treelog as it would be if its records did not follow a bf16 state."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        capacity = log_capacity(spec.rows, spec.max_path)
        super().__init__(spec, states, state_indices, capacity, spec.max_path, log_bf16=False)


def decaying_operands(
    cp: Any, rng: np.random.Generator, heads: LayerHeads, tree: DraftTree, rates: tuple[float, float]
) -> Operands:
    """Ordinary operands whose decay -g of a step is about `rates[0]` in the first head and `rates[1]` in the last."""
    parents = np.tile(tree.parent_array(), (BATCH, 1))
    operands = reference.random_operands(cp, rng, BATCH, tree.num_rows, heads, parents)
    gates = rng.standard_normal((2, BATCH, tree.num_rows, heads.value_heads)).astype(np.float32)
    keys = rng.standard_normal((BATCH, tree.num_rows, heads.key_heads, heads.key_dim)).astype(np.float32)
    by_head = np.geomspace(*rates, heads.value_heads).astype(np.float32)
    return replace(
        operands, k=reference.device_bits(cp, keys), a=cp.asarray(gates[0]), b=cp.asarray(gates[1]),
        A_log=cp.asarray(np.log(by_head)),
    )  # fmt: skip


def run_group(name: str, decay: str, steps: int, state_dtype: str = "float32", seed: int = 0) -> list[dict[str, Any]]:
    """Errors of the methods of one group over `steps` steps with one of the `DECAYS`.

    The loop of a bf16 state starts from one that bf16 holds, and adds a row of treelog with its u in fp32, which is
    what its records would have cost otherwise.
    """
    cp = load_cupy()
    tree, methods = GROUPS[name]
    heads = LayerHeads(2, 4, 128, 128, state_dtype)
    rng = np.random.default_rng(seed)
    prepared = [decaying_operands(cp, rng, heads, tree, DECAYS[decay]) for _ in range(PREPARED)]
    prepared = [replace(x, A_log=prepared[0].A_log, dt_bias=prepared[0].dt_bias) for x in prepared]
    parents = np.tile(tree.parent_array(), (BATCH, 1))
    initial = rng.standard_normal((BATCH, heads.value_heads, 128, 128)).astype(np.float32)
    if state_dtype == "bfloat16":
        initial = round_bf16(initial)
    spec = SessionSpec.for_tree(heads, tree, BATCH)
    slots = np.arange(BATCH, dtype=np.int32)
    sessions = {method: SESSIONS[method](spec, cp.asarray(initial), slots) for method in methods}
    if state_dtype == "bfloat16":
        sessions[FP32_RECORDS] = Fp32Records(spec, cp.asarray(initial), slots)
    state = cp.asarray(initial, np.float64)
    marks = sorted({steps, *(round(steps * share) for share in (0.01, EARLY, 0.1, 0.3))})
    found: dict[str, list[float]] = {method: [] for method in sessions}
    accepted_rows = rng.integers(0, tree.num_rows, (steps, BATCH)).astype(np.int32)
    if methods[0] != "recurrent":  # which commits its row whatever is accepted
        accepted_rows[rng.random((steps, BATCH)) < 1 / 8] = -1
    order = rng.integers(0, PREPARED, steps)
    accepted_device = cp.asarray(accepted_rows)
    for step in range(steps):
        operands = prepared[int(order[step])]
        expected = reference.recurrence(cp, state, operands, parents)
        taken = accepted_device[step]
        chosen = expected.states[cp.arange(BATCH), cp.maximum(taken, 0)]
        state = cp.where((taken >= 0)[:, None, None, None], chosen, state)
        for session in sessions.values():
            session.verify(operands)
            session.commit(accepted_device[step])
        if step + 1 in marks:
            for method, session in sessions.items():
                error = state_error(cp, dense_states(cp, session, slots), state)
                found[method].append(float(error.max()))
    plain = found[methods[0]]
    ratio = "ratio_to_plain_fp32" if state_dtype == "float32" else "ratio_to_storeall"
    return [
        {
            "group": name, "decay": decay, "state_dtype": state_dtype, "method": method, "steps": marks,
            "state_error": errors, ratio: errors[-1] / plain[-1],
            "failed": failures(method, errors) if state_dtype == "float32" else bf16_failures(method, errors, plain),
        }
        for method, errors in found.items()
    ]  # fmt: skip


def failures(method: str, errors: list[float]) -> list[str]:
    """What is wrong with a method's errors at the marks: too large, not a number, or growing faster than rounding."""
    if method in ROUNDED_RECORDS or method in PLAIN:
        return [] if np.isfinite(errors).all() else ["not finite"]
    found = [] if all(error <= LIMIT for error in errors) else [f"above {LIMIT:.0e}"]
    if not errors[-1] <= GROWTH * errors[min(1, len(errors) - 1)]:
        found.append("grows")
    return found


def bf16_failures(method: str, errors: list[float], storeall: list[float]) -> list[str]:
    """What is wrong with the errors of a bf16 state: not finite, or worse than those of a state rounded in every row.

    treelog, with either kind of record, rounds a state once per flush and must stay below storeall.
    """
    if not np.isfinite(errors).all():
        return ["not finite"]
    return ["above storeall"] if method in ("treelog", FP32_RECORDS) and errors[-1] >= storeall[-1] else []


def main() -> int:
    parser = argparse.ArgumentParser(description="Closed-loop drift of the state against the float64 recurrence.")
    parser.add_argument("--out", type=commandline.out_file, help="write the record (JSON) here")
    parser.add_argument("--steps", type=commandline.whole(500), default=10_000, help="of each loop (default 10000)")
    parser.add_argument("--processes", type=commandline.whole(), default=3, help="groups at a time (default 3)")
    options = parser.parse_args()
    load_cupy()
    tasks = [(name, decay, options.steps, "float32") for decay in DECAYS for name in GROUPS]
    tasks += [(name, decay, options.steps // 5, "bfloat16") for decay in DECAYS for name in BF16_GROUPS]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        rows = [row for group in pool.starmap(run_group, tasks, chunksize=1) for row in group]
    for row in rows:
        errors = "  ".join(f"{error:.1e}" for error in row["state_error"])
        ratio = row["ratio_to_plain_fp32" if row["state_dtype"] == "float32" else "ratio_to_storeall"]
        words = f"{row['state_dtype']:8} {row['decay']:8} {row['group']:20} {row['method']:22} {errors}  x{ratio:.2f}"
        print(words, *row["failed"])
    if options.out:
        device = device_record()["name"]
        record = {"device": device, "kernel_hash": kernel_hash(), "batch": BATCH, "decays": DECAYS, "rows": rows}
        replace_text(options.out, record_text(record))
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    commandline.run(main)
