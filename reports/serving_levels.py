"""A row of the published results as a load level: scenario, requests, cost tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from lab.data import read_csv
from lab.errors import InfeasibleError
from lab.methods import get_method
from lab.profiles.system import load_system
from lab.shapes import load_shape
from lab.trees import DraftTree
from reports.serving_rows import WEIGHTS, Row, lengths, load, measured, rate
from simulator.calibration.levels import Level, chain_acceptance, lengths_of, matched, only_longest
from simulator.check import CheckedCell, check
from simulator.ledger import TooManySeqsError
from simulator.physicalcost import PhysicalGpu, Ranks, physical_cost
from simulator.requests import RequestBlock
from simulator.run import step_cost
from simulator.scenario import Scenario
from simulator.settings import EngineSettings
from simulator.sglang.settings import SglangSettings
from simulator.stepcost import StepCost, build_step_cost
from simulator.workload import request_blocks

#: Defaults of the published vLLM versions (0.17) on GPUs of 70 GiB or more.
VLLM_SEQS, VLLM_UTILIZATION = 1024, 0.9
#: SGLang cuts prompts at 8,192 tokens, on GPUs from this memory on at 16,384 (`srt/server_args.py`).
SGLANG_LARGE_BYTES, SGLANG_LARGE_CHUNK = 160 << 30, 16384
SPARE_TOKENS = 64
LINK_BYTES_PER_S = 225e9
SEED = 0


def level_of_row(row: Row, changes: Mapping[str, Any] | None = None) -> Level:
    """The level of a usable row; `changes` take the place of engine settings."""
    means = lengths(row)
    assert means is not None  # usable rows have lengths
    scenario = _scenario(row, means, changes or {})
    drawn = list(request_blocks(scenario.workload, SEED))
    prompts, outputs = _requests(row, scenario, drawn, means)
    engine = scenario.engine
    if row["max_model_len"] is None:
        needed = int((prompts.astype(np.int64) + outputs).max()) + SPARE_TOKENS
        context = "context_length" if isinstance(engine, SglangSettings) else "max_model_len"
        engine = engine.model_copy(update={context: needed})
    workload = only_longest(scenario.workload, prompts, outputs)
    cell = _checked(scenario.model_copy(update={"engine": engine, "workload": workload}))
    arrivals = np.concatenate([block.arrival_s for block in drawn])

    def blocks() -> Iterator[RequestBlock]:
        return iter([RequestBlock(arrivals, prompts, outputs)])

    price = step_cost if _is_tabulated(row["model"], scenario.gpu, scenario.tensor_parallel_size) else by_rates
    return Level(f"{row['id']}, {load(row)}", measured(row), cell, blocks, price, bool(row["accept_len"]))


def by_rates(cell: CheckedCell) -> StepCost:
    """Cost tables from the GPU's rates, for shapes that the operator tables lack."""
    system = load_system(cell.scenario.gpu)
    gpu = PhysicalGpu(
        system.gpu,
        system.memory_bandwidth_bytes_per_s,
        system.bf16_tensor_flops_per_s,
        LINK_BYTES_PER_S,
        system.memory_capacity_bytes,
    )
    ranks = Ranks(cell.scenario.tensor_parallel_size)
    return physical_cost(cell.shape, gpu, ranks, cell.engine, cell.tree.num_rows)


@cache
def _is_tabulated(model: str, gpu: str, tp: int) -> bool:
    small = EngineSettings(max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64)
    try:
        build_step_cost(load_shape(model), gpu, tp, small, get_method("recurrent"), DraftTree.chain(0), 1.0)
    except InfeasibleError:
        return False
    return True


def _scenario(row: Row, means: tuple[float, float], changes: Mapping[str, Any]) -> Scenario:
    drafts = int(row["spec_k"] or 0)
    speculation: dict[str, Any] = {"state_method": "storeall" if drafts else "recurrent", "tree": f"chain:{drafts}"}
    if drafts and row["accept_len"]:
        speculation["acceptance"] = {"per_depth": (chain_acceptance(row["accept_len"], drafts),) * drafts}
    paced, count = rate(row), int(row["num_prompts"])
    pace: dict[str, Any] = {"arrivals": "poisson", "request_rate": paced}
    if paced is None:
        pace = {"arrivals": "closed-loop", "max_concurrency": int(row["max_concurrency"])}
    chat = "sharegpt" in str(row["dataset"]).lower()
    return Scenario.model_validate(
        {
            "name": row["id"],
            "model": row["model"],
            "gpu": row["gpu"].lower(),
            "tensor_parallel_size": int(row["tp"]),
            "engine": {**_SETTINGS[row["engine"]](row), **changes},
            "speculation": speculation,
            "workload": {
                "num_requests": count,
                **({"trace": "sharegpt"} if chat else {"lengths": f"fixed:{means[0]:.0f}/{means[1]:.0f}"}),
                **pace,
            },
            "seed": SEED,
        }
    )


