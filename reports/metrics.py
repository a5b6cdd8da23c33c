"""The quantities that are drawn against load, and what a reader must know about each."""

from __future__ import annotations

from dataclasses import dataclass

from reports.data import Group
from reports.text import counted


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity drawn against load."""

    key: str
    field: str
    title: str
    unit: str
    note: str = ""
    log: bool = False


LOAD_METRICS = (
    Metric(
        "peak-kv",
        "committed_gib",
        "Memory committed to requests against load",
        "GiB",
        "Blocks of the pool held at the peak (attention KV, recurrent states), and the records that a method reserves "
        "at start-up for all requests that may run, whatever runs. The dotted line in a method's colour is its limit: "
        "its pool and its records; lines may lie on each other.",
    ),
    Metric("ttft", "p99_ttft_ms", "p99 time to first token against load", "ms, log scale", log=True),
    Metric("throughput", "output_throughput", "Output throughput against load", "tokens/s"),
    Metric("tpot", "mean_tpot_ms", "Mean time per output token (TPOT) against load", "ms"),
)


def metric_note(metric: Metric, group: Group) -> str:
    """The note of a figure, with what holds for the group's kind of load only."""
    closed = {
        "ttft": f"Waiting for memory shows here first: the curve leaves the others at the knee. {first_burst(group)}",
        "tpot": "Steps that carry more requests take longer: a method may have the higher TPOT and yet the higher "
        "throughput.",
    }
    rated = {
        "ttft": "Past saturation the queue grows as long as the run lasts: there the figure tells the run's length.",
        "throughput": "While a service keeps up it gives out what is asked of it; the curve leaves the others where "
        "it no longer does.",
        "tpot": "Past saturation it tells how many requests the method lets run at once, not how well it serves them.",
    }
    return metric.note or (rated if group.open_loop else closed).get(metric.key, "")


def first_burst(group: Group) -> str:
    """What latencies of a closed loop make of its first requests, which all clients send at once."""
    warmup = min(cell.num_warmup_requests for cell in group.cells)
    if group.cells[0].arrivals != "closed-loop":
        return ""
    if warmup == 0:
        return "In a closed loop all clients send their first request at once; p99 holds that burst."
    text = (
        f"The first {counted(warmup, 'request')} of a cell, the burst of all clients at the start among them, are left "
        "out of latencies and throughput."
    )
    if warmup < group.loads[-1]:
        text += f" At loads above {warmup} the rest of that burst is in p99."
    return text
