"""Sections of a scenario: vLLM's settings, speculation, workload, host; SGLang's are in `simulator.sglang.settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lab.methods import METHODS

Tokens = Annotated[int, Field(ge=1, le=1 << 21)]
Requests = Annotated[int, Field(ge=1, le=1 << 16)]
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
Share = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Routing = Literal["power_law_1.2", "power_law_1.01", "balanced"]
GraphSizes = Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 16)], ...], Field(max_length=4096)]
Gibibytes = Annotated[float, Field(ge=0, le=1024, allow_inf_nan=False)]

#: Settings of vLLM that summary.csv holds in a column of their own.
_COLUMNS = {
    "name",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "running_limit",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "prefix_cache_retention_interval",
    "scheduling_policy",
    "async_scheduling",
    "weight_dtype",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
}


class Section(BaseModel):
    """A mapping of known fields that do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(Section):
    """Settings of vLLM, by its names.

    Defaults that depart from vLLM's: `max_num_seqs` is 256 (vLLM: 1024 on large GPUs), `max_model_len` 32768 (the
    model's), `max_num_batched_tokens` 8192 (by GPU and use), `async_scheduling` and `enable_prefix_caching` are off
    (vLLM turns asynchronous scheduling on where it can be, prefix caching by model).

    `running_limit` lowers `max_num_seqs` for one cell: a sweep sets it where the records of a method for `max_num_seqs`
    requests do not fit. `runtime_and_activations_gib` takes the place of the estimate of what the engine keeps for
    itself.

    `enable_prefix_caching` turns on Mamba cache mode `align`. `prefix_cache_retention_interval` (tokens) thins the
    states that are kept to hit: one per interval and the one at the end of a prompt (0: only that one; none: all).
    `scheduler_reserve_full_isl`: a prompt is admitted only when all of it fits, not its first chunk. `watermark`: share
    of the blocks that an admission beside other requests leaves free. `async_scheduling`: steps are scheduled one
    ahead, so that host time overlaps the GPU's and a finished request occupies one step more.
    `cudagraph_capture_sizes`: rows that steps are padded to (`simulator.cudagraphs` holds the default; an empty list
    runs without CUDA graphs). `reserve_speculative_blocks`: the blocks of speculative states are set aside once for
    `max_num_seqs` requests (proposed in vLLM pull 57261).
    """

    name: Literal["vllm"] = "vllm"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    max_model_len: Tokens = 32768
    max_num_seqs: Requests = 256
    running_limit: Requests | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1 << 18)] = 8192
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=1 << 21)] = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    prefix_cache_retention_interval: Annotated[int, Field(ge=0, le=1 << 21)] | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    async_scheduling: bool = False
    cudagraph_capture_sizes: GraphSizes | None = None
    reserve_speculative_blocks: bool = False
    weight_dtype: Literal["bf16", "fp8_tensor", "fp8_block128"] = "bf16"
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    num_gpu_blocks_override: Annotated[int, Field(ge=2, le=10**9)] | None = None
    kv_cache_memory_bytes: Annotated[int, Field(ge=1, le=1 << 50)] | None = None
    runtime_and_activations_gib: Gibibytes | None = None

    @model_validator(mode="after")
    def _one_pool(self) -> EngineSettings:
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("give num_gpu_blocks_override or kv_cache_memory_bytes, not both")
        return self

    @property
    def num_seqs(self) -> int:
        """Most requests that run at once."""
        return min(self.max_num_seqs, self.running_limit or self.max_num_seqs)

    @property
    def options(self) -> str:
        """Settings off their defaults that have no column of their own in summary.csv."""
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude=_COLUMNS)
        return "; ".join(f"{name} {value}" for name, value in changed.items())

    @property
    def kv_dtype(self) -> str:
        """Storage type of the KV cache (`auto` is bf16)."""
        return "bfloat16" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def state_dtype(self, checkpoint: str) -> str:
        """Storage type of the recurrent state (`auto` is the checkpoint's)."""
        return checkpoint if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype


