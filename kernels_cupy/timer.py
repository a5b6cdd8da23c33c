"""Times launches with CUDA events: graph replays or eager calls, medians and percentiles, and the copy bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kernels_cupy.compiler import kernel, load_cupy


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median, 20th and 80th percentile, number of samples."""

    p50_us: float
    p20_us: float
    p80_us: float
    samples: int


def graph_of(launch: Callable[[], None]) -> Any:
    """The launches captured into a CUDA graph, and the stream it replays on."""
    cp = load_cupy()
    launch()  # compiles and loads what it needs
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
    return graph, stream


def time_graph(
    launch: Callable[[], None], calls_per_sample: int = 1, min_samples: int = 11, limit_s: float = 0.1
) -> Timing:
    """Time replays of the captured launches; see `_sample`."""
    graph, stream = graph_of(launch)
    return _sample(lambda: graph.launch(stream), stream, calls_per_sample, min_samples, limit_s)


def time_eager(
    launch: Callable[[], None], calls_per_sample: int = 1, min_samples: int = 11, limit_s: float = 0.1
) -> Timing:
    """Time launches from Python, one after another; see `_sample`."""
    stream = load_cupy().cuda.Stream(non_blocking=True)
    with stream:
        return _sample(launch, stream, calls_per_sample, min_samples, limit_s)


def _sample(call: Callable[[], None], stream: Any, calls_per_sample: int, min_samples: int, limit_s: float) -> Timing:
    """A sample is the mean of `calls_per_sample` calls in a row.

    Long calls get fewer of both. Sampling stops when the median's spread (half the distance of p20 and p80 over the
    square root of the samples) is below 0.3 %, or at the time limit.
    """
    cp = load_cupy()
    for _ in range(max(3, calls_per_sample)):
        call()
    stream.synchronize()
    begin = time.perf_counter()
    call()
    stream.synchronize()
    per_call_s = time.perf_counter() - begin
    if per_call_s * calls_per_sample * min_samples > 2 * limit_s:
        calls_per_sample = max(1, min(calls_per_sample, int(limit_s / (3 * per_call_s))))
        min_samples = 5
    samples: list[float] = []
    spent_s = 0.0
    while True:
        events = [cp.cuda.Event() for _ in range(min_samples + 1)]
        events[0].record(stream)
        for event in events[1:]:
            for _ in range(calls_per_sample):
                call()
            event.record(stream)
        stream.synchronize()
        for first, second in pairwise(events):
            elapsed_us = 1e3 * cp.cuda.get_elapsed_time(first, second)
            samples.append(elapsed_us / calls_per_sample)
            spent_s += 1e-6 * elapsed_us
        p20, p50, p80 = np.percentile(samples, [20, 50, 80])
        if (p80 - p20) / 2 / len(samples) ** 0.5 < 0.003 * p50 or spent_s > limit_s:
            return Timing(float(p50), float(p20), float(p80), len(samples))


def copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes per second, read plus written, of the better of two device-to-device copies of `nbytes`.

    One is the driver's, one a kernel of 16-byte loads and stores.
    """
    cp = load_cupy()
    source, target = cp.ones(nbytes // 4, np.float32), cp.empty(nbytes // 4, np.float32)
    copy_kernel = kernel("cursors.cu", "copy_bytes")

    def by_driver() -> None:
        target.data.copy_from_device_async(source.data, nbytes, cp.cuda.get_current_stream())

    def by_kernel() -> None:
        copy_kernel((nbytes // 16384,), (256,), (source, target, np.int64(nbytes // 16)))

    fastest = min(time_graph(copy, calls_per_sample=2, limit_s=0.1).p50_us for copy in (by_driver, by_kernel))
    return 2 * nbytes / (fastest * 1e-6)
