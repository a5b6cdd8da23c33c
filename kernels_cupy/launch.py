"""A kernel with its grid and arguments, launched as often as wanted, alone or chained to the launch before it."""

from __future__ import annotations

import ctypes
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from kernels_cupy.compiler import load_cupy
from lab.errors import MissingError


class Launch:
    """Call it to launch on CuPy's current stream, also inside a graph capture.

    `chained` lets it start while the launch before it in the stream still runs (programmatic dependent launch): until
    that one has ended, it reads only what is older, such as its states and its log. The launch before must not write
    those, and the kernel must wait for it (`wait_for_launch_before` in common.cuh). `early_ctas`, if given, is how many
    CTAs run at a time: the kernel's last argument, 0 where the launch is not chained.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0,
        early_ctas: int | None = None,
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._threads, self._shared_bytes = kernel, grid, threads, shared_bytes
        self._arguments, self._chained_arguments = arguments, arguments  # keep the memory behind the pointers alive
        if early_ctas is not None:
            self._arguments, self._chained_arguments = (*arguments, np.int32(0)), (*arguments, np.int32(early_ctas))
        self._values: list[Any] = []
        self._config: Any = None

    def __call__(self, chained: bool = False) -> None:
        if not chained:
            self._kernel(self._grid, (self._threads,), self._arguments, shared_mem=self._shared_bytes)
            return
        driver = _driver()
        if self._config is None:
            self._values = [_value(x) for x in self._chained_arguments]
            self._pointers = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
            self._config = _chained_config(driver, self._grid, self._threads, self._shared_bytes)
        self._config.hStream = load_cupy().cuda.get_current_stream().ptr
        (status,) = driver.cuLaunchKernelEx(
            self._config, self._kernel.kernel.ptr, ctypes.addressof(self._pointers), 0
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a chained launch of {self._kernel.name} failed: {status.name}")


def _value(x: Any) -> Any:
    """An argument as the driver reads it: an address, or a number of its own width."""
    if hasattr(x, "data") and hasattr(x.data, "ptr"):
        return ctypes.c_void_p(x.data.ptr)
    return np.ctypeslib.as_ctypes_type(x.dtype)(x.item())


def _chained_config(driver: ModuleType, grid: tuple[int, ...], threads: int, shared_bytes: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, [attribute], 1
    return config


@cache
def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise MissingError("chained launches need cuda-bindings; install the extra with: pip install -e '.[gpu]'") from None
    return driver
