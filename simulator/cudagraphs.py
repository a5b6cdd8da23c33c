"""CUDA graphs: row counts that a step is padded to, and what launching kernels one by one costs where there are none.

vLLM's default sizes are rows: 1, 2, 4, every 8th up to 256 and every 16th up to 512, no more than twice what
`max_num_seqs` requests bring. With drafts they are rounded up to whole requests, as for its graphs of uniform decoding.
SGLang's are requests, denser with drafts, up to 256 (512 over four ranks or more, or with more than 160 GB).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.errors import InfeasibleError
from lab.profiles.grids import Floats
from lab.units import ceil_div
from simulator.rowcost import IndexedCost
from simulator.settings import EngineSettings

#: Largest default size of vLLM, in rows.
VLLM_LARGEST = 512
#: Without a graph a step takes at least this long per layer: its kernels are launched one by one. The source of the
#: operator tables adds it to vLLM's time to first token; steps with prompts pay `host.ms_per_prompt_step` instead,
#: which was fitted on steps that hold it.
EAGER_LAUNCH_US_PER_LAYER = 800.0


@dataclass(frozen=True, slots=True)
class CudaGraphs:
    """The captured numbers of rows, ascending; none when every step runs without a graph."""

    sizes: tuple[int, ...]

    def padded(self, count: int) -> Any:
        """[count + 1] int64: rows that 0 to `count` rows are computed as; above the largest size they stay as many."""
        rows = np.arange(count + 1)
        if not self.sizes:
            return rows
        sizes = np.array(self.sizes)
        place = np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)
        return np.where((rows > 0) & (rows <= sizes[-1]), sizes[place], rows)

    def priced(self, cost: IndexedCost, count: int) -> Floats:
        """[count + 1] µs of a cost by rows, each number of rows at the price of the graph that holds it."""
        found: Floats = cost.latency_us[self.padded(count)]
        return found

    def launch_us(self, count: int, layers: int) -> Floats:
        """[count + 1] µs that a step of so many rows lasts at least, for its launches; 0 inside a graph."""
        eager = np.arange(count + 1) > (self.sizes[-1] if self.sizes else 0)
        return np.where(eager, EAGER_LAUNCH_US_PER_LAYER * layers, 0.0)


def captured_graphs(engine: EngineSettings, rows_per_request: int) -> CudaGraphs:
    """The graphs of an engine whose decoding requests bring so many rows each.

    Raises `InfeasibleError` when sizes are given and none holds a request.
    """
    sizes: Iterable[int] | None = engine.cudagraph_capture_sizes
    if sizes is None:
        largest = min(2 * engine.max_num_seqs * rows_per_request, VLLM_LARGEST)
        sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, VLLM_LARGEST + 1, 16)) if size <= largest]
    else:
        largest = max(sizes, default=0)
    whole = {ceil_div(size, rows_per_request) * rows_per_request for size in sizes}
    held = tuple(sorted(size for size in whole if size <= largest))
    if engine.cudagraph_capture_sizes and not held:
        raise InfeasibleError(
            f"cudagraph_capture_sizes up to {largest} hold no request of {rows_per_request} rows; add a multiple of "
            f"{rows_per_request}, or give an empty list to run without CUDA graphs"
        )
    return CudaGraphs(held)


def sglang_sizes(
    requests: tuple[int, ...] | None, rows_per_request: int, tp: int, memory_bytes: int
) -> tuple[int, ...]:
    """Rows of SGLang's graphs, which are captured by requests: those given, or its default list."""
    if requests is None:
        most = 256 if tp < 4 and memory_bytes < 160 << 30 else 512
        few: tuple[int, ...] = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512)
        if rows_per_request > 1:
            few = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 513, 16))
        requests = tuple(count for count in few if count <= most)
    return tuple(rows_per_request * count for count in requests)
