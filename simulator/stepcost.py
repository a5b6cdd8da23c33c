"""Cost of one engine step, built from the operator tables as arrays (`simulator.costtables`).

`build_step_cost` composes, for one model, GPU type, tensor-parallel size, state method and draft tree, the
time of every part of a step as an array over the number that the part depends on. The sum of the parts is GPU
time: host time is not in it. `step_breakdown` evaluates one step part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.errors import InfeasibleError, UsageError
from lab.methods import LayerHeads, StateMethod
from lab.profiles.attention import gpu_attention
from lab.profiles.operators import MOE_ESTIMATED, OperatorTables, UncoveredShapeError, load_tables
from lab.shapes import ModelShape
from lab.trees import DraftTree
from simulator.attentioncost import AttentionHeads, decode_attention_cost, prefill_attention_cost
from simulator.costtables import CostTables, attention_us, batching_shares, launch_wait_us, prefill_us
from simulator.cudagraphs import captured_graphs
from simulator.draftcost import draft_cost
from simulator.promptcost import prompt_batching
from simulator.rowcost import IndexedCost, head_cost, row_cost
from simulator.settings import EngineSettings
from simulator.statecost import (
    GdnKernels,
    MeasuredStep,
    boundary_cost,
    is_tabulated,
    measured_step,
    prefill_state_cost,
    state_cost,
)

DEFAULT_ROUTING = "power_law_1.2"


@dataclass(frozen=True)
class StepCost:
    """Tables of one cell and where they come from.

    `sources` maps a term to `measured: …`, `modelled: …` or `extrapolated: …` with a short reason. `num_rows`
    is the rows that one decoding request adds to a step.
    """

    tables: CostTables
    sources: dict[str, str]
    gpu: str
    num_rows: int


def build_step_cost(
    shape: ModelShape,
    gpu: str,
    tp: int,
    engine: EngineSettings,
    method: StateMethod,
    tree: DraftTree,
    rows_committed: float,
    routing: str = DEFAULT_ROUTING,
) -> StepCost:
    """Step costs of one cell; `rows_committed` is the mean number of rows that a step commits.

    Raises `UsageError` naming model, size and what is covered when the operator tables hold no such shape.
    """
    shape.check_tensor_parallel(tp)
    method.check_tree(tree)
    tables = load_tables(gpu)
    try:
        kernels = GdnKernels.of(shape, tables, tp)
        heads = LayerHeads.of(shape, engine.state_dtype(shape.mamba_ssm_dtype), tp)
        kv_dtype = "fp8" if engine.kv_cache_dtype == "fp8" else "bf16"
        logit_rows = engine.max_num_seqs * tree.num_rows
        max_rows = max(engine.max_num_batched_tokens, logit_rows)
        graphs = captured_graphs(engine, tree.num_rows)
        most_rows, most_logits = (int(graphs.padded(count)[-1]) for count in (max_rows, logit_rows))
        rows = row_cost(shape, tables.gpu, tp, engine.weight_dtype, routing, most_rows)
        head = head_cost(shape, tables.gpu, tp, most_logits)
        measured = measured_step(gpu, kernels, heads, method, tree, engine.max_num_seqs)
        state = state_cost(shape, kernels, heads, method, tree, rows_committed, engine.max_num_seqs, measured)
        draft = draft_cost(
            shape,
            tables.gpu,
            tp,
            engine.weight_dtype,
            routing,
            tree.width_by_depth,
            engine.max_num_seqs,
        )
        attention = decode_attention_cost(
            shape, tables.gpu, tp, kv_dtype, tree.num_rows, tree.width_by_depth, gpu_attention(gpu)
        )
        prefill = prefill_attention_cost(shape, tables.gpu, tp, kv_dtype, engine.max_model_len)
        chunk = prefill_state_cost(shape, kernels, engine.max_num_batched_tokens)
        copy_us, publish_us = boundary_cost(shape, kernels, heads, method, tree, engine.max_num_seqs)
        batching = prompt_batching(tables, AttentionHeads.of(shape, kv_dtype, tp), kernels)
    except UncoveredShapeError as error:
        raise InfeasibleError(
            f"model {shape.name} at tensor_parallel_size {tp} is not covered by the operator tables of "
            f"{tables.gpu}: {error}"
        ) from error
    limits = (part.measured for part in (rows, prefill, state, chunk, head, draft))
    return StepCost(
        CostTables(
            rows_us=graphs.priced(rows, max_rows),
            head_us=graphs.priced(head, logit_rows),
            state_us=state.latency_us,
            draft_us=draft.latency_us.copy(),
            attn_batch=attention.batches.copy(),
            attn_len=attention.contexts.copy(),
            attn_us=attention.latency_us.copy(),
            attn_measured=attention.measured.copy(),
            prefill_attn_us=prefill.latency_us.copy(),
            prefill_state_us=chunk.latency_us,
            batch_count=batching.counts,
            batch_len=batching.lengths,
            batch_attn=batching.attention,
            batch_state=batching.state,
            limits=np.array(list(limits), dtype=np.float64),
            copy_us=copy_us,
            publish_us=publish_us,
            launch_us=graphs.launch_us(max_rows, len(shape.layer_types)),
        ),
        _sources(shape, tables, tp, engine, method, tree, heads, kernels, draft, measured, attention.source, routing),
        tables.gpu,
        tree.num_rows,
    )


def _sources(
    shape: ModelShape,
    tables: OperatorTables,
    tp: int,
    engine: EngineSettings,
    method: StateMethod,
    tree: DraftTree,
    heads: LayerHeads,
    kernels: GdnKernels,
    drafting: IndexedCost,
    measured_state: MeasuredStep | None,
    verified: str,
    routing: str,
) -> dict[str, str]:
    """For each term of a step: measured or modelled, and how."""
    rows = "measured: matrix products, experts and all-reduce by operator tables; element-wise kernels by bytes"
    if (experts := _experts(shape)) in MOE_ESTIMATED:
        like = "/".join(map(str, MOE_ESTIMATED[experts]))
        rows = f"modelled: experts estimated from {like} (hidden/width/top-k/experts); the rest measured"
    elif shape.is_moe and engine.weight_dtype == "fp8_tensor" and tables.gpu != "b200":
        rows += "; fp8_tensor experts are slower than bf16 ones on this GPU and do not stand for fp8_block128"
    graphs = "none is captured" if engine.cudagraph_capture_sizes == () else "padded to the captured ones"
    rows += f"; CUDA graphs: {graphs}"
    if shape.is_moe:
        rows += f"; routing {routing}"
    if engine.weight_dtype != "bf16" and _slower_than_bf16(shape, tables.gpu, tp, engine.weight_dtype):
        rows += f"; the {engine.weight_dtype} rows of this GPU are slower than the bf16 ones at few rows"
    stand_in = f"; heads {kernels.key_heads}/{kernels.value_heads} stand in, scaled by bytes"
    state = f"modelled: bytes of the phases of {method.name} on the curve of the measured recurrence"
    if is_tabulated(method, heads):
        state = "measured: single-token recurrence and convolution"
    if engine.kv_cache_dtype == "fp8" and tables.gpu != "b200":
        verified += "; the rows for an 8-bit cache are slower than the bf16 ones on this GPU"
    if tree.num_drafts == 0:
        draft = "measured: no drafts"
    elif shape.mtp_num_hidden_layers == 0:
        draft = "modelled: the model names no drafting layer; one layer of its own widths is charged"
    else:
        draft = "modelled: one pass per depth of the drafting layer; its attention is in the decoding requests'"
    if drafting.measured < engine.max_num_seqs:
        draft += f"; extrapolated above {drafting.measured} requests"
    chunk = "measured: chunked recurrence and convolution; several prompts by the rows for as many of mean length"
    if not kernels.exact:
        state = state.replace("measured:", "modelled:") + stand_in
        chunk = chunk.replace("measured:", "modelled:") + stand_in
    if measured_state is not None:
        state = measured_state.source
    return {
        "rows": rows,
        "head": "measured: output head; wider than 65,536 columns in proportion",
        "state": state,
        "attention": verified,
        "prefill_attention": "measured: whole prompts; a chunk takes its share; several by the rows for as many",
        "prefill_state": chunk,
        "draft": draft,
    }


def _slower_than_bf16(shape: ModelShape, gpu: str, tp: int, weight_dtype: str) -> bool:
    """Whether the tables price a step of one row higher with quantised weights: some kernels were timed so."""
    try:
        bf16, quantised = (
            row_cost(shape, gpu, tp, dtype, DEFAULT_ROUTING, 1).latency_us[1] for dtype in ("bf16", weight_dtype)
        )
    except UncoveredShapeError:
        return False
    return bool(quantised > bf16)


def _experts(shape: ModelShape) -> tuple[int, int, int, int]:
    return (shape.hidden_size, shape.moe_intermediate_size, shape.num_experts_per_tok, shape.num_experts)


def step_breakdown(
    cost: StepCost,
    decode_requests: int = 0,
    mean_context: float = 0.0,
    prefill: Sequence[tuple[int, int]] = (),
    finishing_prompts: int | None = None,
) -> dict[str, float]:
    """Microseconds of one step: rows, head, state, attention, prefill_attention, prefill_state, draft.

    `prefill` lists (tokens done, tokens in this step) of every prompt; `finishing_prompts` of them need
    logits (all by default). The step's GPU time is the sum; `rows` holds the wait for launches outside CUDA
    graphs. Raises `UsageError` when the step is larger than the tables.
    """
    tables = cost.tables
    finishing = len(prefill) if finishing_prompts is None else finishing_prompts
    decode_rows = decode_requests * cost.num_rows
    rows = decode_rows + sum(chunk for _, chunk in prefill)
    logits = decode_rows + finishing
    for name, value, array in (
        ("decode_requests", decode_requests, tables.state_us),
        ("rows of the step", rows, tables.rows_us),
        ("rows with logits", logits, tables.head_us),
    ):
        if value >= len(array):
            raise UsageError(f"{name} = {value}; the tables hold at most {len(array) - 1}")
    chunks = [prefill_us(tables, done, chunk) for done, chunk in prefill]
    tokens = sum(chunk for _, chunk in prefill)
    count = max(len(prefill), 1)
    shares = batching_shares(tables, len(prefill), (tokens + sum(done for done, _ in prefill)) / count, tokens / count)
    terms = {
        "rows": float(tables.rows_us[rows]),
        "head": float(tables.head_us[logits]),
        "state": float(tables.state_us[decode_requests]),
        "attention": float(attention_us(tables, decode_requests, mean_context)[0]),
        "prefill_attention": shares[0] * sum(attention for attention, _, _ in chunks),
        "prefill_state": shares[1] * sum(state for _, state, _ in chunks),
        "draft": float(tables.draft_us[min(decode_requests + finishing, len(tables.draft_us) - 1)]),
    }
    terms["rows"] += launch_wait_us(tables, rows, tokens, sum(terms.values()))
    return terms
