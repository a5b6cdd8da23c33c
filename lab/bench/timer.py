"""Repeats a call until its median is known well enough: stop rules as small objects, a timer over a clock.

Times are microseconds. The CUDA backend samples with events of its own and takes the stop rules from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median, 20th and 80th percentile, number of samples."""

    p50_us: float
    p20_us: float
    p80_us: float
    samples: int

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        p20, p50, p80 = np.percentile(samples_us, [20, 50, 80])
        return cls(float(p50), float(p20), float(p80), len(samples_us))


class StopRule(Protocol):
    """Says when sampling may end."""

    def __call__(self, samples_us: Sequence[float], spent_s: float) -> bool:
        """Whether these samples, taken in `spent_s` seconds, are enough."""


@dataclass(frozen=True, slots=True)
class MedianSpread:
    """Enough when the median's spread is below `relative` of it.

    The spread is half the distance of the 20th and 80th percentile over the square root of the number of samples.
    """

    relative: float = 0.005
    min_samples: int = 9

    def __call__(self, samples_us: Sequence[float], spent_s: float) -> bool:
        if len(samples_us) < self.min_samples:
            return False
        p20, p50, p80 = np.percentile(samples_us, [20, 50, 80])
        return bool((p80 - p20) / 2 / len(samples_us) ** 0.5 < self.relative * p50)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Enough after `seconds`, with at least `min_samples`."""

    seconds: float
    min_samples: int = 3

    def __call__(self, samples_us: Sequence[float], spent_s: float) -> bool:
        return spent_s >= self.seconds and len(samples_us) >= self.min_samples


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Enough as soon as one of the rules says so."""

    rules: tuple[StopRule, ...]

    def __call__(self, samples_us: Sequence[float], spent_s: float) -> bool:
        return any(rule(samples_us, spent_s) for rule in self.rules)


def time_calls(
    call: Callable[[], object],
    stop: StopRule,
    *,
    before: Callable[[], object] = lambda: None,
    warm_up: int = 2,
    calls_per_sample: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time `call` until `stop` says that it is enough.

    `before` runs ahead of every call and is not timed. A sample is the mean of `calls_per_sample` calls, for work that
    comes once in several. The time limit counts everything, `before` and warm-up included.
    """
    start = clock()
    for _ in range(warm_up):
        before()
        call()
    samples_us: list[float] = []
    while not stop(samples_us, clock() - start):
        timed_s = 0.0
        for _ in range(calls_per_sample):
            before()
            begin = clock()
            call()
            timed_s += clock() - begin
        samples_us.append(1e6 * timed_s / calls_per_sample)
    return Timing.of(samples_us)
