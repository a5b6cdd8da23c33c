"""Scenarios: one YAML file says model, GPU, engine settings, speculation, workload and seed; lists make a sweep.

The file is read safely, checked by pydantic, and every error names the field, the value and what is allowed. `expand`
turns a scenario with lists into cells, each a `Scenario` of plain values.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lab.errors import UsageError
from lab.methods import METHODS
from simulator.calibration.file import with_calibration

PositiveInt = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=1 << 21)]
Requests = Annotated[int, Field(ge=1, le=1 << 16)]
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Gibibytes = Annotated[float, Field(ge=0, le=1024, allow_inf_nan=False)]

#: Fields that may hold a list, by section; each list is one axis of the sweep, in this order.
SWEEP_FIELDS: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("gpu",),
    ("tensor_parallel_size",),
    ("engine", "gpu_memory_utilization"),
    ("engine", "max_model_len"),
    ("engine", "max_num_seqs"),
    ("engine", "max_num_batched_tokens"),
    ("engine", "weight_dtype"),
    ("engine", "kv_cache_dtype"),
    ("engine", "mamba_ssm_cache_dtype"),
    ("workload", "trace"),
    ("workload", "lengths"),
    ("workload", "request_rate"),
    ("workload", "burstiness"),
    ("workload", "max_concurrency"),
    ("speculation", "tree"),
    ("speculation", "state_method"),
    ("seed",),
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(_Section):
    """Settings of the serving engine, by vLLM's names.

    `max_num_seqs` is 256 by default (vLLM's own is 1024 on large GPUs). `running_limit` lowers it for one cell: a sweep
    sets it where the records of a method for `max_num_seqs` requests do not fit. `runtime_and_activations_gib` takes
    the place of the estimate of what the engine keeps for itself.
    """

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    max_model_len: Tokens = 32768
    max_num_seqs: Requests = 256
    running_limit: Requests | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1 << 18)] = 8192
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=1 << 21)] = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
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
    def kv_dtype(self) -> str:
        """Storage type of the KV cache (`auto` is bf16)."""
        return "bfloat16" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def state_dtype(self, checkpoint: str) -> str:
        """Storage type of the recurrent state (`auto` is the checkpoint's)."""
        return checkpoint if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype


class AcceptanceSettings(_Section):
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


class SpeculationSettings(_Section):
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


class WorkloadSettings(_Section):
    """Requests: lengths from a trace, a data set or a named distribution; arrivals from a clock or a closed loop.

    `trace`: a shipped trace or the path of a CSV file with input_tokens, output_tokens and, for `arrivals: trace`, t_s
    or t_ms. `lengths`: a named length distribution instead of the trace's. `request_rate` in requests per second;
    `max_concurrency` is the client's cap on requests in flight. The first `num_warmup_requests` are served, but left
    out of latencies and throughput.
    """

    trace: str | None = None
    lengths: str | None = None
    arrivals: Literal["closed-loop", "poisson", "gamma", "constant", "trace"] = "closed-loop"
    num_requests: Annotated[int, Field(ge=1, le=10**9)] = 1000
    num_warmup_requests: Annotated[int, Field(ge=0)] = 0
    request_rate: Rate | None = None
    burstiness: Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)] = 1.0
    max_concurrency: Annotated[int, Field(ge=1, le=10**6)] | None = None

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


class HostSettings(_Section):
    """Host time that no GPU table holds, in milliseconds: per engine step, and per step that carries a prompt."""

    ms_per_step: Milliseconds = 2.0
    ms_per_prompt_step: Milliseconds = 9.0


class GpuTimeSettings(_Section):
    """Factors on the GPU time of the operator tables: of memory-bound steps, and of what prompts add."""

    decode_factor: Annotated[float, Field(ge=1e-2, le=100, allow_inf_nan=False)] = 1.0
    prompt_factor: Annotated[float, Field(ge=1e-2, le=100, allow_inf_nan=False)] = 1.0


