"""Settings of SGLang, by its own flag names, as the section `engine` of a scenario with `name: sglang`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from simulator.settings import Gibibytes, Requests, Section, Tokens

#: Names that vLLM has for a setting of SGLang.
VLLM_NAMES = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size and max_prefill_tokens",
    "enable_chunked_prefill": "chunked_prefill_size (-1 is off)",
    "enable_prefix_caching": "mamba_radix_cache_strategy (none is off)",
    "mamba_ssm_cache_dtype": "mamba_ssm_dtype",
    "num_gpu_blocks_override": "max_total_tokens",
    "kv_cache_memory_bytes": "max_total_tokens",
    "block_size": "page_size",
    "cudagraph_capture_sizes": "cuda_graph_bs (requests)",
    "async_scheduling": "disable_overlap_schedule (true turns it off)",
    "watermark": "schedule_conservativeness (above 1 keeps more room)",
    "scheduling_policy": "arrival order alone; leave it out",
}

#: Running requests by default when drafts are made, and the bounds of the default otherwise.
SPECULATIVE_RUNNING = 48
DEFAULT_RUNNING = (2048, 4096)
#: Output tokens that admission expects of a request at most (`SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION`).
CLIP_NEW_TOKENS = 4096

GraphRequests = Annotated[tuple[Requests, ...], Field(max_length=4096)]
Strategy = Literal["auto", "none", "no_buffer", "extra_buffer", "extra_buffer_lazy"]


class SglangSettings(Section):
    """Settings of SGLang, by its own names.

    `max_running_requests` without a value is SGLang's default: 48 with drafts, else 2,048 to 4,096 by the pool of
    tokens. `chunked_prefill_size` -1 computes prompts whole. `max_new_tokens` is what every client asks for, which
    admission has to expect; without a number each asks for what it gets, as benchmark clients do.
    `mamba_radix_cache_strategy` `none` stands for `--disable-radix-cache`, `auto` is `extra_buffer`, and `no_buffer`
    for the state method `replayssm`. SGLang derives `mem_fraction_static` from the GPU where it is not given; here it
    is 0.85. `cuda_graph_bs`: numbers of requests that CUDA graphs are captured for (an empty list is
    `--disable-cuda-graph`). `runtime_and_activations_gib` takes the place of the estimate of what has to fit in the
    rest of the memory.
    """

    name: Literal["sglang"] = "sglang"
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = 0.85
    context_length: Tokens = 32768
    max_running_requests: Requests | None = None
    max_total_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = None
    chunked_prefill_size: Annotated[int, Field(ge=-1, le=1 << 18)] = 8192
    max_prefill_tokens: Annotated[int, Field(ge=1, le=1 << 18)] = 16384
    max_new_tokens: Tokens | None = None
    enable_mixed_chunk: bool = False
    schedule_conservativeness: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    disable_overlap_schedule: bool = False
    cuda_graph_bs: GraphRequests | None = None
    page_size: Annotated[int, Field(ge=1, le=4096)] = 1
    mamba_radix_cache_strategy: Strategy = "auto"
    mamba_full_memory_ratio: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 0.9
    max_mamba_cache_size: Annotated[int, Field(ge=1, le=10**7)] | None = None
    linear_replayssm_cache_len: Annotated[int, Field(ge=1, le=1024)] = 16
    weight_dtype: Literal["bf16", "fp8_tensor", "fp8_block128"] = "bf16"
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "auto"
    mamba_ssm_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    runtime_and_activations_gib: Gibibytes | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_names(cls, raw: Any) -> Any:
        """Say what SGLang calls a setting that was given by vLLM's name."""
        for name in raw if isinstance(raw, Mapping) else ():
            if name in VLLM_NAMES:
                raise ValueError(f"{name} is vLLM's name; the engine sglang has {VLLM_NAMES[name]}")
        return raw

    @model_validator(mode="after")
    def _pages(self) -> SglangSettings:
        if self.chunked_prefill_size == 0:
            raise ValueError("chunked_prefill_size = 0: give tokens, or -1 to compute prompts whole")
        if self.chunked_prefill_size > 0 and self.chunked_prefill_size % self.page_size:
            raise ValueError(
                f"chunked_prefill_size = {self.chunked_prefill_size} must be a multiple of page_size {self.page_size}"
            )
        return self

    def radix_strategy(self, state_method: str) -> str:
        """Strategy of the radix cache with `auto` resolved."""
        if self.mamba_radix_cache_strategy != "auto":
            return self.mamba_radix_cache_strategy
        return "no_buffer" if state_method == "replayssm" else "extra_buffer"

    def overlap_schedule(self, state_method: str) -> bool:
        """Whether the host prepares the next step while the GPU computes; `no_buffer` cannot."""
        return not self.disable_overlap_schedule and self.radix_strategy(state_method) != "no_buffer"

    @property
    def gpu_memory_utilization(self) -> float:
        """Where vLLM's name is asked for: the memory budget of a cell."""
        return self.mem_fraction_static

    @property
    def max_num_seqs(self) -> int:
        """Running requests asked for; without a number SGLang's largest default."""
        return self.max_running_requests or DEFAULT_RUNNING[1]

    @property
    def step_tokens(self) -> int:
        """Most prompt tokens of one step."""
        whole = max(self.max_prefill_tokens, self.context_length)
        return self.chunked_prefill_size if self.chunked_prefill_size > 0 else whole

    @property
    def kv_dtype(self) -> str:
        """Storage type of the KV cache (`auto` is bf16)."""
        return "bfloat16" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def state_dtype(self, checkpoint: str) -> str:
        """Storage type of the recurrent state (`auto` is the checkpoint's)."""
        return checkpoint if self.mamba_ssm_dtype == "auto" else self.mamba_ssm_dtype

    @property
    def options(self) -> str:
        """Settings off their defaults that have no column of their own in summary.csv."""
        told = {"name", "mem_fraction_static", "context_length", "max_running_requests", "chunked_prefill_size"}
        told |= {"weight_dtype", "kv_cache_dtype", "mamba_ssm_dtype"}
        changed = self.model_dump(exclude_defaults=True, exclude=told)
        return "; ".join(f"{name} {value}" for name, value in changed.items())
