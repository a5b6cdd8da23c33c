"""GPU systems: memory, bandwidth and the fixed memory costs of a serving process, one GPU type each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from lab.data import data_path
from lab.profiles.folders import GPU_NAMES, check_gpu

__all__ = ["GPU_NAMES", "GpuSystem", "check_gpu", "load_system"]


@dataclass(frozen=True, slots=True)
class GpuSystem:
    """One GPU type as its source file describes it.

    `nccl_memory_bytes_by_gpus` and `other_memory_bytes` are corrections from observation: memory that a
    serving process holds beside weights and cache. `elementwise_*` are the constants of the cost of a small
    memory-bound kernel.
    """

    gpu: str
    memory_capacity_bytes: int
    memory_bandwidth_bytes_per_s: float
    bf16_tensor_flops_per_s: float
    fp8_tensor_flops_per_s: float
    gpus_per_node: int
    other_memory_bytes: int
    nccl_memory_bytes_by_gpus: tuple[tuple[int, int], ...]
    elementwise_bandwidth_factor: float
    elementwise_constant_us: float

    def nccl_memory_bytes(self, num_gpus: int) -> int:
        """Bytes of communication buffers on each of `num_gpus` ranks; the largest listed size beyond it."""
        for gpus, nbytes in self.nccl_memory_bytes_by_gpus:
            if num_gpus <= gpus:
                return nbytes
        return self.nccl_memory_bytes_by_gpus[-1][1]


def load_system(gpu: str) -> GpuSystem:
    """Figures of a GPU type (`h200`, `b200`, `h100`, any letter case, or a profile); `UsageError` otherwise."""
    return _load(check_gpu(gpu))


@cache
def _load(name: str) -> GpuSystem:
    raw = json.loads(data_path("ops", f"{name}_sxm", "system.json").read_text(encoding="utf-8"))
    observed = raw["unofficial"]
    return GpuSystem(
        gpu=name,
        memory_capacity_bytes=raw["memory_capacity_bytes"],
        memory_bandwidth_bytes_per_s=raw["memory_bandwidth_bytes_per_s"],
        bf16_tensor_flops_per_s=raw["bf16_tensor_flops_per_s"],
        fp8_tensor_flops_per_s=raw["fp8_tensor_flops_per_s"],
        gpus_per_node=raw["gpus_per_node"],
        other_memory_bytes=observed["other_memory_bytes"],
        nccl_memory_bytes_by_gpus=tuple(
            sorted((int(gpus), int(nbytes)) for gpus, nbytes in observed["nccl_memory_bytes_by_gpus"].items())
        ),
        elementwise_bandwidth_factor=observed["elementwise_bandwidth_factor"],
        elementwise_constant_us=observed["elementwise_constant_s"] * 1e6,
    )
