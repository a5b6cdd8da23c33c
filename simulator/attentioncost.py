"""What full attention costs: decoding requests by batch and context, prompts by length.

Times are microseconds for all full-attention layers of one rank. The tables hold one query token per request
(decoding) and whole prompts. Several rows against a cached context, which a verification needs, come from measured
verify attention where a profile serves the GPU, and are modelled from both tables where none does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lab.profiles.attention import GpuAttention, HeadsKey
from lab.profiles.grids import Floats, Lookup
from lab.profiles.operators import OperatorTables, load_tables
from lab.shapes import ModelShape
from simulator.rowcost import IndexedCost, attention_heads

DECODE_SOURCE = "measured: decode kernel"
MODELLED_SOURCE = "modelled: larger of the decode kernel and the share of a whole prompt; no tree mask"


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
    """`latency_us[i, j]` of `batches[i]` requests, `contexts[j]` tokens each; `measured` is 1.0 or 0.0.

    `source` says where the times of the tree's rows come from: `measured: …`, `modelled: …` or `extrapolated: …`.
    """

    batches: Floats
    contexts: Floats
    latency_us: Floats
    measured: Floats
    source: str


def verify_attention(
    tables: OperatorTables,
    heads: AttentionHeads,
    requests: ArrayLike,
    context: ArrayLike,
    rows: int,
    kernels: GpuAttention | None = None,
) -> tuple[Lookup, str]:
    """One layer's attention of `rows` rows per request against `context` cached tokens, and its source.

    One row takes the decode kernel at context + 1. More rows take at least that kernel at context + rows (every key and
    value is read once): the larger of it and the measured `kernels`, or without them the rows' share of a whole prompt
    of that length (their work).
    """
    length = np.asarray(context, dtype=np.float64) + rows
    read = tables.attention_decode(*heads, requests, length)
    if rows == 1:
        return read, DECODE_SOURCE
    found = None if kernels is None else kernels.verify(HeadsKey(*heads), requests, context, rows)
    if kernels is not None and found is not None:
        source = f"{kernels.describe(found.stand_in)}; at least the decode kernel of the operator tables"
        return _larger(Lookup(found.latency_us, found.extrapolated), read), source
    prompt = tables.attention_prefill(*heads, requests, length)
    work_us = prompt.latency_us * (1 - ((length - rows) / length) ** 2)
    return _larger(Lookup(work_us, prompt.extrapolated), read), MODELLED_SOURCE


def _larger(first: Lookup, second: Lookup) -> Lookup:
    heavier = first.latency_us > second.latency_us
    return Lookup(
        np.where(heavier, first.latency_us, second.latency_us),
        np.where(heavier, first.extrapolated, second.extrapolated),
    )


def pass_widths(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Rows per request of the passes that draft a tree with `widths[d - 1]` drafts at depth d: those of depth d - 1."""
    return (1, *widths)[: len(widths)]


def decode_attention_cost(
    shape: ModelShape,
    gpu: str,
    tp: int,
    kv_dtype: str,
    rows: int,
    widths: tuple[int, ...],
    kernels: GpuAttention | None = None,
) -> DecodeAttention:
    """Attention of decoding requests with `rows` rows each, on the measured batches and lengths.

    The passes that draft a tree with `widths[d - 1]` drafts at depth d each add one layer's attention of their rows.
    """
    tables, heads = load_tables(gpu), AttentionHeads.of(shape, kv_dtype, tp)
    grid = tables.decode_grid(*heads)
    batches, lengths = grid.batches, grid.lengths
    if rows > 1:
        # The larger of two curves bends between measured lengths, so the grid is refined there.
        between = np.round(np.sqrt(lengths[1:] * lengths[:-1]))
        lengths = np.concatenate((lengths, between))
    contexts = np.maximum(lengths - rows, 0)
    if rows > 1 and kernels is not None and (points := kernels.profile.points_of(HeadsKey(*heads))) is not None:
        batches = np.union1d(batches, points[0])
        contexts = np.concatenate((contexts, points[1]))
    contexts = np.unique(contexts)
    found, source = verify_attention(tables, heads, batches[:, None], contexts[None, :], rows, kernels)
    latency_us, extrapolated = shape.num_full_layers * found.latency_us, found.extrapolated
    for width in pass_widths(widths):
        drafting, _ = verify_attention(tables, heads, batches[:, None], contexts[None, :], width, kernels)
        latency_us = latency_us + drafting.latency_us
        extrapolated = extrapolated | drafting.extrapolated
    measured = np.ascontiguousarray(~extrapolated, dtype=np.float64)
    return DecodeAttention(batches, contexts, np.ascontiguousarray(latency_us), measured, source)


@lru_cache(maxsize=64)
def prefill_attention_cost(shape: ModelShape, gpu: str, tp: int, kv_dtype: str, max_tokens: int) -> IndexedCost:
    """Attention of one whole prompt of 0 to `max_tokens` tokens."""
    tokens = np.arange(1, max_tokens + 1, dtype=np.float64)
    found = load_tables(gpu).attention_prefill(*AttentionHeads.of(shape, kv_dtype, tp), 1, tokens)
    return IndexedCost.of(shape.num_full_layers * found.latency_us, found.extrapolated)
