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
    that one has ended, it reads only what is older, such as its states and its log, and may fold the log. The launch
    before must not write those, nor the ancestor masks or the gates' parameters. It must be an ordinary one, or a
    chained one that waits itself before it lets the next start, as the kernels here do (`wait_for_launch_before` in
    common.cuh). GPUs before Hopper launch one after another all the same.

    `arguments` are CuPy arrays and NumPy scalars. `early_ctas`, for kernels that take them as their last argument: how
    many CTAs of an ordinary launch, and of a chained one, ask for state and log first, as those do that start beside
    the launch before. In an ordinary launch that changes the order of loads and nothing else.

    A chained call raises `MissingError` without cuda-bindings and `LaunchError` when the driver refuses.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0,
        early_ctas: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._threads, self._shared_bytes = kernel, grid, threads, shared_bytes
        alone, chained = ((), ()) if early_ctas is None else ((np.int32(count),) for count in early_ctas)
        self._arguments, self._chained_arguments = (*arguments, *alone), (*arguments, *chained)
        self._values: list[Any] = []  # of a chained launch, as the driver reads them; made when first wanted

    def __call__(self, chained: bool = False) -> None:
        if not (chained and chains_here()):
            self._kernel(self._grid, (self._threads,), self._arguments, shared_mem=self._shared_bytes)
            return
        driver, cuda = load_driver(), load_cupy().cuda
        if not self._values:
            self._values = [driver_value(argument) for argument in self._chained_arguments]
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*self._grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = self._shared_bytes, [attribute], 1
        config.hStream = cuda.get_current_stream().ptr
        cuda.Device().use()  # the driver wants a context that is current in this thread
        pointers = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        (status,) = driver.cuLaunchKernelEx(config, self._kernel.kernel.ptr, ctypes.addressof(pointers), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(
                f"the driver refused a chained launch of {self._kernel.name} ({status.name}); a driver of CUDA 13 is "
                "needed, and no earlier launch of this process may have failed"
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
