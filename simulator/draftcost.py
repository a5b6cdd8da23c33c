"""What drafting costs: one pass of the multi-token-prediction layer per depth of the tree."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lab.profiles.operators import load_tables
from lab.shapes import ModelShape
from simulator.attentioncost import pass_widths
from simulator.rowcost import IndexedCost, RowPricer


@lru_cache(maxsize=64)
def draft_cost(
    shape: ModelShape,
    gpu: str,
    tp: int,
    weight_dtype: str,
    routing: str,
    widths: tuple[int, ...],
    max_num_seqs: int,
) -> IndexedCost:
    """Drafting a tree with `widths[d - 1]` drafts at depth d, for 0 to `max_num_seqs` requests.

    The pass that proposes depth d runs over the rows of depth d - 1, the root at first: embedding, two input
    norms, the fused input projection, the projections of one full-attention layer, its MLP, a final norm and the
    output head. Its attention goes with that of the model, which knows the context. Times are microseconds; no
    widths cost nothing.
    """
    requests = np.arange(1, max_num_seqs + 1, dtype=np.float64)
    tables = load_tables(gpu)
    total, extrapolated = np.zeros(max_num_seqs), np.zeros(max_num_seqs, dtype=np.bool_)
    for width in pass_widths(widths):
        pricer = RowPricer(shape, tables, tp, weight_dtype, routing, requests * width)
        total += pricer.embedding() + 3 * pricer.final_norm() + pricer.gemm("mtp_fc")
        total += pricer.full_layer() + pricer.mlp() + pricer.gemm("lm_head")
        extrapolated |= pricer.extrapolated
    return IndexedCost.of(total, extrapolated)
