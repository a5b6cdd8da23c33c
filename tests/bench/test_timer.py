"""The timer on a clock of its own: samples, stop rules, time that does not count."""

from __future__ import annotations

import pytest

from lab.bench.timer import AnyOf, MedianSpread, TimeLimit, Timing, time_calls


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_steady_call_stops_at_the_fewest_samples() -> None:
    clock = Clock()
    found = time_calls(lambda: clock.passes(0.25), MedianSpread(0.01, min_samples=5), clock=clock)
    assert found == Timing(250_000.0, 250_000.0, 250_000.0, 5)


def test_a_noisy_call_is_sampled_until_the_median_is_known() -> None:
    clock = Clock()
    lengths = iter([0.5, 1.0, 1.5] * 1000)
    found = time_calls(lambda: clock.passes(next(lengths)), MedianSpread(0.05, min_samples=5), clock=clock, warm_up=0)
    assert found.p50_us == 1e6
    assert 90 < found.samples < 120  # half the spread is 0.5 s, and 0.5 / sqrt(100) is 5 % of the median


def test_the_time_limit_ends_it_but_leaves_samples() -> None:
    clock = Clock()
    lengths = iter([1.0, 3.0] * 100)
    stop = AnyOf((MedianSpread(1e-9), TimeLimit(0.5, min_samples=3)))
    assert time_calls(lambda: clock.passes(next(lengths)), stop, clock=clock, warm_up=0).samples == 3


def test_what_comes_before_a_call_and_the_warm_up_are_not_timed() -> None:
    clock = Clock()
    first = iter([9.0, 9.0] + [0.5] * 100)
    found = time_calls(
        lambda: clock.passes(next(first)), MedianSpread(min_samples=3), before=lambda: clock.passes(7.0), clock=clock
    )
    assert found.p80_us == 500_000


def test_a_sample_is_the_mean_of_several_calls() -> None:
    clock = Clock()
    lengths = iter([0.25, 0.25, 0.25, 1.25] * 10)
    found = time_calls(
        lambda: clock.passes(next(lengths)), MedianSpread(min_samples=3), calls_per_sample=4, warm_up=0, clock=clock
    )
    assert (found.p20_us, found.p50_us, found.samples) == (500_000, 500_000, 3)


def test_percentiles() -> None:
    found = Timing.of([float(x) for x in range(1, 12)])
    assert (found.p20_us, found.p50_us, found.p80_us, found.samples) == pytest.approx((3.0, 6.0, 9.0, 11))
