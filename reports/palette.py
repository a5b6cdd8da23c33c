"""One colour and dash per state method, one colour per ledger line; the same in every chart and table.

Method colours follow Okabe and Ito's palette for colour-blind readers, darkened to at least 3:1 on white; dashes tell
lines apart in black and white. storeall is grey, treelog the accent.
"""

from __future__ import annotations

METHOD_COLOURS: dict[str, str] = {
    "recurrent": "#3b3f46",
    "storeall": "#7a7f87",
    "replayssm": "#0072b2",
    "treewy": "#00805d",
    "bole": "#b35a94",
    "specla": "#a87b00",
    "lumotree": "#3a93c4",
    "deltalog": "#6a51a3",
    "treelog": "#d55e00",
}
METHOD_DASHES: dict[str, list[int]] = {
    "recurrent": [2, 2],
    "storeall": [7, 3],
    "replayssm": [4, 2],
    "treewy": [9, 2, 2, 2],
    "bole": [5, 2, 1, 2],
    "specla": [3, 3],
    "lumotree": [6, 2, 2, 2, 2, 2],
    "deltalog": [1, 2],
    "treelog": [],
}
OTHER_COLOURS = ("#8c564b", "#4d6a00", "#9c1f5c", "#35607a")

#: Ledger lines from the left of the bar to the right: what is fixed, what requests hold, what is free.
LEDGER_LINES: dict[str, tuple[str, str]] = {
    "weights": ("weights", "#4a5563"),
    "drafter_weights": ("drafter weights", "#7b8794"),
    "runtime_and_activations": ("runtime and activations", "#a9b3bd"),
    "collectives": ("collectives", "#c3cad1"),
    "recurrent_state": ("recurrent states", "#00805d"),
    "speculative_states": ("speculative states", "#b3261e"),
    "prefix_cache_states": ("prefix-cache states", "#6a51a3"),
    "convolution_rows": ("convolution rows", "#7fbfa9"),
    "method_scratch": ("records and logs of the method", "#d55e00"),
    "attention_kv": ("attention KV", "#2f7fb8"),
    "drafter_kv": ("drafter KV", "#8dbfe0"),
    "padding": ("block padding", "#e8c98a"),
    "free_blocks": ("free blocks", "#dfe9f2"),
    "pool_remainder": ("less than a block", "#cfd5da"),
    "outside_mem_fraction_static": ("outside mem_fraction_static", "#eef0f2"),
    "outside_gpu_memory_utilization": ("outside gpu_memory_utilization", "#eef0f2"),
}


#: Terms of a step from the left of the bar to the right: what rows cost, states and attention, drafts, the host.
STEP_TERMS: dict[str, tuple[str, str]] = {
    "rows": ("projections, experts and norms", "#4a5563"),
    "head": ("output head", "#a9b3bd"),
    "state": ("recurrent states", "#00805d"),
    "attention": ("attention of decoding requests", "#2f7fb8"),
    "prefill": ("attention of prompts", "#8dbfe0"),
    "draft": ("drafting", "#6a51a3"),
    "host": ("host (CPU)", "#e8c98a"),
}


def method_colour(name: str, unknown: int = 0) -> str:
    """Colour of a state method; `unknown` numbers the methods that the palette does not know."""
    return METHOD_COLOURS.get(name) or OTHER_COLOURS[unknown % len(OTHER_COLOURS)]


def method_colours(names: list[str]) -> dict[str, str]:
    """Colours of several methods, in the order given."""
    unknown = [name for name in names if name not in METHOD_COLOURS]
    return {name: method_colour(name, unknown.index(name) if name in unknown else 0) for name in names}


def ledger_line(name: str, unknown: int = 0) -> tuple[str, str]:
    """Title and colour of a ledger line."""
    known = LEDGER_LINES.get(name)
    return known or (name.replace("_", " "), OTHER_COLOURS[unknown % len(OTHER_COLOURS)])


def ledger_order(names: set[str]) -> list[str]:
    """Ledger lines in drawing order; unknown ones after the known."""
    order = list(LEDGER_LINES)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))
