"""What the states of Gated DeltaNet layers cost: a method's phases, the convolution, and prompt chunks.

The measured single-token recurrence, which reads and writes one state per request, gives a curve from bytes
moved to time for each head shape. A method's phases are read off that curve at the bytes they move, unless a profile
holds measured steps of the method's own kernels. Times are microseconds for all Gated DeltaNet layers of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lab.methods import LayerHeads, StateMethod
from lab.profiles.grids import Bools, Curve, Floats, Lookup
from lab.profiles.kernels import gpu_kernels
from lab.profiles.operators import OperatorTables, UncoveredShapeError
from lab.shapes import ModelShape
from lab.trees import DraftTree
from simulator.rowcost import IndexedCost

#: Widths of the measured kernels.
HEAD_DIM = 128
CONV_WIDTH = 4


@dataclass(frozen=True, slots=True)
class GdnKernels:
    """The measured kernels that stand for one rank's heads.

    When its own heads were measured, `state_ratio` and `conv_ratio` are 1. Otherwise the nearest measured
    heads stand in, and sizes are multiplied by these ratios of bytes before a look-up.
    """

    tables: OperatorTables
    key_heads: int
    value_heads: int
    state_ratio: float = 1.0
    conv_ratio: float = 1.0

    @classmethod
    def of(cls, shape: ModelShape, tables: OperatorTables, tp: int) -> GdnKernels:
        """Kernels for a model; raises `UncoveredShapeError` for other widths or another delta rule."""
        key_heads, value_heads = shape.linear_num_key_heads // tp, shape.linear_num_value_heads // tp
        widths = (shape.linear_key_head_dim, shape.linear_value_head_dim, shape.linear_conv_kernel_dim)
        if shape.vector_gate or widths != (HEAD_DIM, HEAD_DIM, CONV_WIDTH):
            rule = "a gate per key channel" if shape.vector_gate else "a scalar gate"
            raise UncoveredShapeError(
                f"recurrent heads {key_heads}/{value_heads} of widths {widths[0]}/{widths[1]}, convolution "
                f"width {widths[2]} and {rule}; covered are widths {HEAD_DIM}/{HEAD_DIM}, convolution width "
                f"{CONV_WIDTH} and a scalar gate"
            )
        near_keys, near_values = tables.nearest_gdn_heads(key_heads, value_heads)
        return cls(
            tables,
            near_keys,
            near_values,
            value_heads / near_values,
            (2 * key_heads + value_heads) / (2 * near_keys + near_values),
        )

    @property
    def exact(self) -> bool:
        return self.state_ratio == 1 and self.conv_ratio == 1

    def bytes_curve(self) -> Curve:
        """Time of one launch by the bytes it moves, from the single-token recurrence with fp32 state."""
        batches = self.tables.gdn_batches("recurrent_decode", self.key_heads, self.value_heads)
        heads = LayerHeads(self.key_heads, self.value_heads, HEAD_DIM, HEAD_DIM, "float32")
        times = self.tables.gdn("recurrent_decode", self.key_heads, self.value_heads, batches).latency_us
        return Curve(batches * (2 * heads.state_bytes + heads.operand_bytes), times)

    def conv(self, requests: Floats, rows: int) -> Lookup:
        """One layer's convolution for `rows` rows per request.

        Several rows per request take the faster of the single-token kernel at all rows and the prompt kernel.
        The time counts as extrapolated where neither was measured: one measured kernel bounds it from above.
        """
        heads = (self.key_heads, self.value_heads)
        scaled = np.maximum(requests * self.conv_ratio, 1)
        update = self.tables.gdn("conv_update", *heads, scaled * rows)
        if rows == 1:
            return update
        whole = self.tables.gdn("conv_prefill", *heads, scaled, rows)
        return Lookup(np.minimum(update.latency_us, whole.latency_us), update.extrapolated & whole.extrapolated)

    def chunk(self, tokens: Floats, prompts: ArrayLike = 1) -> Lookup:
        """One layer's convolution and chunked recurrence for `prompts` prompt chunks of `tokens` tokens each."""
        heads = (self.key_heads, self.value_heads)
        conv = self.tables.gdn("conv_prefill", *heads, prompts, np.maximum(tokens * self.conv_ratio, 1))
        rule = self.tables.gdn("chunk_prefill", *heads, prompts, np.maximum(tokens * self.state_ratio, 1))
        return Lookup(conv.latency_us + rule.latency_us, conv.extrapolated | rule.extrapolated)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One layer's step, convolution excluded, for 1, 2, … requests, and its source in words."""

    latency_us: Floats
    extrapolated: Bools
    source: str


