"""Samples of launches by CUDA events, graph replays or eager calls, and the bandwidth of copies and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from kernels_cupy.compiler import kernel, load_cupy

#: Samples that are recorded before the stop rule is asked again.
SAMPLES_AT_A_TIME = 9


class Enough(Protocol):
    """Says when sampling may end."""

    def __call__(self, samples_us: Sequence[float], spent_s: float) -> bool:
        """Whether these samples, taken in `spent_s` seconds, are enough."""


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


def time_graph(launch: Callable[[], None], enough: Enough, calls_per_sample: int = 1) -> list[float]:
    """Microseconds per replay of the captured launches; see `_sample`."""
    graph, stream = graph_of(launch)
    return _sample(lambda: graph.launch(stream), stream, enough, calls_per_sample)


def time_eager(launch: Callable[[], None], enough: Enough, calls_per_sample: int = 1) -> list[float]:
    """Microseconds per call from Python, one after another; see `_sample`."""
    stream = load_cupy().cuda.Stream(non_blocking=True)
    with stream:
        return _sample(launch, stream, enough, calls_per_sample)


def _sample(call: Callable[[], None], stream: Any, enough: Enough, calls_per_sample: int) -> list[float]:
    """Samples until `enough` says so, after a warm-up; each is the mean of `calls_per_sample` calls in a row."""
    cp = load_cupy()
    for _ in range(max(3, calls_per_sample)):
        call()
    samples: list[float] = []
    spent_s = 0.0
    while not enough(samples, spent_s):
        events = [cp.cuda.Event() for _ in range(SAMPLES_AT_A_TIME + 1)]
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
    return samples


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

    return 2 * nbytes / (1e-6 * min(map(_median, (by_driver, by_kernel))))


def read_bandwidth(nbytes: int = 1 << 31) -> float:
    """Bytes per second of a kernel that only reads `nbytes`: more than a copy reaches, since nothing turns around."""
    cp = load_cupy()
    source, found = cp.ones(nbytes // 4, np.float32), cp.zeros(1, np.uint32)
    read_kernel = kernel("cursors.cu", "read_bytes")

    def read() -> None:
        read_kernel((nbytes // 32768,), (256,), (source, found, np.int64(nbytes // 16)))

    return nbytes / (1e-6 * _median(read))


def _median(launch: Callable[[], None]) -> float:
    """Median microseconds of a launch over at least 0.1 s of replays."""
    return float(np.median(time_graph(launch, lambda samples, spent_s: spent_s > 0.1, calls_per_sample=2)))
