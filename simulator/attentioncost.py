"""What full attention costs: decoding requests by batch and context, prompts by length.

Times are microseconds for all full-attention layers of one rank. The tables hold one query token per request
(decoding) and whole prompts; several rows against a cached context, which a verification needs, are modelled
from both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lab.profiles.grids import Floats, Lookup
from lab.profiles.operators import OperatorTables, load_tables
from lab.shapes import ModelShape
from simulator.rowcost import IndexedCost, attention_heads


class AttentionHeads(NamedTuple):
    """Heads of one rank and the type of its KV cache, in the order of the attention look-ups."""

    q_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str

    @classmethod
    def of(cls, shape: ModelShape, kv_dtype: str, tp: int) -> AttentionHeads:
        return cls(*attention_heads(shape, tp), shape.head_dim, kv_dtype)


class DecodeAttention(NamedTuple):
    """`latency_us[i, j]` of `batches[i]` requests, `contexts[j]` tokens each; `measured` is 1.0 or 0.0."""

    batches: Floats
    contexts: Floats
    latency_us: Floats
    measured: Floats


def verify_attention(
    tables: OperatorTables, heads: AttentionHeads, requests: ArrayLike, context: ArrayLike, rows: int
) -> Lookup:
    """One layer's attention of `rows` rows per request against `context` cached tokens.

    One row takes the decode kernel at context + 1. More rows take the larger of that kernel at context + rows
    (every key and value is read once) and the rows' share of a whole prompt of that length (their work).
    """
    length = np.asarray(context, dtype=np.float64) + rows
    read = tables.attention_decode(*heads, requests, length)
    if rows == 1:
        return read
    prompt = tables.attention_prefill(*heads, requests, length)
    work_us = prompt.latency_us * (1 - ((length - rows) / length) ** 2)
    heavier = work_us > read.latency_us
    return Lookup(
        np.where(heavier, work_us, read.latency_us), np.where(heavier, prompt.extrapolated, read.extrapolated)
    )


def pass_widths(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Rows per request of the passes that draft a tree with `widths[d - 1]` drafts at depth d: those of depth d - 1."""
    return (1, *widths)[: len(widths)]


@lru_cache(maxsize=64)
def decode_attention_cost(
    shape: ModelShape, gpu: str, tp: int, kv_dtype: str, rows: int, widths: tuple[int, ...]
) -> DecodeAttention:
    """Attention of decoding requests with `rows` rows each, on the measured batches and lengths.

    The passes that draft a tree with `widths[d - 1]` drafts at depth d each add one layer's attention of their rows.
    """
    tables, heads = load_tables(gpu), AttentionHeads.of(shape, kv_dtype, tp)
    grid = tables.decode_grid(*heads)
    lengths = grid.lengths
    if rows > 1:
        # The larger of two curves bends between measured lengths, so the grid is refined there.
        between = np.round(np.sqrt(lengths[1:] * lengths[:-1]))
        lengths = np.concatenate((lengths, between))
    contexts = np.unique(np.maximum(lengths - rows, 0))
    found = verify_attention(tables, heads, grid.batches[:, None], contexts[None, :], rows)
    latency_us, extrapolated = shape.num_full_layers * found.latency_us, found.extrapolated
    for width in pass_widths(widths):
        drafting = verify_attention(tables, heads, grid.batches[:, None], contexts[None, :], width)
        latency_us = latency_us + drafting.latency_us
        extrapolated = extrapolated | drafting.extrapolated
    measured = np.ascontiguousarray(~extrapolated, dtype=np.float64)
    return DecodeAttention(grid.batches, contexts, np.ascontiguousarray(latency_us), measured)


@lru_cache(maxsize=64)
def prefill_attention_cost(shape: ModelShape, gpu: str, tp: int, kv_dtype: str, max_tokens: int) -> IndexedCost:
    """Attention of one whole prompt of 0 to `max_tokens` tokens."""
    tokens = np.arange(1, max_tokens + 1, dtype=np.float64)
    found = load_tables(gpu).attention_prefill(*AttentionHeads.of(shape, kv_dtype, tp), 1, tokens)
    return IndexedCost.of(shape.num_full_layers * found.latency_us, found.extrapolated)
