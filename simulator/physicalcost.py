"""Step costs from a few physical constants, where no operator table covers the model or the GPU.

A step reads the weights that its rows touch once and computes on every row, whichever takes longer; reads the KV of
every decoding request and reads and writes its recurrent state; and exchanges hidden states between ranks. Rates are
those of the data sheet times `BANDWIDTH_SHARE` and `FLOPS_SHARE`; a calibration's factors take care of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.profiles.grids import Floats
from lab.shapes import ModelShape
from lab.units import DTYPE_BYTES
from simulator.costtables import CostTables
from simulator.settings import EngineSettings
from simulator.stepcost import StepCost

#: Usual shares of data-sheet rates that inference kernels reach: copies near 80 %, large matrix products near 60 %.
BANDWIDTH_SHARE = 0.8
FLOPS_SHARE = 0.6
#: A chunk of the delta rule multiplies each row with the state twice and with its own chunk about as often again.
_CHUNK_PASSES = 4


@dataclass(frozen=True, slots=True)
class PhysicalGpu:
    """Data-sheet rates of one GPU: bytes/s of memory, bf16 FLOP/s without sparsity, bytes/s of its link, one way."""

    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """How a model is spread: tensor parallel inside a replica, data-parallel replicas that share the experts.

    Replicas with shared experts run in lockstep: a step's rows are spread over them, weights outside the experts are
    read by each.
    """

    tensor_parallel: int = 1
    data_parallel: int = 1


def physical_cost(
    shape: ModelShape, gpu: PhysicalGpu, ranks: Ranks, engine: EngineSettings, rows_per_request: int = 1
) -> StepCost:
    """Cost tables of plain decoding, or of a chain of `rows_per_request` rows, every state of which is stored."""
    bandwidth, flops = BANDWIDTH_SHARE * gpu.bandwidth_bytes_per_s / 1e6, FLOPS_SHARE * gpu.flops_per_s / 1e6  # per µs
    tp, dp = ranks.tensor_parallel, ranks.data_parallel
    width = DTYPE_BYTES["fp8"] if engine.weight_dtype.startswith("fp8") else 2.0
    logits = engine.max_num_seqs * rows_per_request
    rows = np.arange(max(engine.max_num_batched_tokens, logits) + 1, dtype=np.float64)
    head_rows = np.arange(logits + 1, dtype=np.float64)
    head_weights = shape.vocab_size * shape.hidden_size
    embeddings = head_weights * (1 if shape.tie_word_embeddings else 2)
    experts = _expert_parameters(shape)
    dense = shape.parameters() - embeddings - experts
    touched, active = _touched(shape, rows), _active_experts(shape)
    read_us = width * (dense / tp + touched * experts / (tp * dp)) / bandwidth
    compute_us = 2 * (dense / dp + active / dp) / tp * rows / flops
    rows_us = np.where(rows > 0, np.maximum(read_us, compute_us) + _exchange_us(shape, gpu, ranks, rows), 0.0)
    head_us = np.maximum(2.0 * head_weights / tp / bandwidth, 2.0 * head_weights / tp * head_rows / dp / flops)
    drafted = np.arange(engine.max_num_seqs + 1)
    pass_bytes = 2.0 * (shape.drafting_parameters() + head_weights) / tp
    pass_us = np.maximum(pass_bytes / bandwidth, pass_bytes * drafted / dp / flops)
    kv_us = shape.num_full_layers * shape.kv_bytes_per_token_layer(engine.kv_dtype, tp) / dp / bandwidth
    state_us = _state_bytes(shape, engine, tp, rows_per_request) / dp / bandwidth
    prompt = np.arange(engine.max_model_len + 1, dtype=np.float64)
    attention_flops = 2.0 * shape.num_full_layers * shape.num_attention_heads * shape.head_dim / (tp * dp)
    state = shape.linear_num_value_heads * shape.linear_value_head_dim * shape.linear_key_head_dim / (tp * dp)
    chunk_us = 2.0 * _CHUNK_PASSES * shape.num_linear_layers * state / flops
    ends = np.array([0.0, 1e6])
    requests = np.array([1.0, 1e6])
    ones = np.ones((2, 2))
    tables = CostTables(
        rows_us=rows_us,
        head_us=np.where(head_rows > 0, head_us, 0.0),
        state_us=state_us * drafted.astype(np.float64),
        draft_us=np.where(drafted > 0, (rows_per_request - 1) * pass_us, 0.0),
        attn_batch=requests,
        attn_len=ends,
        attn_us=kv_us * requests[:, None] * ends[None, :],
        attn_measured=ones,
        prefill_attn_us=attention_flops * prompt**2 / flops,
        prefill_state_us=chunk_us * rows,
        batch_count=requests,
        batch_len=np.array([1.0, 1e6]),
        batch_attn=ones,
        batch_state=ones.copy(),
        limits=np.full(6, 1e9),
    )
    return StepCost(tables, {term: _SOURCE for term in _TERMS}, gpu.name, rows_per_request)


_SOURCE = "modelled: bytes and operations over data-sheet rates"
_TERMS = ("rows", "head", "state", "attention", "prefill_attention", "prefill_state", "draft")


def _expert_parameters(shape: ModelShape) -> int:
    """Parameters of all routed experts."""
    return len(shape.layer_types) * shape.num_experts * 3 * shape.hidden_size * shape.moe_intermediate_size


def _active_experts(shape: ModelShape) -> float:
    """Parameters of the routed experts that one row passes through."""
    return _expert_parameters(shape) * shape.num_experts_per_tok / shape.num_experts if shape.num_experts else 0.0


def _touched(shape: ModelShape, rows: Floats) -> Floats:
    """Share of the experts that some row chooses, choices being independent and even."""
    if not shape.num_experts:
        return np.zeros_like(rows)
    missed = 1 - shape.num_experts_per_tok / shape.num_experts
    return np.asarray(1 - missed**rows, dtype=np.float64)


def _exchange_us(shape: ModelShape, gpu: PhysicalGpu, ranks: Ranks, rows: Floats) -> Floats:
    """Hidden states between ranks: two all-reduces per layer over tensor-parallel ranks, rows to and from experts."""
    row_bytes = 2.0 * shape.hidden_size * len(shape.layer_types)
    tp, dp = ranks.tensor_parallel, ranks.data_parallel
    reduced = 2 * 2 * (tp - 1) / tp * row_bytes
    exchanged = 2 * (dp - 1) / dp * row_bytes
    return (reduced + exchanged) * rows / (gpu.link_bytes_per_s / 1e6)


def _state_bytes(shape: ModelShape, engine: EngineSettings, tp: int, rows_per_request: int) -> float:
    """Bytes of state that one decoding request moves in a step: read once, written once per row."""
    per_layer = shape.state_bytes_layer(engine.state_dtype(shape.mamba_ssm_dtype), tp)
    return float(shape.num_linear_layers * per_layer * (1 + rows_per_request))
