"""The correctness gate of the CUDA kernels: every method against the float64 recurrence.

`python -m kernels_cupy.gate --out gate.json [--trees 9] [--quick]` writes a record of the worst errors. `--ptx 80` runs
the kernels as a GPU of compute capability 8.0 would have them, without newer instructions.

Each case runs several steps of `verify` and `commit` in a closed loop on a batch with a tree of its own for every
request, random acceptances (also none), padding, and outputs and scratch that hold NaN before. Errors are relative: u
and states in the Frobenius norm of a request's head; outputs as what exceeds bf16 rounding, against the row's largest
value (at least |S| |q|, spread evenly). Chained launches are then held against launches one after another
(`chained.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from kernels_cupy import chained, commandline, reference
from kernels_cupy.arrays import state_bits
from kernels_cupy.choice import candidates, runs_here
from kernels_cupy.compiler import PTX_VARIABLE, compile_variants, kernel_hash, load_cupy
from kernels_cupy.covering import select, variant_of
from kernels_cupy.device import check_gpu, device_record, trim_pool
from kernels_cupy.lanes_plans import LanesPlan
from kernels_cupy.plans import BlockPlan, Problem, StreamPlan, VerifyPlan
from kernels_cupy.problems import log_in_bf16, verification_problem
from kernels_cupy.sessions import SESSIONS, LogSession
from kernels_cupy.wide_plans import WidePlan
from lab import oracle
from lab.files import replace_text
from lab.methods import SERIAL_METHODS
from lab.methods.base import LayerHeads
from lab.methods.protocol import SessionSpec
from lab.methods.treelog import LONG_LOG_ROWS, log_capacity

#: Largest errors allowed: fp32 state, and what rounding the state to bf16 once per write adds.
LIMITS = {
    "float32": {"u": 1e-5, "output": 1e-4, "state": 1e-5},
    "bfloat16": {"u": 1e-5, "output": 1e-4, "state": 4e-3},
}
#: u in bf16 is off by 2^-8 at most. The state that such records stand for is judged after every step: by that much for
#: each row of the path, as independent errors add up, since later rows may cancel what earlier ones wrote. `replayssm`
#: has had 2.4e-3 for one row, 1e-2 for 20 and 1.9e-2 for 64.
RECORDS_BF16 = {"u": 4e-3, "state": 4e-3}
MOST_RECORDS_BF16_STATE = 2e-2
#: A flush inside the verification may round numbers to their other neighbours, up to 2^-7 away, and goes on with them.
#: The most that one number has moved an output is 9.5e-3: five times as large as others of its state, two millionths of
#: itself from the middle between two neighbours.
FLUSH_BF16 = {"u": 5e-4, "output": 1.6e-2}
#: Methods whose verifications fold in the gate; the sessions of `deltalog` end before its log is full.
FOLDING = ("treewy", "treelog", "replayssm")
#: A storeall tree with a bf16 state rounds every row's state, which its children start from.
STOREALL_BF16 = {"output": 5e-2, "state": 2e-2}

GROUPINGS = ((2, 2), (2, 4), (1, 3), (1, 4), (1, 8))
#: Rows of a tree and the longest path.
SIZES = (
    (1, 1), (2, 2), (3, 2), (4, 4), (7, 3), (7, 7), (9, 9), (15, 15), (16, 5), (17, 17), (20, 20), (32, 6), (40, 8),
    (40, 40), (64, 12), (64, 20), (64, 64),
)  # fmt: skip
QUICK_SIZES = ((1, 1), (16, 5), (17, 17), (64, 12))
DECODING = ("recurrent", "deltalog")
#: Steps of a case: with treelog's longer log more, so that verifications fold logs of every length.
STEPS, LONG_LOG_STEPS = 5, 8
#: Shares of the CTAs that work in the order of chained launches, step after step.
EARLY = (0.5, 0.0, 1.0)
#: Device memory that a process keeps between cases.
POOL_BYTES = 1 << 30
#: Plans that a case runs at least, of the kernels with many.
FEW_PLANS = {StreamPlan.file: 2, LanesPlan.file: 2, WidePlan.file: 1}


@dataclass(frozen=True, slots=True)
class Case:
    """One method on one size; `plan` is how its verifications are cut into CTAs (None: serial methods)."""

    method: str
    state_dtype: str
    key_heads: int
    value_heads: int
    head_dim: int
    rows: int
    max_path: int
    chain: bool
    batch: int
    plan: VerifyPlan | None = None
    steps: int = STEPS

    @property
    def heads(self) -> LayerHeads:
        return LayerHeads(self.key_heads, self.value_heads, self.head_dim, self.head_dim, self.state_dtype)

    @property
    def name(self) -> str:
        cut = f"-{self.plan.name}" if self.plan else ""
        return (
            f"{self.method}-{self.state_dtype}-H{self.key_heads}x{self.value_heads}-D{self.head_dim}"
            f"-N{self.rows}-P{self.max_path}-{'chain' if self.chain else 'tree'}-B{self.batch}{cut}"
        )

    @property
    def trees(self) -> int:
        """Trees of live requests over all steps; the one in the middle of more than two is padding."""
        return self.steps * (self.batch - (self.batch > 2))

    def record(self) -> dict[str, Any]:
        plan = self.plan and self.plan.name
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "plan": plan}


def cases(trees: int, quick: bool = False) -> Iterator[Case]:
    """Methods x state types x head groupings x sizes x plans, `trees` requests (an odd number) in each.

    Every plan of `verify.cu` with four warps runs in each, with more warps where it is first possible; of those of
    `stream.cu`, `lanes.cu` and `wide.cu` some do, and all that ship in one at least.
    """
    sessions = list(uncut(trees, quick))
    problems = [problem_of(case) for case in sessions if case.method not in SERIAL_METHODS]
    chosen = iter(select(problems, FEW_PLANS))
    seen: set[object] = set()
    for case in sessions:
        if case.method in SERIAL_METHODS:
            yield case
        else:
            blocks = [plan for plan in candidates(problem_of(case)) if isinstance(plan, BlockPlan)]
            plans = [plan for plan in blocks if plan.warps == 4 or variant_of(plan) not in seen]
            seen.update(map(variant_of, plans))
            yield from (replace(case, plan=plan) for plan in (*plans, *next(chosen)))


def uncut(trees: int, quick: bool) -> Iterator[Case]:
    """The cases, without plans.

    Methods that decode one row have one size, so theirs get as many requests as give them 200 roots per grouping.
    """
    odd = trees + (1 - trees % 2)
    for dtype, (HK, HV) in itertools.product(("float32", "bfloat16"), GROUPINGS[1:2] if quick else GROUPINGS):
        for (rows, path), method in itertools.product(QUICK_SIZES if quick else SIZES, SESSIONS):
            batch = max(odd, 43) if method in DECODING and not quick else odd
            for chain in shapes_of(method, rows, path):
                steps = LONG_LOG_STEPS if method == "treelog" and log_capacity(rows, path) == LONG_LOG_ROWS else STEPS
                yield Case(method, dtype, HK, HV, 128, rows, path, chain, batch, steps=steps)
    for dtype, method, batch in itertools.product(("float32", "bfloat16"), SESSIONS, (1, 3)):
        rows = 1 if method in DECODING else 4 if method == "replayssm" else 16
        path = rows if method == "replayssm" else min(rows, 4)
        for HK, HV, dim in ((16, 32, 128), (2, 4, 64)):
            yield Case(method, dtype, HK, HV, dim, rows, path, path == rows, batch)


def shapes_of(method: str, rows: int, path: int) -> list[bool]:
    """Whether a session of this size is for chains, for trees, or there is one of each."""
    if method in DECODING:
        return [True] if rows == 1 else []
    if method == "replayssm":
        return [True] if path == rows else []
    if method == "storeall":
        return [True, False] if path == rows > 1 else [rows == 1]
    return [rows == 1]


def problem_of(case: Case) -> Problem:
    """What decides how the verifications of a case of a closed-form method are cut."""
    return verification_problem(case.method, case.heads, case.rows, case.max_path)


def run(case: Case, seed: int = 0) -> dict[str, float]:
    """Worst errors of one case: `u`, `output`, `state`, and how far `materialise` is from the stored state."""
    cp = load_cupy()
    heads = case.heads
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])  # no two cases see the same trees
    spec = SessionSpec(heads, case.batch, case.rows, case.max_path, case.chain)
    slots = case.batch + 2
    indices = rng.permutation(slots)[: case.batch].astype(np.int32)
    if case.batch > 2:
        indices[case.batch // 2] = -1
    live = np.flatnonzero(indices >= 0)
    initial = rng.standard_normal((slots, heads.value_heads, heads.value_dim, heads.key_dim), np.float32) * 0.3
    session = SESSIONS[case.method](spec, cp.asarray(initial), indices)
    session.plan = case.plan
    stored = state_bits(initial, heads.state_dtype)
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    state = stored[cp.asarray(np.maximum(indices, 0))].astype(np.float64)
    rounds = heads.state_dtype == "bfloat16" or log_in_bf16(case.method, heads)
    worst: dict[str, float] = {}

    def note(kind: str, error: Any) -> None:
        value = float(cp.nan_to_num(cp.max(error), nan=np.inf))
        worst[kind] = max(worst.get(kind, 0.0), value)

    for step in range(case.steps):
        session.early = EARLY[step % len(EARLY)]
        if case.chain:
            parents = np.tile(np.arange(-1, case.rows - 1, dtype=np.int32), (case.batch, 1))
        else:
            parents = reference.random_parents(rng, case.batch, case.rows, case.max_path)
        operands = reference.random_operands(cp, rng, case.batch, case.rows, heads, parents)
        if heads.state_dtype == "bfloat16" and isinstance(session, LogSession):
            round_flushed(cp, session, state)
        expected = reference.recurrence(cp, state, operands, parents)
        if step == 0 and case.rows <= 17:
            check_reference(cp, state, operands, parents, expected, int(live[0]))
        if step == 2 and case.method != "recurrent":  # rows of this verification are discarded
            session.verify(operands)
        session.outputs.fill(0x7FC0)
        outputs = session.verify(operands)
        found = (outputs.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if case.batch > 2 and not bool(cp.isnan(found[case.batch // 2]).all()):
            worst["padding"] = np.inf
        difference = cp.abs(found - expected.outputs)[live] - 2.0**-8 * cp.abs(expected.outputs[live])
        usual = cp.sqrt((expected.states[live] ** 2).sum((-1, -2))) / heads.key_dim**1.5  # |S| |q| / |V|
        largest = cp.maximum(cp.abs(expected.outputs[live]).max(-1), usual)
        note("output", cp.maximum(difference, 0).max(-1) / cp.maximum(largest, 1e-6))
        if hasattr(session, "layer"):
            note("u", factor_error(cp, session, expected.u, live))

        accepted = rng.integers(-1, case.rows, case.batch).astype(np.int32)
        if case.method == "recurrent":
            accepted[:] = 0
        session.commit(cp.asarray(accepted))
        taken = cp.asarray(np.maximum(accepted, 0))
        chosen = expected.states[cp.arange(case.batch), taken]
        state = cp.where(cp.asarray(accepted >= 0)[:, None, None, None], chosen, state)
        if rounds or step % 2 == 0:
            found = dense_states(cp, session, live)
            note("state", state_error(cp, found, state[live]))
            if rounds:  # what is stored is what the next step starts from
                state[live] = found
        del expected
    request = int(live[-1])
    for flushed in (False, True):  # first with what waits in the log
        if flushed:
            session.flush()
        found = dense_states(cp, session, live)
        note("state", state_error(cp, found, state[live]))
        materialised = cp.asarray(session.materialise(request), np.float64)
        note("materialise", state_error(cp, materialised[None], found[-1:]))
    return worst


def round_flushed(cp: Any, session: Any, state: Any) -> None:
    """Round, as the kernel does, the states that the next verification folds, stores and goes on with."""
    length = cp.asnumpy(session.log.length)
    flushes = np.flatnonzero((length > 0) & (length + session.log.reserve > session.log.capacity))
    if len(flushes):
        bits = state_bits(state[flushes], "bfloat16")
        state[flushes] = (bits.astype(np.uint32) << 16).view(np.float32)


def check_reference(cp: Any, state: Any, operands: Any, parents: Any, expected: Any, request: int) -> None:
    """The batched reference equals the oracle on one request."""
    host = reference.on_host(operands, cp)
    rows = oracle.prepare(host, request)
    outputs, states, u = oracle.sequential(cp.asnumpy(state[request]), *rows, parents[request])
    for ours, theirs in zip((expected.outputs, expected.states, expected.u), (outputs, states, u), strict=True):
        np.testing.assert_allclose(cp.asnumpy(ours[request]), theirs, rtol=1e-8, atol=1e-9)


def dense_states(cp: Any, session: Any, live: Any) -> Any:
    """Committed states `[live, HV, V, K]` float64 of all live requests, with what waits in their logs."""

    def floats(x: Any) -> Any:
        return ((x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x).astype(np.float64)

    slots = session.slot_table[:, -1] if hasattr(session, "slot_table") else session.slots
    if hasattr(session, "nodes") and not session.spec.chain:
        slots = session.slots
    states = floats(session.pool[slots[live]])
    if isinstance(session, LogSession):
        length = cp.asnumpy(session.log.length)
        for i, b in enumerate(live.tolist()):
            rows = session.log.row_list[b, : int(length[b])]
            if len(rows):
                u, k, G = floats(session.layer.u[b, rows]), floats(session.layer.k[b, rows]), session.layer.g[b, rows]
                G = G.astype(np.float64).cumsum(0)
                k = k / cp.sqrt((k * k).sum(-1, keepdims=True) + session.spec.norm_eps)
                k = cp.repeat(k, session.spec.group, axis=1)
                weighted = (cp.exp(G[-1] - G)[..., None] * u).transpose(1, 2, 0)
                states[i] = cp.exp(G[-1])[:, None, None] * states[i] + cp.matmul(weighted, k.transpose(1, 0, 2))
    return states


def factor_error(cp: Any, session: Any, expected: Any, live: Any) -> Any:
    """Relative error of u per request and head over all rows of the tree."""
    batch, rows = expected.shape[:2]
    place = cp.broadcast_to(cp.arange(rows), (batch, rows))
    if isinstance(session, LogSession):
        length = session.log.length[:, None]
        place = cp.take_along_axis(session.log.row_list, length + place, axis=1)
    u = session.layer.u[cp.arange(batch)[:, None], place]
    if u.dtype == np.uint16:
        u = (u.astype(np.uint32) << 16).view(np.float32)
    error = cp.sqrt(((u.astype(np.float64) - expected) ** 2).sum((1, 3))[live])
    return error / cp.sqrt((expected**2).sum((1, 3))[live])


def state_error(cp: Any, found: Any, expected: Any) -> Any:
    """Relative error per request and head; states that have all but vanished count against 1e-6."""
    error = cp.sqrt(((found.astype(np.float64) - expected) ** 2).sum((-1, -2)))
    return error / cp.maximum(cp.sqrt((expected**2).sum((-1, -2))), 1e-6)


def failures(case: Case, worst: dict[str, float]) -> list[str]:
    """The kinds of error that exceed their limits."""
    limits = {**LIMITS[case.state_dtype], "materialise": 1e-6, "padding": 0.0}
    if case.method in FOLDING and case.state_dtype == "bfloat16":
        limits |= FLUSH_BF16
    if log_in_bf16(case.method, case.heads):
        limits["u"] = RECORDS_BF16["u"]
        limits["state"] = min(RECORDS_BF16["state"] * case.max_path**0.5, MOST_RECORDS_BF16_STATE)
    if case.method == "storeall" and case.state_dtype == "bfloat16":
        limits |= STOREALL_BF16
    return [kind for kind, value in worst.items() if not value <= limits[kind]]


def case_record(case: Case) -> dict[str, Any]:
    """The case, its worst errors, and what failed."""
    try:
        worst = run(case)
        failed = failures(case, worst)
    except Exception as error:  # one broken case must not hide the others
        worst, failed = {}, [f"{type(error).__name__}: {error}"]
    trim_pool(POOL_BYTES)
    return {**case.record(), "trees": case.trees, "errors": worst, "failed": failed}


def in_order(run_all: Callable[[list[Case]], list[dict[str, Any]]], wanted: list[Case]) -> list[dict[str, Any]]:
    """The records of the cases, run from the largest to the smallest, so that no process ends long after the others."""
    order = sorted(range(len(wanted)), key=lambda i: -wanted[i].trees * wanted[i].rows * wanted[i].value_heads)
    records = dict(zip(order, run_all([wanted[i] for i in order]), strict=True))
    return [records[i] for i in range(len(wanted))]


def summary_of(record: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Cases, trees and worst errors by method and state type; `fewest_trees` of any head grouping."""
    summary: dict[str, dict[str, float]] = {}
    trees: dict[str, Counter[tuple[int, int]]] = {}
    for entry in record:
        name = f"{entry['method']} {entry['state_dtype']}"
        group = summary.setdefault(name, {"cases": 0, "trees": 0})
        group["cases"] += 1
        group["trees"] += entry["trees"]
        trees.setdefault(name, Counter())[entry["key_heads"], entry["value_heads"]] += entry["trees"]
        for kind, value in entry["errors"].items():
            group[kind] = max(group.get(kind, 0.0), value)
    for name, group in summary.items():
        group["fewest_trees"] = min(trees[name][pair] for pair in GROUPINGS if pair in trees[name])
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare every method on this GPU with the float64 recurrence.")
    parser.add_argument("--out", type=commandline.out_file, help="write the record (JSON) here")
    whole = commandline.whole()
    parser.add_argument("--trees", type=whole, default=9, help="requests, each with its own tree, per step (default 9)")
    parser.add_argument("--processes", type=whole, default=8, help="cases that run at a time (default 8)")
    parser.add_argument("--quick", action="store_true", help="one head grouping and four sizes")
    parser.add_argument(
        "--ptx", metavar="ARCH", type=whole, help="compile for compute capability ARCH (80), the driver translates"
    )
    options = parser.parse_args()
    if options.ptx:
        os.environ[PTX_VARIABLE] = str(options.ptx)  # the processes of both pools inherit it
    check_gpu()
    start = time.perf_counter()
    wanted = [case for case in cases(options.trees, options.quick) if case.plan is None or runs_here(case.plan)]
    compile_variants([(p.file, p.kernel, p.macros) for case in wanted if (p := case.plan)], options.processes)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        record = in_order(partial(pool.map, case_record, chunksize=1), wanted)
    red = sum(bool(entry["failed"]) for entry in record)
    for entry in record:
        if entry["failed"]:
            print(entry, flush=True)
    summary = summary_of(record)
    for name, group in summary.items():
        words = {key: f"{value:.2e}" if isinstance(value, float) else value for key, value in group.items()}
        print(f"{name:22}", words)
    in_chains = chained.records(options.quick, options.processes)
    unlike = chained.report(in_chains)
    print(f"{len(record)} cases, {red} red, {time.perf_counter() - start:.0f} s")
    if options.out:
        device = device_record()["name"] + (f", compiled for compute_{options.ptx}" if options.ptx else "")
        result = {
            "device": device, "kernel_hash": kernel_hash(), "summary": summary, "cases": record, "chained": in_chains,
        }  # fmt: skip
        replace_text(options.out, record_text(result))
    return int(red + unlike > 0)


def record_text(record: dict[str, Any]) -> str:
    """A record as JSON with one line per entry of its lists and tables, floats to three digits."""

    def rounded(x: Any) -> Any:
        if isinstance(x, float):
            return float(f"{x:.3g}")
        if isinstance(x, dict):
            return {key: rounded(value) for key, value in x.items()}
        return [rounded(value) for value in x] if isinstance(x, list | tuple) else x

    parts = []
    for key, value in rounded(record).items():
        if isinstance(value, dict):
            lines = ",\n ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            parts.append(f"{json.dumps(key)}: {{\n {lines}}}")
        elif isinstance(value, list):
            parts.append(f"{json.dumps(key)}: [\n " + ",\n ".join(map(json.dumps, value)) + "]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    commandline.run(main)
