"""A kernel with its grid and arguments, launched as often as wanted, alone or chained to the launch before it."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from kernels_cupy.compiler import PTX_VARIABLE, load_cupy
from lab.errors import LaunchError, MissingError


class Launch:
    """Call it to launch on CuPy's current stream, also inside a graph capture.

    `chained` lets it start while the launch before it in the stream still runs (programmatic dependent launch): until
    that one has ended, it reads only what is older, such as its states and its log. The launch before must not write
    those, and the kernel must wait for it (`wait_for_launch_before` in common.cuh). GPUs before Hopper launch one
    after another all the same. `arguments` are CuPy arrays and NumPy scalars. `early_ctas`, if given, is how many CTAs
    run at a time: the kernel's last argument, 0 where the launch is not chained.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0,
        early_ctas: int | None = None,
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._threads, self._shared_bytes = kernel, grid, threads, shared_bytes
        alone, chained = ((), ()) if early_ctas is None else ((np.int32(0),), (np.int32(early_ctas),))
        self._arguments, self._chained_arguments = (*arguments, *alone), (*arguments, *chained)
        self._chained: _Chained | None = None  # made when first wanted

    def __call__(self, chained: bool = False) -> None:
        if not (chained and chains_here()):
            self._kernel(self._grid, (self._threads,), self._arguments, shared_mem=self._shared_bytes)
            return
        if self._chained is None:
            self._chained = _Chained(self._grid, self._threads, self._chained_arguments, self._shared_bytes)
        self._chained(self._kernel)


class _Chained:
    """Grid and arguments as the driver takes them; the stream is that of each call."""

    def __init__(self, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int) -> None:
        self._driver = load_driver()
        self._values = [driver_value(argument) for argument in arguments]
        self._pointers = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, [attribute], 1
        self._config = config

    def __call__(self, kernel: Any) -> None:
        self._config.hStream = load_cupy().cuda.get_current_stream().ptr
        function, pointers = kernel.kernel.ptr, ctypes.addressof(self._pointers)
        (status,) = self._driver.cuLaunchKernelEx(self._config, function, pointers, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(
                f"the driver refused a chained launch of {kernel.name} ({status.name}); a driver of CUDA 13 is needed, "
                "and no earlier launch of this process may have failed"
            )


def driver_value(argument: Any) -> Any:
    """An argument as the driver reads it: the address of a CuPy array, or a NumPy scalar in its own width."""
    if hasattr(argument, "data") and hasattr(argument.data, "ptr"):
        return ctypes.c_void_p(argument.data.ptr)
    return np.ctypeslib.as_ctypes_type(argument.dtype)(argument.item())


@cache
def chains_here() -> bool:
    """Whether the current GPU, and what is compiled for it, has launches that start early (`griddepcontrol`)."""
    capabilities = (load_cupy().cuda.Device().compute_capability, os.environ.get(PTX_VARIABLE))
    return all(int(capability) >= 90 for capability in capabilities if capability)


@cache
def load_driver() -> ModuleType:
    """The module `cuda.bindings.driver`, which CuPy has no part of; raises `MissingError` when it is not there."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise MissingError(
            "chained launches need cuda-bindings; install the extra with: pip install -e '.[gpu]'"
        ) from None
    return driver  # type: ignore[no-any-return]
