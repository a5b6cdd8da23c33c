"""Compiles CUDA sources for an architecture that CuPy's own modules cannot name: they always add that of the GPU.

`sm_90a` is machine code for one GPU family, `compute_80` PTX that the driver translates for the GPU. Both are kept in
CuPy's cache folder, so only the first run on a machine pays for compilation.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from kernels_cupy.compiler import load_cupy, macro_options, source_text, with_shared


def cubin_kernel(file: str, name: str, arch: str, shared_bytes: int = 0, **macros: int) -> Any:
    """A kernel compiled for `arch`, ready to be launched with up to `shared_bytes` of dynamic shared memory."""
    return with_shared(module(file, arch, macro_options(macros)).get_function(name), shared_bytes)


@cache
def module(file: str, arch: str, options: tuple[str, ...]) -> Any:
    """The source compiled for `arch` with the compiler's `options`, loaded."""
    cp = load_cupy()
    text, options = source_text(file), (f"-arch={arch}", *options)
    kind = "ptx" if arch.startswith("compute_") else "cubin"
    key = sha256("\0".join((text, *options, str(cp.cuda.nvrtc.getVersion()))).encode()).hexdigest()
    path = _cache_folder() / f"{Path(file).stem}-{key[:32]}.{kind}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(_compile(file, text, options, kind))
        os.replace(part.name, path)
    return cp.RawModule(path=str(path))


def _cache_folder() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _compile(file: str, text: str, options: tuple[str, ...], kind: str) -> bytes:
    nvrtc = load_cupy().cuda.nvrtc
    program = nvrtc.createProgram(text, Path(file).name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        if kind == "cubin":
            return bytes(nvrtc.getCUBIN(program))
        ptx = nvrtc.getPTX(program)  # text; some versions give bytes
        return ptx.encode() if isinstance(ptx, str) else bytes(ptx)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{file} {' '.join(options)}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
