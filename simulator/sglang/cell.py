"""How a cell of a scenario becomes a run of SGLang: its ledger, what is priced, the engine and its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.methods.base import StateMethod
from lab.profiles.system import load_system
from lab.shapes import ModelShape
from lab.trees import DraftTree
from lab.units import GIB
from simulator.cudagraphs import sglang_sizes
from simulator.engine import EngineConfig
from simulator.settings import EngineSettings
from simulator.sglang.config import SglangConfig
from simulator.sglang.ledger import SglangLedger, build_sglang_ledger
from simulator.sglang.settings import SglangSettings


def checked_ledger(
    shape: ModelShape,
    gpu: str,
    tp: int,
    settings: SglangSettings,
    method: StateMethod,
    tree: DraftTree,
    longest: tuple[int, int],
) -> SglangLedger:
    """The ledger of a cell whose longest prompt and request have so many tokens; `InfeasibleError` if not served."""
    ledger = build_sglang_ledger(shape, gpu, tp, settings, method, tree)
    ledger.check_request(*longest)
    return ledger


def vllm_settings(ledger: SglangLedger, gpu: str, tp: int) -> EngineSettings:
    """Settings by vLLM's names, for the cost of steps and the columns of summary.csv."""
    settings = ledger.settings
    memory_bytes = load_system(gpu).memory_capacity_bytes
    return EngineSettings(
        gpu_memory_utilization=settings.mem_fraction_static,
        max_model_len=settings.context_length,
        max_num_seqs=ledger.pools.max_running_requests,
        max_num_batched_tokens=settings.step_tokens,
        async_scheduling=ledger.overlap_schedule,
        cudagraph_capture_sizes=sglang_sizes(settings.cuda_graph_bs, ledger.layout.rows, tp, memory_bytes),
        weight_dtype=settings.weight_dtype,
        kv_cache_dtype="fp8" if settings.kv_dtype.startswith("fp8") else "bfloat16",
        mamba_ssm_cache_dtype=settings.mamba_ssm_dtype,
    )


def engine_config(ledger: SglangLedger, limits: Mapping[str, Any]) -> EngineConfig:
    """The engine with `limits` that both engines have, by the names of `EngineConfig`; drafts turn mixed chunks off."""
    settings = ledger.settings
    pools, law = ledger.pools, ledger.layout
    return EngineConfig(
        num_blocks=ledger.num_gpu_blocks,
        block_size_tokens=law.page_size,
        attention_groups=1,
        state_blocks=0,
        rows=law.rows,
        **limits,
        sglang=SglangConfig(
            state_capped=pools.by_state_cache,
            chunked_prefill_size=max(settings.chunked_prefill_size, 0),
            max_prefill_tokens=settings.max_prefill_tokens,
            max_new_tokens=settings.max_new_tokens or 0,
            mixed_chunk=settings.enable_mixed_chunk and law.rows == 1,
            overlap_schedule=ledger.overlap_schedule,
            schedule_conservativeness=settings.schedule_conservativeness,
        ),
    )


def columns(ledger: SglangLedger, peak_running: int, peak_blocks: int) -> dict[str, Any]:
    """Columns of summary.csv that SGLang fills in another way, and those that only it has.

    `reserved_records_gib` are the buffers of running requests, laid out at start-up; `peak_kv_gib` the pages and state
    slots that are held at the peak, and the running requests' share of the buffers.
    """
    pools, law = ledger.pools, ledger.layout
    reserved = pools.buffered_requests * law.running_bytes
    slots = peak_running * law.slots_held
    held = peak_blocks * law.bytes_per_block + slots * law.slot_bytes
    held += round(reserved * peak_running / pools.max_running_requests)
    return {
        "peak_kv_gib": held / GIB,
        "reserved_records_gib": reserved / GIB,
        "max_mamba_cache_size": pools.max_mamba_cache_size,
        "state_slots_per_request": law.slots_reserved,
        "peak_mamba_usage": slots / pools.max_mamba_cache_size,
    }
