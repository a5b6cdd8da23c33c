"""Compiles every kernel variant without a GPU, with NVRTC or nvcc, and reads registers, spills and shared memory.

`python -m kernels_cupy.offline` rewrites `resources.csv`, the table of the variants that ship; `--out` writes another.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

from kernels_cupy import commandline, compiler
from kernels_cupy.choice import modelled_plan
from kernels_cupy.compiler import CUPY_OPTIONS, KERNELS, macro_options, source_text
from kernels_cupy.covering import MachineCode, machine_code, shipped_plans
from kernels_cupy.lanes_plans import lanes_plans
from kernels_cupy.plans import Problem, VerifyPlan, stream_plans
from kernels_cupy.wide_plans import wide_plans
from lab.errors import MissingError
from lab.files import replace_text
from lab.methods.base import LayerHeads
from lab.methods.protocol import STATE_DTYPES

TABLE = Path(__file__).parent / "resources.csv"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
#: The one whose resources the table lists.
LISTED = "sm_90"


@dataclass(frozen=True, slots=True)
class Variant:
    """A source file and the macros that specialise it."""

    file: str
    macros: tuple[tuple[str, int], ...] = ()
    dynamic_shared_bytes: int = 0

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.macros)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel of a variant takes; bytes per thread for spills, per CTA for shared memory."""

    kernel: str
    variant: str
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int


def architectures(file: str) -> tuple[str, ...]:
    """What a source compiles for."""
    return (compiler.ARCHITECTURES[file],) if file in compiler.ARCHITECTURES else ARCHITECTURES


def listed_architecture(file: str) -> str:
    """`LISTED`, or the one architecture that the source is written for."""
    return compiler.ARCHITECTURES.get(file, LISTED)


def variants() -> Iterator[Variant]:
    """The variants that the shipped methods launch, with the plans of the cost model and of the shipped tables.

    The cost model's are those of 16 key and 32 value heads of 128, and heads of 64. Of `stream.cu`,
    `lanes.cu` and `wide.cu` there is also one for each size of tree and log.
    """
    yield Variant("cursors.cu")
    plans: list[VerifyPlan] = []
    for dtype, dim in itertools.product(STATE_DTYPES, (128, 64)):
        state = (("DIM", dim), ("STATE_BF16", int(dtype == "bfloat16")))
        yield Variant("serial.cu", state)
        yield Variant("commit.cu", state)
        sizes = [(1, 16), (8, 0), (8, 24), (16, 0), (16, 16), (32, 16), (40, 16), (64, 0), (64, 16), (64, 64)]
        problems = [
            Problem(LayerHeads(16, 32, dim, dim, dtype), rows, log_rows)
            for rows, log_rows in (sizes if dim == 128 else [(16, 0), (16, 16)])
        ]
        if dim == 128 or dtype == "bfloat16":
            yield Variant("commit.cu", (*(state[:1] if dim == 64 else ()), ("LOG_BF16", 1), state[1]))
        if dtype == "bfloat16":  # treelog's logs; those of treewy and deltalog stay in fp32
            problems += [replace(problem, log_bf16=True) for problem in problems if problem.log_rows]
        elif dim == 128:  # replayssm
            problems.append(replace(problems[0], rows=4, log_bf16=True))
        plans += [modelled_plan(problem, batch) for problem in problems for batch in (1, 256)]
        for ways in (stream_plans, lanes_plans, wide_plans):
            plans += [plan for problem in problems for plan in ways(problem)[:1]]
    largest: dict[MachineCode, int] = {}
    for plan in (*plans, *shipped_plans()):
        key = machine_code(plan)
        largest[key] = max(largest.get(key, 0), plan.shared_bytes)
    for (file, macros), shared_bytes in largest.items():
        yield Variant(file, macros, shared_bytes)


def compile_variant(variant: Variant, arch: str) -> list[Resources]:
    """Compile for `arch`; raises `RuntimeError` with the compiler's words, `MissingError` without a compiler."""
    if library := _nvrtc_path():
        log = _nvrtc(variant, arch, library)
    elif shutil.which("nvcc"):
        log = _nvcc(variant, arch)
    else:
        raise MissingError("no CUDA compiler: install nvcc or the wheel nvidia-cuda-nvrtc")
    return read_log(log, variant, arch)


def read_log(log: str, variant: Variant, arch: str) -> list[Resources]:
    """Resources from the words of `ptxas -v`."""
    found = []
    for name, part in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", log, re.DOTALL):

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        found.append(
            Resources(
                name, variant.label, arch, number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores"),
                number(r"(\d+) bytes spill loads"), number(r"(\d+) bytes smem"), variant.dynamic_shared_bytes,
            )
        )  # fmt: skip
    missing = set(KERNELS[variant.file]) - {resources.kernel for resources in found}
    if missing:
        raise RuntimeError(f"{variant.file}: the compiler names no {', '.join(sorted(missing))}:\n{log}")
    return found


def _nvcc(variant: Variant, arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / variant.file
        source.write_text(source_text(variant.file), encoding="utf-8")
        flush = CUPY_OPTIONS[0]  # the other is for NVRTC alone
        command = ["nvcc", "-cubin", "-Xptxas", "-v", flush, f"-arch={arch}", *macro_options(dict(variant.macros))]
        done = subprocess.run(
            [*command, "-o", f"{folder}/out.cubin", str(source)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{variant.file} {variant.label} {arch}:\n{done.stderr}")
    return done.stderr


def _nvrtc_path() -> Path | None:
    """The NVRTC library of the pip wheels, CUDA 13 before 12."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(folder).glob("cu*/lib/libnvrtc.so.*")) + sorted(
            Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.*")
        )
        found = [path for path in found if "builtins" not in path.name and "alt" not in path.name]
        if found:
            return found[0]
    return None


def _nvrtc(variant: Variant, arch: str, library: Path) -> str:
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    text = source_text(variant.file).encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, variant.file.encode(), 0, None, None):
        raise RuntimeError("nvrtcCreateProgram failed")
    words = [f"-arch={arch}", "--ptxas-options=-v", *CUPY_OPTIONS, *macro_options(dict(variant.macros))]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    status = nvrtc.nvrtcCompileProgram(program, len(words), options)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise RuntimeError(f"{variant.file} {variant.label} {arch}:\n{log.value.decode()}")
    return log.value.decode()


def table() -> str:
    """The resource table of all variants on `LISTED`, as CSV."""
    rows = [row for each in variants() for row in compile_variant(each, listed_architecture(each.file))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Resources)])
    writer.writerows(astuple(row) for row in sorted(rows, key=lambda row: (row.kernel, row.variant)))
    return text.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compile every kernel variant that ships, without a GPU, and write what each takes (CSV)."
    )
    words = f"file to write (default {TABLE.name})"
    parser.add_argument("--out", type=commandline.out_file, default=str(TABLE), help=words)
    out: Path = parser.parse_args().out
    replace_text(out, table())
    return 0


if __name__ == "__main__":
    commandline.run(main)
