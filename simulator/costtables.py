"""Step costs as the compiled loop sees them: arrays, and how a step is looked up in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lab.profiles.grids import Floats
from simulator.jit import njit


class CostTables(NamedTuple):
    """Microseconds for the whole model on one rank; every array is float64 and C-contiguous.

    `rows_us[R]`: all that sees only the R rows of a step. `head_us[L]`: output head at L rows that need
    logits. `state_us[n]`: states and convolution of n decoding requests. `draft_us[n]`: drafting for n
    requests. `attn_us[i, j]`: attention of `attn_batch[i]` decoding requests with `attn_len[j]` tokens of
    context each before the step; `attn_measured` is 0.0 where it was extrapolated. `prefill_attn_us[p]`:
    attention of a prompt of p tokens from scratch. `prefill_state_us[s]`: states and convolution of a chunk
    of s prompt tokens. `batch_attn[i, j]` and `batch_state[i, j]`: what is left of the sum of those when a step
    carries `batch_count[i]` prompts of `batch_len[j]` tokens. `limits`: the largest rows, prompt length, decoding
    requests, chunk, rows with logits and drafting requests inside the measured points. `copy_us[n]` and
    `publish_us[n]`: copying the states of n requests to another block, and making those of n requests fit to be cached.
    `launch_us[R]`: how long a step of R rows without prompts lasts at least, its kernels being launched one by one.
    """

    rows_us: Floats
    head_us: Floats
    state_us: Floats
    draft_us: Floats
    attn_batch: Floats
    attn_len: Floats
    attn_us: Floats
    attn_measured: Floats
    prefill_attn_us: Floats
    prefill_state_us: Floats
    batch_count: Floats
    batch_len: Floats
    batch_attn: Floats
    batch_state: Floats
    limits: Floats
    copy_us: Floats = np.zeros(1)
    publish_us: Floats = np.zeros(1)
    launch_us: Floats = np.zeros(1)


@njit(inline="always")
def _place(points: Floats, x: float) -> tuple[int, float]:
    """The interval of ascending `points` that holds x, and how far into it x lies; the ends hold what is outside."""
    inside = min(max(x, points[0]), points[-1])
    i = min(max(np.searchsorted(points, inside, side="right") - 1, 0), len(points) - 2)
    return i, (inside - points[i]) / (points[i + 1] - points[i])


@njit(inline="always")
def _bilinear(values: Floats, i: int, u: float, j: int, v: float) -> float:
    low: float = (1.0 - v) * values[i, j] + v * values[i, j + 1]
    high: float = (1.0 - v) * values[i + 1, j] + v * values[i + 1, j + 1]
    return (1.0 - u) * low + u * high


@njit()
def attention_us(tables: CostTables, requests: float, mean_context: float) -> tuple[float, bool]:
    """Attention of the decoding requests, and whether it is extrapolated; bilinear, the rate held outside."""
    if requests <= 0:
        return 0.0, False
    i, u = _place(tables.attn_batch, float(requests))
    j, v = _place(tables.attn_len, float(mean_context))
    last_batch, last_len = tables.attn_batch[-1], tables.attn_len[-1]
    held = max(requests / last_batch, 1.0) * max(mean_context / last_len, 1.0)
    outside = requests > last_batch or mean_context > last_len
    known = _bilinear(tables.attn_measured, i, u, j, v)
    return held * _bilinear(tables.attn_us, i, u, j, v), outside or known < 1.0 - 1e-9


@njit()
def prefill_us(tables: CostTables, done: int, chunk: int) -> tuple[float, float, bool]:
    """Attention and state time of a prompt chunk after `done` tokens, and whether either is extrapolated."""
    if chunk <= 0:
        return 0.0, 0.0, False
    end = done + chunk
    share = 1.0 - (done / end) ** 2
    longest = len(tables.prefill_attn_us) - 1
    attention = tables.prefill_attn_us[min(end, longest)] * max(end / longest, 1.0) ** 2 * share
    largest = len(tables.prefill_state_us) - 1
    state = tables.prefill_state_us[min(chunk, largest)] * max(chunk / largest, 1.0)
    return attention, state, end > tables.limits[1] or chunk > tables.limits[3]


@njit(inline="always")
def boundary_us(tables: CostTables, copied: int, published: int) -> float:
    """Time for the states of requests that move to another block: `copied` of prompts, `published` of decoding ones."""
    copying: float = tables.copy_us[min(copied, len(tables.copy_us) - 1)]
    publishing: float = tables.publish_us[min(published, len(tables.publish_us) - 1)]
    return copying + publishing


@njit(inline="always")
def launch_wait_us(tables: CostTables, rows: int, prompt_tokens: int, gpu_us: float) -> float:
    """How long a step without prompts waits for the launches of its kernels, beyond the GPU's own time."""
    if prompt_tokens > 0:
        return 0.0
    wait: float = max(tables.launch_us[min(rows, len(tables.launch_us) - 1)] - gpu_us, 0.0)
    return wait


@njit()
def batching_shares(tables: CostTables, prompts: int, mean_end: float, mean_chunk: float) -> tuple[float, float]:
    """What is left of the summed attention and state times when the prompts of a step are launched together.

    `mean_end` is the mean length of the prompts up to the end of their chunks, `mean_chunk` that of the chunks.
    """
    if prompts <= 1:
        return 1.0, 1.0
    i, u = _place(tables.batch_count, float(prompts))
    j, v = _place(tables.batch_len, mean_end)
    attention = _bilinear(tables.batch_attn, i, u, j, v)
    j, v = _place(tables.batch_len, mean_chunk)
    return attention, _bilinear(tables.batch_state, i, u, j, v)