def _vllm(row: Row) -> dict[str, Any]:
    """vLLM's settings, as far as the row states them, and the defaults of its version."""
    stated = {"max_num_seqs": row["max_num_seqs"], "max_num_batched_tokens": row["max_batched_tokens"]}
    stated["max_model_len"] = row["max_model_len"]
    settings: dict[str, Any] = {"max_num_seqs": VLLM_SEQS, "gpu_memory_utilization": VLLM_UTILIZATION}
    settings |= {name: int(value) for name, value in stated.items() if value}
    settings |= {"kv_cache_dtype": "fp8"} if "--kv-cache-dtype=fp8" in str(row["flags"]) else {}
    if row["prefix_cache"]:
        settings["enable_prefix_caching"] = True
    return {**settings, "weight_dtype": WEIGHTS[row["quant"]]}


def _sglang(row: Row) -> dict[str, Any]:
    """SGLang's settings, as far as the row states them; the radix cache reserves its slots unless it is off."""
    settings: dict[str, Any] = {"name": "sglang", "weight_dtype": WEIGHTS[row["quant"]]}
    stated = {"max_running_requests": row["max_num_seqs"], "context_length": row["max_model_len"]}
    settings |= {name: int(value) for name, value in stated.items() if value}
    if row["max_batched_tokens"]:
        settings["chunked_prefill_size"] = int(row["max_batched_tokens"])
    elif load_system(row["gpu"].lower()).memory_capacity_bytes >= SGLANG_LARGE_BYTES:
        settings["chunked_prefill_size"] = SGLANG_LARGE_CHUNK
    if row["prefix_cache"] == 0:
        settings["mamba_radix_cache_strategy"] = "none"
    return settings


#: The section `engine` of a row's scenario, by engine.
_SETTINGS: dict[str, Callable[[Row], dict[str, Any]]] = {"vLLM": _vllm, "SGLang": _sglang}


def _requests(
    row: Row, scenario: Scenario, drawn: Sequence[RequestBlock], means: tuple[float, float]
) -> tuple[Any, Any]:
    """Prompt and output lengths: ShareGPT's brought to the row's means, uniform or constant ones for random prompts."""
    prompts, outputs = lengths_of(drawn)
    if scenario.workload.trace is not None:
        prompts, outputs = _conversations(len(prompts), means[1])
    if "range ratio 0" in str(row["dataset"]):
        rng = np.random.default_rng(SEED)
        prompts, outputs = (rng.integers(1, 2 * int(mean) + 1, len(prompts)).astype(np.int32) for mean in means)
    return matched(prompts, means[0]), matched(outputs, means[1])


def _conversations(count: int, mean_output: float) -> tuple[Any, Any]:
    """ShareGPT lengths: all pairs of the benchmark's filter or those that a user began, whose mean reply is nearer."""
    pairs = read_csv("traces", "sharegpt_first_pairs.csv.gz").filter(pl.col("vllm_filter") == 1)
    begun = pairs.filter(pl.col("first_turn_is_user") == 1)
    chosen = min((pairs, begun), key=lambda each: abs(float(each["output_tokens"].to_numpy().mean()) - mean_output))
    used = np.arange(count) % len(chosen)
    prompts, outputs = (chosen[name].to_numpy()[used] for name in ("input_tokens", "output_tokens"))
    return prompts.astype(np.int32), outputs.astype(np.int32)


def _checked(scenario: Scenario) -> CheckedCell:
    """The cell, with fewer running requests where the engine would refuse so many."""
    try:
        return check(scenario)
    except TooManySeqsError as error:
        engine = scenario.engine.model_copy(update={"max_num_seqs": error.viable})
        return check(scenario.model_copy(update={"engine": engine}))
