"""The record of the GPU that a measurement ran on, its clocks, and the memory that CuPy keeps of it."""

from __future__ import annotations

from typing import Any

from kernels_cupy.compiler import load_cupy
from kernels_cupy.launch import chains_here, load_driver

#: What NVML says holds a clock down, by bit.
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def check_gpu() -> None:
    """Raise `MissingError` when CuPy, a GPU or, on one that chains launches, cuda-bindings is not there."""
    load_cupy()
    if chains_here():
        load_driver()


def device_record() -> dict[str, Any]:
    """Name, memory, driver and versions of the current GPU, as far as this machine tells them."""
    cp = load_cupy()
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    record: dict[str, Any] = {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "l2_bytes": properties["l2CacheSize"],
        "cuda_runtime": cp.cuda.runtime.runtimeGetVersion(),
        "cuda_driver_api": cp.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cp.cuda.nvrtc.getVersion())),
        "cupy": cp.__version__,
    }
    return record | driver()


def clocks() -> dict[str, Any]:
    """Clocks of the multiprocessors and the memory now and at most (MHz), and why they are held down, if they are.

    Empty without nvidia-ml-py.
    """
    try:
        nvml, handle = _nvml()
        kinds = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            **{f"{kind}_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, code) for kind, code in kinds.items()},
            **{f"{kind}_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, code) for kind, code in kinds.items()},
            "throttle_reasons": [name for bit, name in THROTTLES.items() if reasons & bit],
        }
    except Exception:  # the library is optional, and containers may hide the device from it
        return {}


def power() -> dict[str, float]:
    """What the GPU draws now (W), `power_w`; empty without nvidia-ml-py."""
    try:
        nvml, handle = _nvml()
        return {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3}
    except Exception:
        return {}


def driver() -> dict[str, str]:
    """Driver version; empty without nvidia-ml-py."""
    try:
        version = _nvml()[0].nvmlSystemGetDriverVersion()
        return {"driver": version.decode() if isinstance(version, bytes) else str(version)}
    except Exception:
        return {}


def trim_pool(keep_bytes: int) -> None:
    """Give the memory that no array holds back to the GPU if it is more than `keep_bytes`.

    Memory that stays in CuPy's pool is taken from there the next time, which is faster than asking the driver.
    """
    pool = load_cupy().get_default_memory_pool()
    if pool.free_bytes() > keep_bytes:
        pool.free_all_blocks()


def _nvml() -> tuple[Any, Any]:
    """NVML, started, and its handle of the current GPU."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(load_cupy().cuda.Device().pci_bus_id.encode())
