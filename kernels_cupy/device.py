"""The record of the GPU that a measurement ran on."""

from __future__ import annotations

from typing import Any

from kernels_cupy.compiler import load_cupy, source_hash


def device_record() -> dict[str, Any]:
    """Name, memory, clocks, driver and versions, as far as this machine tells them; clocks in MHz, now."""
    cp = load_cupy()
    properties = cp.cuda.runtime.getDeviceProperties(0)
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
        "source_hash": source_hash(),
    }
    return record | clocks() | driver()


def clocks() -> dict[str, Any]:
    """Current and largest clocks of the multiprocessors and the memory; empty without nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        kinds = {"sm": pynvml.NVML_CLOCK_SM, "memory": pynvml.NVML_CLOCK_MEM}
        return {
            **{f"{kind}_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, code) for kind, code in kinds.items()},
            **{f"{kind}_clock_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, code) for kind, code in kinds.items()},
        }
    except Exception:  # the library is optional, and containers may hide the device from it
        return {}


def driver() -> dict[str, str]:
    """Driver version; empty without nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return {"driver": version.decode() if isinstance(version, bytes) else str(version)}
    except Exception:
        return {}
