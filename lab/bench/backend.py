"""What the harness asks of a backend: gate a point, time its phases, say what the device is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lab.bench.points import Point
from lab.bench.reference import GateErrors, Reference
from lab.bench.timer import Timing


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to measure: stop at a relative spread of the median, or after a time limit per phase (seconds).

    `cycle_bytes` is the memory that a pass over the layers' buffers should touch before it meets a buffer again.
    """

    relative_spread: float = 0.005
    limit_s: float = 1.0
    min_samples: int = 9
    cycle_bytes: int = 512 << 20


class PhaseTiming(NamedTuple):
    """One timed phase of a point; latencies per layer."""

    phase: str
    timer: str
    timing: Timing


class Backend(Protocol):
    """One way to run the state methods."""

    name: str
    methods: tuple[str, ...]
    #: Processes that may compile, and compute the oracle's runs, while the device is measured.
    host_processes: int

    def prepare(self, points: Sequence[Point]) -> None:
        """Compile what the points need, if that is worth doing at once."""

    def limits(self, point: Point) -> GateErrors:
        """Largest errors that a green gate allows."""

    def variant(self, point: Point) -> object:
        """What sets the kernels of this point apart from those of other batches; each variant is gated once.

        The gate of a variant holds for all its batches, so it may run at another one than the point's.
        """

    def gate(self, point: Point, known: Reference) -> GateErrors:
        """Errors of the point against the oracle."""

    def refusal(self, point: Point) -> str | None:
        """Why the point cannot run on this device, such as its memory; None when it can."""

    def phases(self, point: Point) -> tuple[str, ...]:
        """Phases that can be timed, in the order of `lab.profiles.rows.PHASES`."""

    def timers(self, phase: str) -> tuple[str, ...]:
        """Timers that `measure` has for the phase, in the order of `lab.profiles.rows.TIMERS`."""

    def bytes_moved(self, point: Point, phase: str) -> float:
        """Bytes that the phase moves per layer by the method's law, all requests."""

    def measure(self, point: Point, phases: Collection[str], effort: Effort) -> Iterator[PhaseTiming]:
        """Time the phases; raises `MemoryError` when the device has no room after all."""

    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy, read plus written."""

    def read_bandwidth(self) -> float | None:
        """Bytes per second of a large read, which no phase can exceed; None where caches may serve a phase."""

    def device(self) -> dict[str, Any]:
        """What `device.json` says about the device: name, memory, versions."""

    def clocks(self) -> dict[str, Any]:
        """Clocks and reasons to throttle right now; empty where they are not known."""
