"""What depends only on the rows of a step: projections, experts, small kernels, collectives, output head.

`RowPricer` prices the parts of a model at arrays of row counts; `row_cost` and `head_cost` put them together
for a whole step. Times are microseconds on one tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from lab.profiles.grids import Bools, Floats, Lookup
from lab.profiles.operators import OperatorTables, load_tables
from lab.shapes import ModelShape
from lab.units import ceil_div

#: Up to this many rows the shared expert runs beside the routed ones on a second stream; above, one after the
#: other.
SHARED_EXPERT_STREAM_ROWS = 256

Where = Literal["linear", "full", "mlp", "head", "draft"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix product of one rank: `n` columns, depth `k`, and whether 8-bit checkpoints quantise it."""

    op: str
    where: Where
    n: int
    k: int
    quantised: bool


def gemms(shape: ModelShape, tp: int) -> tuple[Gemm, ...]:
    """All matrix products of a model, routed experts excluded, with the shapes one rank sees.

    Routers, gates, the b and a projections, the output head and the drafter's input projection stay bf16, the
    usual exclusions of quantised checkpoints.
    """
    hidden = shape.hidden_size
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    q_heads, kv_heads = attention_heads(shape, tp)
    query = q_heads * shape.head_dim
    found = [
        Gemm("gdn_in_proj_qkvz", "linear", (2 * keys + 2 * values) // tp, hidden, True),
        Gemm("gdn_in_proj_ba", "linear", 2 * shape.linear_num_value_heads // tp, hidden, False),
        Gemm("gdn_out_proj", "linear", hidden, values // tp, True),
        Gemm(
            "attn_qkv_gate",
            "full",
            query * (2 if shape.attn_output_gate else 1) + 2 * kv_heads * shape.head_dim,
            hidden,
            True,
        ),
        Gemm("attn_o_proj", "full", hidden, query, True),
    ]
    if shape.is_moe:
        found.append(Gemm("router", "mlp", shape.num_experts, hidden, False))
        shared = shape.shared_expert_intermediate_size // tp
        if shared:
            found += [
                Gemm("shared_expert_gate", "mlp", 1, hidden, False),
                Gemm("shared_gate_up", "mlp", 2 * shared, hidden, True),
                Gemm("shared_down", "mlp", hidden, shared, True),
            ]
    else:
        inter = shape.intermediate_size // tp
        found += [
            Gemm("mlp_gate_up", "mlp", 2 * inter, hidden, True),
            Gemm("mlp_down", "mlp", hidden, inter, True),
        ]
    found.append(Gemm("lm_head", "head", ceil_div(shape.vocab_size, tp), hidden, False))
    found.append(Gemm("mtp_fc", "draft", hidden // tp, 2 * hidden, False))
    return tuple(found)


def attention_heads(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Query and KV heads of one rank; KV heads are replicated when there are fewer of them than ranks."""
    return shape.num_attention_heads // tp, max(1, shape.num_key_value_heads // tp)


class RowPricer:
    """Prices the parts of one model on one GPU type at arrays of row counts.

    `extrapolated` collects, over everything priced so far, where a look-up left the measured points.
    """

    def __init__(
        self,
        shape: ModelShape,
        tables: OperatorTables,
        tp: int,
        weight_dtype: str,
        routing: str,
        rows: Floats,
    ) -> None:
        self.shape = shape
        self.tables = tables
        self.tp = tp
        self.weight_dtype = weight_dtype
        self.routing = routing
        self.rows = rows
        self.extrapolated: Bools = np.zeros(rows.shape, dtype=np.bool_)
        self._gemms = {gemm.op: gemm for gemm in gemms(shape, tp)}

    def linear_layer(self) -> Floats:
        """Projections, small kernels and all-reduce of a Gated DeltaNet layer, without its state and conv."""
        values = self.shape.linear_num_value_heads * self.shape.linear_value_head_dim // self.tp
        projections = self.gemm("gdn_in_proj_qkvz") + self.gemm("gdn_in_proj_ba") + self.gemm("gdn_out_proj")
        gated_norm = self._moved(3 * values)
        return projections + self._norm() + gated_norm + self._all_reduce()

    def full_layer(self) -> Floats:
        """Projections, small kernels and all-reduce of one full-attention layer, without the attention."""
        q_heads, kv_heads = attention_heads(self.shape, self.tp)
        rotary_and_norm = self._moved(2 * (q_heads + kv_heads) * self.shape.head_dim)
        output_gate = self._moved(3 * q_heads * self.shape.head_dim) if self.shape.attn_output_gate else 0.0
        projections = self.gemm("attn_qkv_gate") + self.gemm("attn_o_proj")
        return projections + self._norm() + rotary_and_norm + output_gate + self._all_reduce()

    def mlp(self) -> Floats:
        """Experts or dense MLP of one layer, with its norm and all-reduce."""
        shape = self.shape
        if not shape.is_moe:
            activation = self._moved(3 * shape.intermediate_size // self.tp)
            dense = self.gemm("mlp_gate_up") + activation + self.gemm("mlp_down")
            return dense + self._norm() + self._all_reduce()
        experts = self.tables.moe(
            self.weight_dtype,
            shape.hidden_size,
            shape.moe_intermediate_size,
            shape.num_experts_per_tok,
            shape.num_experts,
            self.tp,
            self.rows,
            self.routing,
        )
        total = self.gemm("router") + self._noted(experts)
        if "shared_down" in self._gemms:
            activation = self._moved(3 * shape.shared_expert_intermediate_size // self.tp)
            shared = self.gemm("shared_expert_gate") + self.gemm("shared_gate_up") + activation
            shared += self.gemm("shared_down") + self._moved(2 * shape.hidden_size)
            together = self.rows <= SHARED_EXPERT_STREAM_ROWS
            total = np.where(together, np.maximum(total, shared), total + shared)
            total = total + self._moved(3 * shape.hidden_size)
        return total + self._norm() + self._all_reduce()

    def embedding(self) -> Floats:
        """Token embedding, split by vocabulary."""
        return self._moved(2 * self.shape.hidden_size) + self._all_reduce()

    def final_norm(self) -> Floats:
        return self._norm()

    def gemm(self, op: str) -> Floats:
        found = self._gemms[op]
        dtype = self.weight_dtype if found.quantised else "bf16"
        return self._noted(self.tables.gemm(dtype, found.n, found.k, self.rows))

    def _norm(self) -> Floats:
        """Residual add and RMS norm in one kernel: two rows read, two written."""
        return self._moved(4 * self.shape.hidden_size)

    def _moved(self, elements_per_row: float) -> Floats:
        """An element-wise kernel that moves this many bf16 elements per row."""
        return self.tables.elementwise(2 * elements_per_row * self.rows)

    def _all_reduce(self) -> Floats:
        return self._noted(self.tables.all_reduce(self.tp, 2 * self.shape.hidden_size * self.rows))

    def _noted(self, found: Lookup) -> Floats:
        self.extrapolated = self.extrapolated | found.extrapolated
        return found.latency_us


@dataclass(frozen=True, slots=True)
class IndexedCost:
    """Times by a whole number, index 0 costing nothing; up to index `measured` none is extrapolated."""

    latency_us: Floats
    measured: int

    @classmethod
    def of(cls, latency_us: Floats, extrapolated: Bools) -> IndexedCost:
        """From the times at 1, 2, …"""
        beyond = np.flatnonzero(extrapolated)
        return cls(np.concatenate(([0.0], latency_us)), int(beyond[0]) if len(beyond) else len(latency_us))


@lru_cache(maxsize=64)
def row_cost(shape: ModelShape, gpu: str, tp: int, weight_dtype: str, routing: str, max_rows: int) -> IndexedCost:
    """Everything in a step that sees only rows, the output head excluded, for 0 to `max_rows` rows."""
    pricer = RowPricer(shape, load_tables(gpu), tp, weight_dtype, routing, np.arange(1, max_rows + 1, dtype=np.float64))
    total = shape.num_linear_layers * pricer.linear_layer() + shape.num_full_layers * pricer.full_layer()
    total += len(shape.layer_types) * pricer.mlp() + pricer.embedding() + pricer.final_norm()
    return IndexedCost.of(total, pricer.extrapolated)


@lru_cache(maxsize=64)
def head_cost(shape: ModelShape, gpu: str, tp: int, max_rows: int) -> IndexedCost:
    """The output head for 0 to `max_rows` rows that need logits."""
    pricer = RowPricer(
        shape, load_tables(gpu), tp, "bf16", "power_law_1.2", np.arange(1, max_rows + 1, dtype=np.float64)
    )
    return IndexedCost.of(pricer.gemm("lm_head"), pricer.extrapolated)