class Scenario(_Section):
    """One simulated service: everything a run depends on.

    `calibration` names a file of `treewy calibrate`, whose constants are in `host` and `gpu_time` when it is read.
    """

    name: str = "scenario"
    model: str
    gpu: str = "h200"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    engine: EngineSettings = EngineSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    workload: WorkloadSettings
    host: HostSettings = HostSettings()
    gpu_time: GpuTimeSettings = GpuTimeSettings()
    calibration: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if isinstance(key, str) and keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises `UsageError` when it cannot be read or is not a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = yaml.load(text, Loader=_Loader)
        json.dumps(raw, default=str, ensure_ascii=False).encode()
    except OSError as error:
        raise UsageError(f"cannot read scenario {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"scenario {path} is not valid YAML: line {line}: {error.problem}") from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"scenario {path} is not valid YAML: {reason[:200]}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"scenario {path} must be a mapping of fields such as model, gpu, workload")
    return raw


def expand(raw: Mapping[str, Any]) -> list[Scenario]:
    """All cells of a scenario: the product of its lists, in the order of `SWEEP_FIELDS` (the last varies fastest).

    Raises `UsageError` naming field, value and what is allowed.
    """
    raw = with_calibration(raw)
    axes: list[list[tuple[tuple[str, ...], Any]]] = []
    for path in SWEEP_FIELDS:
        value = _get(raw, path)
        if isinstance(value, list):
            if not value:
                raise UsageError(f"{'.'.join(path)} is an empty list; give one value or more")
            if path[-1] == "tree" and not all(isinstance(item, str) for item in value):
                raise UsageError(
                    f'speculation.tree = {value}: write trees as text, such as "2,2,2" or ["1,1,1", "2,2,2"]'
                )
            axes.append([(path, item) for item in value])
    return [_validate(_with(raw, dict(choice))) for choice in itertools.product(*axes)]


def engine_settings(**values: Any) -> EngineSettings:
    """Engine settings from plain values; raises `UsageError` naming field, value and what is allowed."""
    try:
        return EngineSettings(**values)
    except ValidationError as error:
        raise UsageError("; ".join(_sentences(error))) from None


def replace_fields(raw: Mapping[str, Any], values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A copy of a scenario's mapping with other values at the given paths."""
    for path in values:
        if len(path) > 1 and not isinstance(raw.get(path[0], {}), Mapping):
            raise UsageError(f"{path[0]} must be a mapping of fields such as {path[1]}")
    return _with(raw, values)


def _get(raw: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = raw
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _with(raw: Mapping[str, Any], choices: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A copy of the scenario with the chosen value at every path."""
    copy = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    for path, value in choices.items():
        target = copy
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = value
    return copy


def _validate(raw: Mapping[str, Any]) -> Scenario:
    _refuse_other_lists(raw)
    try:
        return Scenario.model_validate(_tree_as_text(raw))
    except ValidationError as error:
        raise UsageError("; ".join(_sentences(error))) from None


def _refuse_other_lists(raw: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Lists make a sweep in `SWEEP_FIELDS` only; elsewhere they are a mistake, save for the tables of acceptance."""
    for key, value in raw.items():
        place = (*path, str(key))
        if isinstance(value, Mapping):
            _refuse_other_lists(value, place)
        elif isinstance(value, list) and "acceptance" not in path:
            allowed = ", ".join(".".join(field) for field in SWEEP_FIELDS)
            raise UsageError(f"{'.'.join(place)} = {value}: a list makes a sweep only in {allowed}")


def _tree_as_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """YAML reads `tree: 3` as a number; trees are text."""
    speculation = raw.get("speculation")
    if isinstance(speculation, dict) and isinstance(speculation.get("tree"), int):
        speculation["tree"] = str(speculation["tree"])
    return raw


def _sentences(error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "scenario"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            yield f"{field}: no such field"
        elif item["type"] == "missing":
            yield f"{field}: required field is missing"
        elif item["type"] == "value_error":
            yield f"{field}: {message}"
        else:
            value = item.get("input")
            shown = "not a number" if isinstance(value, float) and math.isnan(value) else repr(value)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            message = message.replace("valid dictionary or instance of", "mapping of fields:")
            yield f"{field} = {shown}: {message[0].lower()}{message[1:]}"
