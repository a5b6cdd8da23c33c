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
from typing import Annotated, Any

import yaml
from pydantic import Discriminator, Field, Tag, ValidationError

from lab.errors import UsageError
from simulator.calibration.file import with_calibration
from simulator.settings import (
    EngineSettings,
    GpuTimeSettings,
    HostSettings,
    Routing,
    Section,
    SpeculationSettings,
    WorkloadSettings,
)
from simulator.sglang.settings import SglangSettings

#: Engines, by the `name` in the section `engine`.
ENGINES = ("vllm", "sglang")

#: Fields that may hold a list, by section; each list is one axis of the sweep, in this order.
SWEEP_FIELDS: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("gpu",),
    ("tensor_parallel_size",),
    ("moe_routing",),
    ("engine", "gpu_memory_utilization"),
    ("engine", "max_model_len"),
    ("engine", "max_num_seqs"),
    ("engine", "max_num_batched_tokens"),
    ("engine", "weight_dtype"),
    ("engine", "kv_cache_dtype"),
    ("engine", "mamba_ssm_cache_dtype"),
    ("engine", "num_gpu_blocks_override"),
    ("engine", "enable_prefix_caching"),
    ("engine", "prefix_cache_retention_interval"),
    ("engine", "scheduling_policy"),
    ("engine", "async_scheduling"),
    ("engine", "mem_fraction_static"),
    ("engine", "context_length"),
    ("engine", "max_running_requests"),
    ("engine", "chunked_prefill_size"),
    ("engine", "mamba_radix_cache_strategy"),
    ("engine", "mamba_full_memory_ratio"),
    ("engine", "max_mamba_cache_size"),
    ("engine", "mamba_ssm_dtype"),
    ("workload", "trace"),
    ("workload", "lengths"),
    ("workload", "request_rate"),
    ("workload", "burstiness"),
    ("workload", "max_concurrency"),
    ("speculation", "tree"),
    ("speculation", "state_method"),
    ("seed",),
)
#: Fields that are lists themselves.
LIST_FIELDS = (("engine", "cudagraph_capture_sizes"), ("engine", "cuda_graph_bs"))


def _engine_name(raw: Any) -> str:
    """The engine that a section describes: its `name`, vLLM without one."""
    name = raw.get("name", "vllm") if isinstance(raw, Mapping) else getattr(raw, "name", "vllm")
    return str(name)


class Scenario(Section):
    """One simulated service: everything a run depends on. The engine is vLLM, or SGLang with `name: sglang`.

    `moe_routing` says how evenly rows choose experts (`power_law_1.2` by default): skewed by a power law, or
    `balanced`, which touches as many experts as possible. A dense model takes none. `calibration` names a file of
    `treewy calibrate`, whose constants are in `host` and `gpu_time` when it is read.
    """

    name: str = "scenario"
    model: str
    gpu: str = "h200"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    moe_routing: Routing | None = None
    engine: Annotated[
        Annotated[EngineSettings, Tag("vllm")] | Annotated[SglangSettings, Tag("sglang")], Discriminator(_engine_name)
    ] = EngineSettings()
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
    _refuse_engine_as_text(raw)
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


def sglang_settings(**values: Any) -> SglangSettings:
    """SGLang's settings from plain values; raises `UsageError` naming field, value and what is allowed."""
    try:
        return SglangSettings(**values)
    except ValidationError as error:
        raise UsageError("; ".join(_sentences(error))) from None


def replace_fields(raw: Mapping[str, Any], values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A copy of a scenario's mapping with other values at the given paths."""
    _refuse_engine_as_text(raw)
    for path in values:
        if len(path) > 1 and not isinstance(raw.get(path[0], {}), Mapping):
            raise UsageError(f"{path[0]} must be a mapping of fields such as {path[1]}")
    return _with(raw, values)


def _refuse_engine_as_text(raw: Mapping[str, Any]) -> None:
    """Say how an engine is chosen where its name stands in place of its section."""
    engine = raw.get("engine")
    if isinstance(engine, str):
        names = [engine.lower()] if engine.lower() in ENGINES else ENGINES
        ways = " or ".join(f"{{name: {name}}}" for name in names)
        raise UsageError(f"engine = '{engine:.60}': write engine: {ways}")


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
    """Lists make a sweep in `SWEEP_FIELDS` only; else they are a mistake, save for `LIST_FIELDS` and acceptance."""
    for key, value in raw.items():
        place = (*path, str(key))
        if isinstance(value, Mapping):
            _refuse_other_lists(value, place)
        elif isinstance(value, list) and "acceptance" not in path and place not in LIST_FIELDS:
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
        field = ".".join(str(part) for part in item["loc"] if part not in ENGINES) or "scenario"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            of_sglang = "vllm" in item["loc"] and item["loc"][-1] in SglangSettings.model_fields
            yield f"{field}: no such field" + ("; it is SGLang's, which engine.name: sglang chooses" * of_sglang)
        elif item["type"] == "union_tag_invalid":
            yield f"{field}.name = '{item['ctx']['tag']}': allowed are {' and '.join(ENGINES)}"
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
