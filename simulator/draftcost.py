"""What drafting costs: one pass of the multi-token-prediction layer per depth of the tree."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lab.profiles.operators import load_tables
from lab.shapes import ModelShape
from simulator.attentioncost import AttentionHeads, verify_attention
from simulator.rowcost import IndexedCost, RowPricer

#: Context at which the drafting layer's attention is priced, in tokens: its share of a step is too small to
#: follow.
DRAFT_KV_LEN = 2048


@lru_cache(maxsize=64)
def draft_cost(
    shape: ModelShape,
    gpu: str,
    tp: int,
    weight_dtype: str,
    kv_dtype: str,
    routing: str,
    widths: tuple[int, ...],
    max_num_seqs: int,
) -> IndexedCost:
    """Drafting a tree with `widths[d - 1]` drafts at depth d, for 0 to `max_num_seqs` requests.

    The pass that proposes depth d runs over the rows of depth d - 1, the root at first: embedding, two input
    norms, the fused input projection, one full-attention layer at `DRAFT_KV_LEN` tokens of context, its MLP,
    a final norm and the output head. Times are microseconds; no widths cost nothing.
    """
    requests = np.arange(1, max_num_seqs + 1, dtype=np.float64)
    tables, heads = load_tables(gpu), AttentionHeads.of(shape, kv_dtype, tp)
    total, extrapolated = np.zeros(max_num_seqs), np.zeros(max_num_seqs, dtype=np.bool_)
    for width in (1, *widths)[: len(widths)]:
        pricer = RowPricer(shape, tables, tp, weight_dtype, routing, requests * width)
        attention = verify_attention(tables, heads, requests, DRAFT_KV_LEN - width, width)
        total += pricer.embedding() + 3 * pricer.final_norm() + pricer.gemm("mtp_fc")
        total += pricer.full_layer() + attention.latency_us + pricer.mlp() + pricer.gemm("lm_head")
        extrapolated |= pricer.extrapolated | attention.extrapolated
    return IndexedCost.of(total, extrapolated)
