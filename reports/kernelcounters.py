"""What `docs/kernels.md` says of a record of `kernels_cupy.counters`: counters, clock and power of the main cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from reports.kernelcells import STATES, Cell, Kernel, us

#: Schedulers of a multiprocessor, of which the counters give one.
SCHEDULERS = 4
#: Counters in percent of a peak, by the name of their column.
PERCENT = {"DRAM %": "dram", "L2 %": "l2", "L1 %": "l1", "tensor %": "tensor", "issue %": "issue"}
#: Why warps wait, as Nsight Compute names it -> in words.
WAITS = {
    "long_scoreboard": "global memory",
    "short_scoreboard": "shared memory",
    "wait": "fixed latency",
    "barrier": "barrier",
    "not_selected": "another warp issues",
    "no_instruction": "instruction fetch",
    "imc_miss": "constant cache",
    "mio_throttle": "queue of shared memory",
    "lg_throttle": "queue of global memory",
    "math_pipe_throttle": "arithmetic pipe",
    "dispatch_stall": "dispatch",
    "branch_resolving": "branch",
}
SHOWN_WAITS = 3
HEADER = (
    "state", "kernel", "batch", "cut", *PERCENT, "warps", "waits", "first µs", "sustained µs", "clock MHz", "power W",
)  # fmt: skip


def held_down(record: Mapping[str, Any]) -> str:
    """What held the clock down while cells were replayed, in a sentence; nothing where nothing did."""
    held = [cell for cell in record["cells"] if cell["held_down_by"]]
    if not held:
        return ""
    reasons = ", ".join(sorted({reason for cell in held for reason in cell["held_down_by"]}))
    longer = [max(100 * (cell["sustained_us"] / cell["first_us"] - 1), 0) for cell in held]
    return (
        f"Replayed for {record['seconds']:g} s, {len(held)} of {len(record['cells'])} cells have their clock held down "
        f"({reasons}): it falls to {min(cell['sm_clock_mhz'] for cell in held):.0f} to "
        f"{max(cell['sm_clock_mhz'] for cell in held):.0f} MHz, and a step takes "
        f"{min(longer):.0f} to {max(longer):.0f} % longer than at first."
    )


def lost(record: Mapping[str, Any], judged: Iterable[Cell]) -> str:
    """Which cells meet their target, but not when they run for long, in a sentence; nothing where none does."""
    targets = {(cell.state_dtype, cell.kernel.tree, cell.batch): cell for cell in judged if cell.verdict == "met"}
    found = [
        f"{STATES[place[0]]} {targets[place].kernel.title} at batch {place[2]} "
        f"({cell['sustained_us']:.1f} µs / {targets[place].target_us:g})"
        for cell in record["cells"]
        if (place := (cell["state_dtype"], cell["tree"], cell["batch"])) in targets
        and cell["sustained_us"] > targets[place].target_us
    ]
    if not found:
        return ""
    return f"At that pace these would miss the target that they meet: {', '.join(found)}."


def line(cell: Mapping[str, Any]) -> tuple[str, ...]:
    """A cell's line of the table with `HEADER`."""
    waits = sorted(cell["waits"].items(), key=lambda wait: -wait[1])[:SHOWN_WAITS]
    return (
        STATES[cell["state_dtype"]], Kernel.of_tree(cell["tree"]).title, str(cell["batch"]), f"`{cell['plan']}`",
        *(f"{cell[name]:.0f}" for name in PERCENT.values()), f"{SCHEDULERS * cell['resident_warps']:.0f}",
        ", ".join(f"{WAITS.get(name, name)} {share:.0f} %" for name, share in waits),
        us(cell["first_us"]), us(cell["sustained_us"]), f"{cell['sm_clock_mhz']:.0f}", f"{cell['power_w']:.0f}",
    )  # fmt: skip