class AcceptanceSettings(Section):
    """How drafts are accepted: a named preset, or tables of one's own.

    `per_depth`: conditional acceptance of the first-choice draft at depth 1, 2, …; `rank_rescue`: chance that the draft
    of rank 2, 3, … is right when all better ranks were wrong. `concentration` is that of the Beta distribution of a
    round's acceptance (none: constant).
    """

    preset: str | None = None
    per_depth: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = None
    rank_rescue: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    concentration: Annotated[float, Field(ge=1e-3, le=1e6, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> AcceptanceSettings:
        if (self.preset is None) == (self.per_depth is None):
            raise ValueError("give either 'preset' or 'per_depth', not both and not neither")
        return self


class SpeculationSettings(Section):
    """State method, draft tree and acceptance."""

    state_method: str = "storeall"
    tree: str = "1,1,1"
    acceptance: AcceptanceSettings = AcceptanceSettings(preset="mtp-hybrid")

    @model_validator(mode="before")
    @classmethod
    def _no_tree_without_drafts(cls, raw: Any) -> Any:
        """A method that decodes one row per step drafts nothing, whatever the sweep's trees."""
        method = METHODS.get(str(raw.get("state_method"))) if isinstance(raw, Mapping) else None
        return {**raw, "tree": "chain:0"} if method is not None and method.topology == "decode" else raw


class WorkloadSettings(Section):
    """Requests: lengths from a trace, a data set or a named distribution; arrivals from a clock or a closed loop.

    `trace`: a shipped trace or the path of a CSV file with input_tokens, output_tokens and, for `arrivals: trace`, t_s
    or t_ms. `lengths`: a named length distribution instead of the trace's. `request_rate` in requests per second;
    `max_concurrency` is the client's cap on requests in flight. The first `num_warmup_requests` are served, but left
    out of latencies and throughput.

    Rows of a trace with the same `conversation` are turns whose prompt is the whole history. Unless they come at the
    trace's times, a turn is sent `think_time_s` after the one before is answered, and `request_rate` is that of first
    turns. A column `hash_ids` names the prompt in units of `hash_block_tokens` (space-separated numbers; equal ones
    stand for equal prompts up to there). `shared_prefix_tokens`: tokens at the start of every prompt that all have in
    common. `priority_classes` maps a priority (lower goes first) to its share of the requests, where the trace has no
    column `priority`.
    """

    trace: str | None = None
    lengths: str | None = None
    arrivals: Literal["closed-loop", "poisson", "gamma", "constant", "trace"] = "closed-loop"
    num_requests: Annotated[int, Field(ge=1, le=10**9)] = 1000
    num_warmup_requests: Annotated[int, Field(ge=0)] = 0
    request_rate: Rate | None = None
    burstiness: Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)] = 1.0
    max_concurrency: Annotated[int, Field(ge=1, le=10**6)] | None = None
    think_time_s: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    hash_block_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    shared_prefix_tokens: Annotated[int, Field(ge=0, le=1 << 21)] = 0
    priority_classes: Annotated[dict[Priority, Share], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> WorkloadSettings:
        if (self.trace is None) == (self.lengths is None):
            raise ValueError("give either 'trace' or 'lengths', not both and not neither")
        if self.num_warmup_requests >= self.num_requests:
            raise ValueError(f"num_warmup_requests must be below num_requests ({self.num_requests})")
        if self.arrivals == "trace" and self.trace is None:
            raise ValueError("arrivals 'trace' needs a 'trace' with time stamps")
        if self.arrivals == "closed-loop":
            if self.max_concurrency is None:
                raise ValueError("arrivals 'closed-loop' needs 'max_concurrency'")
            if self.request_rate is not None:
                raise ValueError("arrivals 'closed-loop' takes no 'request_rate'; the cap on concurrency sets the load")
        if self.arrivals in ("poisson", "gamma", "constant") and self.request_rate is None:
            raise ValueError(f"arrivals '{self.arrivals}' needs 'request_rate' (requests per second)")
        return self


class HostSettings(Section):
    """Host time that no GPU table holds, in milliseconds: per engine step, and per step that carries a prompt."""

    ms_per_step: Milliseconds = 2.0
    ms_per_prompt_step: Milliseconds = 9.0


class GpuTimeSettings(Section):
    """Factors on the GPU time of the operator tables: of memory-bound steps, and of what prompts add."""

    decode_factor: Annotated[float, Field(ge=1e-2, le=100, allow_inf_nan=False)] = 1.0
    prompt_factor: Annotated[float, Field(ge=1e-2, le=100, allow_inf_nan=False)] = 1.0
