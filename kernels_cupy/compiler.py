"""Compiles the CUDA sources of this package with NVRTC through CuPy; every variant once per process.

A variant is a source file and the macros that specialise it. CuPy keeps the machine code on disk
(`CUPY_CACHE_DIR`), so only the first run on a machine pays for compilation.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from lab.errors import MissingError
from lab.profiles.plans import shipped_tables

#: A compute capability, such as 80, in this variable: kernels are compiled to its PTX, which the driver translates.
PTX_VARIABLE = "TREEWY_PTX"
SOURCE_DIR = Path(__file__).parent / "src"
OPTIONS = ("-std=c++17",)
#: What CuPy adds when it compiles a module itself; without the second, NVRTC 13.0 has no generic lambdas in kernels.
CUPY_OPTIONS = ("-ftz=true", "-default-device")

#: Source file -> its kernels.
KERNELS = {
    "verify.cu": ("verify",),
    "stream.cu": ("verify_stream",),
    "lanes.cu": ("verify_lanes",),
    "wide.cu": ("verify_wide",),
    "commit.cu": ("fold_rows",),
    "cursors.cu": ("tree_masks", "advance", "commit_index", "copy_bytes", "read_bytes"),
    "serial.cu": ("recur", "scatter_states"),
    "attention.cu": ("verify_attention", "combine_attention"),
}

#: Source file -> the one architecture that it is written for.
ARCHITECTURES = {"wide.cu": "sm_90a"}

#: What the kernels of the state methods are launched from, beside their CUDA sources.
LAUNCHED = (
    *(f"src/{name}.cu" for name in ("commit", "cursors", "lanes", "serial", "stream", "verify", "wide")),
    "src/common.cuh", "arrays.py", "choice.py", "closed_form.py", "lanes_plans.py", "launch.py",
    "plans.py", "serial.py", "wide_plans.py",
)  # fmt: skip
#: What lays out and times a measurement of them.
TIMED = ("fill.py", "problems.py", "steps.py", "timer.py")
#: What records of their correctness run them through and compare them with.
PROVED = ("sessions.py", "reference.py")


@cache
def load_cupy() -> ModuleType:
    """The `cupy` module; raises `MissingError` when it or a GPU is not there."""
    try:
        import cupy
    except ImportError:
        raise MissingError("the CUDA kernels need CuPy; install the extra with: pip install -e '.[gpu]'") from None
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MissingError(f"the CUDA kernels need an NVIDIA GPU: {error}") from None
    return cupy  # type: ignore[no-any-return]


@cache
def gpu_name() -> str:
    """What the current GPU calls itself."""
    cp = load_cupy()
    return str(cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode())


@cache
def multiprocessors() -> int:
    """Multiprocessors of the current GPU."""
    return int(load_cupy().cuda.Device().attributes["MultiProcessorCount"])


@cache
def shared_bytes_per_cta() -> int:
    """Dynamic shared memory that one CTA can take on the current GPU."""
    return int(load_cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])


@cache
def has_warpgroups() -> bool:
    """Whether the current GPU, and what is compiled for it, has the products of `wide.cu`."""
    return load_cupy().cuda.Device().compute_capability == "90" and not os.environ.get(PTX_VARIABLE)


def source_text(file: str) -> str:
    """A source with its own headers put in place, so that the text alone decides what is compiled."""
    text = (SOURCE_DIR / file).read_text(encoding="utf-8")
    return re.sub(r'^#include "(\w+\.cuh)"$', lambda match: source_text(match[1]), text, flags=re.MULTILINE).replace(
        "#pragma once\n", ""
    )


def kernel_hash() -> str:
    """Hash of the state methods' kernels, launchers and sessions: what a record of correctness holds for."""
    return _hash(LAUNCHED + PROVED)


def tuned_hash() -> str:
    """Hash of what a table of plans was measured with: the kernels, their launchers and what times them."""
    return _hash(LAUNCHED + TIMED)


def source_hash() -> str:
    """Hash of every file that a measurement of the state methods depends on, the shipped tables of plans included."""
    return _hash(LAUNCHED + TIMED, {f"{gpu}/{path.name}": path for gpu, path in sorted(shipped_tables().items())})


def _hash(files: tuple[str, ...], more: Mapping[str, Path] = MappingProxyType({})) -> str:
    digest = sha256()
    for name, path in {**{name: Path(__file__).parent / name for name in files}, **more}.items():
        digest.update(name.encode() + b"\0" + source_bytes(path) + b"\0")
    return digest.hexdigest()


def source_bytes(path: Path) -> bytes:
    """What counts of a source in a hash: all of a file, but no comments and no empty lines of a CUDA source."""
    if path.suffix not in (".cu", ".cuh"):
        return path.read_bytes()
    lines = (line.partition("//")[0].rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    return "\n".join(filter(None, lines)).encode()


def macro_options(macros: dict[str, int]) -> tuple[str, ...]:
    return OPTIONS + tuple(f"-D{name}={value}" for name, value in sorted(macros.items()))


@cache
def _module(file: str, options: tuple[str, ...]) -> Any:
    capability = os.environ.get(PTX_VARIABLE)
    if arch := f"compute_{capability}" if capability else ARCHITECTURES.get(file):
        from kernels_cupy.cubin import module

        return module(file, arch, (*options, *CUPY_OPTIONS))
    return load_cupy().RawModule(code=source_text(file), options=options, backend="nvrtc")


@cache
def _kernel(file: str, name: str, options: tuple[str, ...], shared_bytes: int) -> Any:
    return with_shared(_module(file, options).get_function(name), shared_bytes)


def with_shared(kernel: Any, shared_bytes: int) -> Any:
    """The kernel, allowed to ask for so much dynamic shared memory, or more where it was allowed more before.

    One function may serve several plans: the largest of them decides.
    """
    if shared_bytes > max(48 * 1024, kernel.max_dynamic_shared_size_bytes):
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel


def kernel(file: str, name: str, shared_bytes: int = 0, **macros: int) -> Any:
    """A compiled kernel, ready to be launched with up to `shared_bytes` of dynamic shared memory."""
    return _kernel(file, name, macro_options(macros), shared_bytes)


def compile_variants(variants: Iterable[tuple[str, str, Mapping[str, int]]], processes: int) -> None:
    """Fill CuPy's disk cache with variants, each a source file, a kernel and macros, several at a time."""
    distinct = sorted({(file, name, tuple(sorted(macros.items()))) for file, name, macros in variants}, reverse=True)
    if not distinct:
        return
    with multiprocessing.get_context("spawn").Pool(min(processes, len(distinct))) as pool:
        pool.starmap(_compile, distinct, chunksize=1)


def _compile(file: str, name: str, macros: tuple[tuple[str, int], ...]) -> None:
    kernel(file, name, **dict(macros)).attributes  # noqa: B018 - reading the attributes loads the module