def measured_step(
    gpu: str, kernels: GdnKernels, heads: LayerHeads, method: StateMethod, tree: DraftTree, max_num_seqs: int
) -> MeasuredStep | None:
    """Steps of the method's own kernels from the profile that serves `gpu`; None where none was measured.

    Plain decoding that the operator tables measured on the GPU itself goes before a profile scaled from another.
    """
    found = gpu_kernels(gpu)
    if found is None or (found.scaled and kernels.exact and is_tabulated(method, heads)):
        return None
    times = found.profile.step(method.name, heads, tree, np.arange(1, max_num_seqs + 1))
    if times is None:
        return None
    source = found.describe(times.stand_in)
    if not kernels.exact:
        source += f"; convolution of heads {kernels.key_heads}/{kernels.value_heads}, scaled by bytes"
    return MeasuredStep(found.time_factor * times.latency_us, times.extrapolated | found.scaled, source)


def is_tabulated(method: StateMethod, heads: LayerHeads) -> bool:
    """Whether the operator tables hold the method's step itself: plain decoding with an fp32 state."""
    return method.name == "recurrent" and heads.state_dtype == "float32"


def state_cost(
    shape: ModelShape,
    kernels: GdnKernels,
    heads: LayerHeads,
    method: StateMethod,
    tree: DraftTree,
    rows_committed: float,
    max_num_seqs: int,
    measured: MeasuredStep | None = None,
) -> IndexedCost:
    """A method's phases and the convolution for 0 to `max_num_seqs` decoding requests; `measured` takes their place.

    The phases of one layer share its launch: a flush writes the state that the verification of the same layer
    holds already. An `all_layers` phase is one launch for the whole model.
    """
    requests = np.arange(1, max_num_seqs + 1, dtype=np.float64)
    layers = shape.num_linear_layers
    conv = kernels.conv(requests, tree.num_rows)
    if measured is not None:
        total = layers * (conv.latency_us + measured.latency_us)
        return IndexedCost.of(total, conv.extrapolated | measured.extrapolated)
    phases = method.phases(heads, tree, rows_committed)
    in_layer = sum(phase.bytes for phase in phases if not phase.all_layers)
    launches = [(layers, in_layer)] if in_layer else []
    launches += [(1, layers * phase.bytes) for phase in phases if phase.all_layers]
    curve = kernels.bytes_curve()
    total = layers * conv.latency_us
    for count, nbytes in launches:
        total = total + count * curve.at(requests * nbytes).latency_us
    # A launch for all layers is one long stream of bytes, where the rate no longer changes; the launch of a
    # layer sets the limit.
    beyond = conv.extrapolated | (requests * in_layer > curve.points[-1] * (1 + 1e-9))
    return IndexedCost.of(total, beyond)


def prefill_state_cost(shape: ModelShape, kernels: GdnKernels, max_tokens: int) -> IndexedCost:
    """Convolution and chunked recurrence of one prompt chunk of 0 to `max_tokens` tokens."""
    chunk = kernels.chunk(np.arange(1, max_tokens + 1, dtype=np.float64))
    return IndexedCost.of(shape.num_linear_layers * chunk.latency_us, chunk.extrapolated)


def boundary_cost(
    shape: ModelShape, kernels: GdnKernels, heads: LayerHeads, method: StateMethod, tree: DraftTree, max_num_seqs: int
) -> tuple[Floats, Floats]:
    """What it costs 0 to `max_num_seqs` requests to move on to another state block (prefix caching, mode align).

    First: a state is copied, as at the start of a further prompt chunk. Second: the same when decoding has crossed the
    boundary; a method that keeps records folds them into the state that is left to be hit, which reads them as well.
    """
    requests = np.arange(max_num_seqs + 1, dtype=np.float64)
    copied = 2 * heads.state_bytes
    records = method.pool_scratch_bytes(heads, tree)
    curve, layers = kernels.bytes_curve(), shape.num_linear_layers
    copy_us, publish_us = (layers * curve.at(requests * size).latency_us for size in (copied, copied + records))
    copy_us[0] = publish_us[0] = 0.0
    return copy_us, publish_us
