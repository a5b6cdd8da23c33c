"""Calibrated GPU time: what the operator tables give, times a factor for decoding and one for prompts.

Tables are timed kernel by kernel on a quiet GPU; a service runs them back to back, with other kernels, clocks and
versions. Two factors hold that difference, because it has two causes: steps of few rows wait for memory, steps of many
rows for arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from simulator.stepcost import StepCost

if TYPE_CHECKING:
    from simulator.settings import GpuTimeSettings

#: Rows up to which a step's matrix products wait for weights: FLOP/s over bytes/s of H100, H200 and B200 is 200 to 300.
MEMORY_BOUND_ROWS = 256


def with_gpu_time(cost: StepCost, settings: GpuTimeSettings) -> StepCost:
    """The step cost with both factors applied.

    `decode_factor` multiplies attention and states of decoding requests, drafting, the output head, and what the first
    `MEMORY_BOUND_ROWS` rows of a step cost; `prompt_factor` multiplies attention and states of prompts, and what
    further rows add. States that prefix caching copies count with prompts, those that decoding publishes with decoding.
    """
    decode, prompt = settings.decode_factor, settings.prompt_factor
    if decode == prompt == 1.0:
        return cost
    tables = cost.tables
    rows = np.arange(len(tables.rows_us))
    few = tables.rows_us[np.minimum(rows, MEMORY_BOUND_ROWS)]
    scaled = tables._replace(
        rows_us=np.maximum(decode * few + prompt * (tables.rows_us - few), 0.0),
        head_us=decode * tables.head_us,
        state_us=decode * tables.state_us,
        draft_us=decode * tables.draft_us,
        attn_us=decode * tables.attn_us,
        prefill_attn_us=prompt * tables.prefill_attn_us,
        prefill_state_us=prompt * tables.prefill_state_us,
        copy_us=prompt * tables.copy_us,
        publish_us=decode * tables.publish_us,
    )
    told = f"; times {decode:.3g} (decoding), {prompt:.3g} (prompts), calibrated"
    return replace(cost, tables=scaled, sources={term: text + told for term, text in cost.sources.items()})
