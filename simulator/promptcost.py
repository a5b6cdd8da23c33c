"""What several prompts in one step cost: one launch takes them all, and fills the GPU better than one by one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lab.profiles.grids import Floats
from lab.profiles.operators import OperatorTables
from simulator.attentioncost import AttentionHeads
from simulator.statecost import GdnKernels

#: Prompts in a step and tokens of each at which the gain is taken from the tables.
COUNTS = np.array([1, 2, 4, 8, 16, 32, 64], dtype=np.float64)
LENGTHS = np.array([1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384], dtype=np.float64)


class PromptBatching(NamedTuple):
    """Time of n equal prompts over n times that of one, by `counts[i]` prompts of `lengths[j]` tokens; at most 1.

    `attention[i, j]` for whole prompts of that length, `state[i, j]` for chunks of that length.
    """

    counts: Floats
    lengths: Floats
    attention: Floats
    state: Floats


def prompt_batching(tables: OperatorTables, heads: AttentionHeads, kernels: GdnKernels) -> PromptBatching:
    """The gain of launching prompts together, from the tables' rows at batch 1 to 64."""
    counts, lengths = COUNTS[:, None], LENGTHS[None, :]
    attention = tables.attention_prefill(*heads, counts, lengths).latency_us
    alone = tables.attention_prefill(*heads, 1, LENGTHS).latency_us
    state = kernels.chunk(lengths, counts).latency_us
    return PromptBatching(
        COUNTS.copy(),
        LENGTHS.copy(),
        np.ascontiguousarray(np.minimum(attention / (counts * alone), 1.0)),
        np.ascontiguousarray(np.minimum(state / (counts * state[0]), 1.0)),
    )
