"""The memory ledger of SGLang: named lines that add up to a GPU's whole memory, and what its log would say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab.errors import InfeasibleError
from lab.methods.base import StateMethod
from lab.profiles.system import load_system
from lab.shapes import ModelShape
from lab.trees import DraftTree
from lab.units import GIB, ceil_div, gib
from simulator.sglang.memory import Pools, RequestLaw, request_law, solve_pools
from simulator.sglang.settings import CLIP_NEW_TOKENS, SglangSettings


@dataclass(frozen=True, slots=True)
class SglangLedger:
    """Memory of one rank: `lines` (name → bytes) add up to the GPU's memory, to the byte.

    The pools are laid out at start-up and so are their lines: `recurrent_state` are the slots of the requests that may
    run, `prefix_cache_states` all further slots, `padding` the slot and the buffers that no request gets.
    """

    settings: SglangSettings
    layout: RequestLaw
    pools: Pools
    strategy: str
    overlap_schedule: bool
    lines: dict[str, int]

    @property
    def context_length(self) -> int:
        return self.settings.context_length

    @property
    def num_gpu_blocks(self) -> int:
        """Pages of the KV pool."""
        return self.pools.max_total_num_tokens // self.layout.page_size

    @property
    def usable_blocks(self) -> int:
        return self.num_gpu_blocks

    @property
    def kv_cache_tokens(self) -> int:
        return self.pools.max_total_num_tokens

    @property
    def blocks_per_request(self) -> int:
        """Pages of one request of `context_length` tokens."""
        return ceil_div(self.context_length, self.layout.page_size)

    @property
    def max_concurrency(self) -> float:
        """Requests of `context_length` tokens that run at once."""
        return min(self.num_gpu_blocks / self.blocks_per_request, float(self.pools.max_running_requests))

    @property
    def state_pool_bytes(self) -> int:
        """Slots, and buffers of states beside them; records and logs of a method are not in it."""
        law, pools = self.layout, self.pools
        buffers = law.row_state_bytes + law.row_conv_bytes
        return pools.max_mamba_cache_size * law.slot_bytes + pools.buffered_requests * buffers

    def to_json(self) -> dict[str, Any]:
        """vLLM's fixed shape, a page in place of a block, and what only SGLang has."""
        return {
            "block_size_tokens": self.layout.page_size,
            "bytes_per_block": self.layout.bytes_per_block,
            "num_gpu_blocks": self.num_gpu_blocks,
            "blocks_per_request": self.blocks_per_request,
            "kv_cache_tokens": self.kv_cache_tokens,
            "max_concurrency": self.max_concurrency,
            "max_viable_num_seqs": self.pools.max_running_requests,
            "gpu_blocks_source": "estimated",
            "lines": self.lines,
            "engine": "sglang",
            "max_total_num_tokens": self.kv_cache_tokens,
            "max_running_requests": self.pools.max_running_requests,
            "max_mamba_cache_size": self.pools.max_mamba_cache_size,
            "mamba_radix_cache_strategy": self.strategy,
            "state_slots_per_request": self.layout.slots_reserved,
            "state_slots_held": self.layout.slots_held,
            "bytes_per_state_slot": self.layout.slot_bytes,
            "speculative_bytes_per_request": self.layout.running_bytes,
            "state_pool_bytes": self.state_pool_bytes,
            "notes": list(self.pools.notes),
        }

    def check_request(self, longest_prompt: int, longest_total: int) -> None:
        """Raise `InfeasibleError` unless requests with so many tokens, in the prompt and in all, can be admitted."""
        law, tokens = self.layout, self.kv_cache_tokens
        if longest_total > self.context_length:
            raise InfeasibleError(
                f"engine.context_length = {self.context_length}: the longest request of the workload has "
                f"{longest_total} tokens (prompt and output); raise context_length to at least {longest_total} or use "
                "another workload"
            )
        asked = min(self.settings.max_new_tokens or 0, CLIP_NEW_TOKENS)
        expected = max(longest_total, min(longest_prompt + asked, self.context_length))
        needed = max(expected + law.page_size + 1, longest_total - 1 + law.rows + law.page_size)
        most = self.settings.max_total_tokens
        if tokens < needed and most is not None and tokens == most - most % law.page_size:
            raise InfeasibleError(
                f"max_total_tokens = {most} is too small for the longest request of the workload, {expected} tokens "
                f"with the output that is expected; raise max_total_tokens to at least "
                f"{ceil_div(needed, law.page_size) * law.page_size}"
            )
        if tokens < needed:
            raise InfeasibleError(
                f"the KV cache of {tokens} tokens is too small for the longest request of the workload, {expected} "
                f"tokens with the output that is expected (it takes {needed}); lower mamba_full_memory_ratio, "
                "max_mamba_cache_size or max_running_requests, or raise mem_fraction_static"
            )


