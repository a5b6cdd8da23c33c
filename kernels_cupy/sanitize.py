"""Every kernel and set of macros on small shapes under compute-sanitizer: sessions of all methods, the bench's copies.

`python -m kernels_cupy.sanitize --record sanitizer.txt` runs the four tools side by side and writes what they found;
without `--record` it runs the sessions alone, as a tool wants them. CuPy's memory pool is off, so that each array is an
allocation of its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from kernels_cupy import commandline, reference, timer
from kernels_cupy.choice import runs_here
from kernels_cupy.compiler import kernel_hash, load_cupy
from kernels_cupy.covering import covering, machine_code, variant_of
from kernels_cupy.device import device_record
from kernels_cupy.gate import EARLY, Case
from kernels_cupy.gate import cases as gate_cases
from kernels_cupy.plans import BlockPlan
from kernels_cupy.sessions import SESSIONS
from lab.errors import MissingError
from lab.files import replace_text
from lab.methods.protocol import SessionSpec

#: Parts that run side by side under each tool.
PARTS = 4
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Rows of a tree and the longest path, for the serial methods.
SIZES = ((1, 1), (3, 3), (16, 6), (17, 17))


def cases() -> list[Case]:
    """A small session of every set of macros of `verify.cu` that the gate runs, and of the other kernels that
    ships, of every log method on a chain, and of the serial methods.
    """
    by_code: dict[object, Case] = {}
    others, many = [], list[Case]()
    for case in gate_cases(trees=1):
        small, plan = replace(case, batch=3, steps=case.steps - 2), case.plan
        if case.key_heads == 16 and (plan is None or isinstance(plan, BlockPlan)):
            continue  # of the others, such a case runs where no smaller one has its macros
        few = (case.rows, case.max_path) in SIZES
        if isinstance(plan, BlockPlan):
            by_code.setdefault(machine_code(plan), small)
        elif plan:
            many.append(small)
        if few and (plan is None or (isinstance(plan, BlockPlan) and plan.heads_per_cta == 2)):
            others.append(small)
    by_plan = {case.plan: case for case in reversed(many)}
    kept = [by_plan[plan] for plan in covering([case.plan for case in many if case.plan])]
    return list(dict.fromkeys([*others, *by_code.values(), *kept]))


def run(case: Case, rng: np.random.Generator) -> None:
    """A few steps of one session, one request of it padding, then a flush."""
    cp, heads = load_cupy(), case.heads
    spec = SessionSpec(heads, case.batch, case.rows, case.max_path, case.chain)
    states = rng.standard_normal((4, heads.value_heads, heads.value_dim, heads.key_dim), np.float32)
    session = SESSIONS[case.method](spec, cp.asarray(states), np.array([2, -1, 0], np.int32))
    session.plan = case.plan
    for step in range(case.steps):
        session.early = EARLY[step % len(EARLY)]
        parents = np.tile(np.arange(-1, case.rows - 1, dtype=np.int32), (case.batch, 1))
        if not case.chain:
            parents = reference.random_parents(rng, case.batch, case.rows, case.max_path)
        session.verify(reference.random_operands(cp, rng, case.batch, case.rows, heads, parents))
        session.commit(cp.asarray(rng.integers(-1, case.rows, case.batch).astype(np.int32)))
    session.flush()
    session.materialise(0)


def record(path: Path) -> int:
    """Run this module under every tool, in parts side by side, and write a line for each; 1 on any finding."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise MissingError("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    here = [sys.executable, "-m", "kernels_cupy.sanitize", "--part"]
    running = {
        name: [
            subprocess.Popen(
                [tool, "--error-exitcode", "1", "--tool", name, *here, str(part)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for part in range(PARTS)
        ]
        for name in TOOLS
    }  # fmt: skip
    lines = [
        f"compute-sanitizer --tool TOOL --error-exitcode 1 python -m kernels_cupy.sanitize, on "
        f"{device_record()['name']}; kernels {kernel_hash()}"
    ]
    failed = False
    for name, processes in running.items():
        outputs = [process.communicate()[0] for process in processes]
        failed |= any(process.returncode for process in processes)
        sessions = sum(int(found[1]) for output in outputs if (found := re.search(r"(\d+) sessions", output)))
        errors = [int(found[1]) if (found := re.search(r"SUMMARY: (\d+)", output)) else None for output in outputs]
        total = sum(error or 0 for error in errors)
        lines.append(f"{name:10} {sessions} sessions, {total} {'hazards' if name == 'racecheck' else 'errors'}")
        print(lines[-1], flush=True)
        for output, process in zip(outputs, processes, strict=True):
            if process.returncode:
                print(output[-4000:], file=sys.stderr)
    replace_text(path, "\n".join(lines) + "\n")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every kernel and plan on small shapes, for compute-sanitizer.")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--record", type=commandline.out_file, help="run all tools and write what they found here")
    part = commandline.whole(0, PARTS - 1)
    ways.add_argument("--part", type=part, help=f"run one of {PARTS} parts of the sessions, from 0 (default all)")
    options = parser.parse_args()
    cp = load_cupy()
    if options.record:
        return record(options.record)
    cp.cuda.set_allocator(None)
    rng = np.random.default_rng(0)
    wanted = [case for case in cases() if case.plan is None or runs_here(case.plan)]
    if options.part is not None:
        wanted = wanted[options.part :: PARTS]
    for case in wanted:
        run(case, rng)
    timer.copy_bandwidth(1 << 20)
    timer.read_bandwidth(1 << 20)
    cp.cuda.Device().synchronize()
    print(f"{len(wanted)} sessions, {len({variant_of(case.plan) for case in wanted if case.plan})} plans")
    return 0


if __name__ == "__main__":
    commandline.run(main)