def build_sglang_ledger(
    shape: ModelShape, gpu: str, tp: int, settings: SglangSettings, method: StateMethod, tree: DraftTree
) -> SglangLedger:
    """Ledger of one rank; raises `InfeasibleError` when weights, runtime or a pool has no room."""
    law = request_law(shape, tp, settings, method, tree)
    system = load_system(gpu)
    total = system.memory_capacity_bytes
    outside = total - int(total * settings.mem_fraction_static)
    given = settings.runtime_and_activations_gib
    runtime = system.other_memory_bytes if given is None else round(given * GIB)
    if runtime > outside:
        raise InfeasibleError(
            f"mem_fraction_static = {settings.mem_fraction_static:g} leaves {gib(outside)} outside weights and pools, "
            f"and runtime and activations need {gib(runtime)}; lower it to at most "
            f"{max(total - runtime, 0) / total:.3f}, or set runtime_and_activations_gib"
        )
    before = {
        "outside_mem_fraction_static": outside - runtime,
        "weights": shape.weight_bytes(settings.weight_dtype, tp),
        "drafter_weights": shape.drafting_weight_bytes(settings.weight_dtype, tp) if tree.num_drafts else 0,
        "runtime_and_activations": runtime,
        "collectives": system.nccl_memory_bytes(tp) if tp > 1 else 0,
    }
    rest = total - sum(before.values())
    if rest <= 0:
        fp8 = ", or use fp8 weights" if settings.weight_dtype == "bf16" else ""
        raise InfeasibleError(
            f"{shape.name} ({settings.weight_dtype} weights) with tensor_parallel_size {tp} does not fit on {gpu} at "
            f"mem_fraction_static {settings.mem_fraction_static:g}: {gib(-rest)} is missing for the pools; raise "
            f"mem_fraction_static or tensor_parallel_size{fp8}"
        )
    pools = solve_pools(law, rest, settings)
    lines = before | _pool_lines(law, pools)
    lines["pool_remainder"] = total - sum(lines.values())
    strategy, overlap = settings.radix_strategy(method.name), settings.overlap_schedule(method.name)
    return SglangLedger(settings, law, pools, strategy, overlap, lines)


def _pool_lines(law: RequestLaw, pools: Pools) -> dict[str, int]:
    """Lines of the two pools and the buffers; the buffers of running requests and one slot exist once more."""
    slots, buffered, running = pools.max_mamba_cache_size, pools.buffered_requests, pools.max_running_requests
    tokens = pools.max_total_num_tokens
    return {
        "attention_kv": tokens * law.token_bytes,
        "drafter_kv": tokens * law.drafter_token_bytes,
        "recurrent_state": running * law.slot_state_bytes,
        "prefix_cache_states": (slots - running) * law.slot_state_bytes,
        "speculative_states": buffered * law.row_state_bytes,
        "convolution_rows": slots * law.slot_conv_bytes + buffered * law.row_conv_bytes,
        "method_scratch": buffered * law.scratch_bytes,
        "padding": law.slot_bytes + law.running_bytes,
    }
