"""A load level: a measured result and the simulated service at the same load, run with any values of the constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lab.acceptance import acceptance_from
from lab.errors import UsageError
from lab.trees import parse_tree
from simulator.calibration.constants import Values
from simulator.calibration.measure import measure
from simulator.calibration.results import EngineResult, Ints
from simulator.check import CheckedCell, check
from simulator.gputime import with_gpu_time
from simulator.requests import PrefixIds, RequestBlock
from simulator.run import step_cost
from simulator.scenario import Scenario, expand
from simulator.settings import GpuTimeSettings, WorkloadSettings
from simulator.stepcost import StepCost
from simulator.workload import request_blocks

Blocks = Callable[[], Iterator[RequestBlock]]

#: Fields of a scenario's workload that say what its requests are; the load is the result's.
_REQUESTS = (
    "trace",
    "lengths",
    "shared_prefix_tokens",
    "hash_block_tokens",
    "priority_classes",
    "think_time_s",
)


@dataclass(frozen=True)
class Level:
    """One load: what was measured (metrics by the names of summary.csv), the cell that simulates it, its requests.

    `price` makes the cell's cost tables; `acceptance_known` keeps a fitted acceptance from taking the place of the
    cell's.
    """

    name: str
    measured: Mapping[str, float]
    cell: CheckedCell
    blocks: Blocks
    price: Callable[[CheckedCell], StepCost] = step_cost
    acceptance_known: bool = False

    def predict(self, values: Values) -> dict[str, float]:
        """Metrics of the simulated run with these constants; those not named keep the scenario's value."""
        cell, cost = self.with_constants(values)
        return measure(cell, cost, self.blocks()).metrics

    def with_constants(self, values: Values) -> tuple[CheckedCell, StepCost]:
        """The cell and its cost tables with these constants."""
        cell = self.cell
        if "acceptance" in values and cell.tree.num_drafts and not self.acceptance_known:
            cell = _with_acceptance(cell, values["acceptance"])
        scenario = cell.scenario
        host = {name.partition(".")[2]: value for name, value in values.items() if name.startswith("host.")}
        gpu = {name.partition(".")[2]: value for name, value in values.items() if name.startswith("gpu_time.")}
        factors = scenario.gpu_time.model_copy(update=gpu)
        plain = {"host": scenario.host.model_copy(update=host), "gpu_time": GpuTimeSettings()}
        cell = replace(cell, scenario=scenario.model_copy(update=plain))
        return cell, with_gpu_time(_tables(_Key(cell), self.price), factors)


class _Key:
    """A cell by all that its tables depend on: hosts, loads and seeds leave them alone."""

    def __init__(self, cell: CheckedCell) -> None:
        self.cell = cell
        scenario = cell.scenario
        engine = scenario.engine.model_dump_json(exclude={"running_limit"})
        self._key = (
            scenario.model_dump_json(exclude={"host", "workload", "engine", "seed", "name", "calibration"}),
            engine,
            round(cell.acceptance_length, 3),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


@lru_cache(maxsize=32)
def _tables(key: _Key, price: Callable[[CheckedCell], StepCost]) -> StepCost:
    return price(key.cell)


def _with_acceptance(cell: CheckedCell, chance: float) -> CheckedCell:
    """The cell with one chance of acceptance at every depth."""
    settings = cell.scenario.speculation.acceptance
    model = acceptance_from(
        preset=None,
        per_depth=(chance,) * cell.tree.max_depth,
        rank_rescue=settings.rank_rescue,
        concentration=settings.concentration,
    )
    return replace(cell, acceptance=model, acceptance_length=model.served_acceptance_length(cell.tree))


def level_of(raw: Mapping[str, Any], result: EngineResult) -> Level:
    """The level of a result: the scenario's service under the result's load.

    The workload is the result's: its lengths and send times where it is detailed, otherwise the scenario's requests
    with lengths brought to the result's means. Raises `UsageError` when the scenario is a sweep, cannot serve the
    requests, or needs of them what a detailed result does not tell.
    """
    scenario = _one_scenario(raw, result)
    requests = _own_requests(scenario, result) if result.prompt_tokens is not None else _stretched(scenario, result)
    prompts, outputs = lengths_of(requests)
    workload = only_longest(scenario.workload, prompts, outputs)
    measured, known = _with_measured_acceptance(scenario, result)
    cell = check(measured.model_copy(update={"workload": workload}))
    return Level(result.load, result.metrics, cell, lambda: iter(requests), acceptance_known=known)


def _one_scenario(raw: Mapping[str, Any], result: EngineResult) -> Scenario:
    """The scenario under the result's load."""
    workload = raw.get("workload")
    if not isinstance(workload, Mapping):
        raise UsageError("workload must be a mapping with a trace or lengths; the load comes from the engine result")
    kept = {key: workload[key] for key in _REQUESTS if workload.get(key) is not None}
    count = result.num_requests if result.prompt_tokens is None else len(result.prompt_tokens)
    load: dict[str, Any] = {"num_requests": count, "max_concurrency": result.max_concurrency}
    if result.request_rate is not None:
        poisson = result.burstiness == 1.0
        load |= {"arrivals": "poisson" if poisson else "gamma", "request_rate": result.request_rate}
        load |= {} if poisson else {"burstiness": result.burstiness}
    else:
        load |= {"arrivals": "closed-loop", "max_concurrency": result.max_concurrency or count}
    cells = expand({**raw, "workload": {**kept, **load}})
    if len(cells) != 1:
        raise UsageError(
            f"the scenario is a sweep of {len(cells)} cells; calibration compares one service: give one value each of "
            "state_method, tree, engine fields and seed (flags such as --state-method do so)"
        )
    return cells[0]


def _own_requests(scenario: Scenario, result: EngineResult) -> list[RequestBlock]:
    """The result's own requests; what their prompts share and who goes first are not in it."""
    assert result.prompt_tokens is not None
    assert result.output_tokens is not None
    engine = scenario.engine
    blocks = list(request_blocks(scenario.workload, scenario.seed))
    caching = engine.name == "vllm" and engine.enable_prefix_caching
    if caching and any(_shares(block.prefix) for block in blocks):
        raise UsageError(
            f"engine result {result.path} has lengths of its own but does not tell which prompts share a prefix, and "
            "the scenario has enable_prefix_caching with shared prompts: set it to false, or give a result without "
            "input_lens, whose requests are the scenario's"
        )
    by_priority = engine.name == "vllm" and engine.scheduling_policy == "priority"
    if by_priority and any(block.priority is not None for block in blocks):
        raise UsageError(
            f"engine result {result.path} has lengths of its own but no priorities, and the scenario has "
            "scheduling_policy: priority: set it to fcfs, or give a result without input_lens, whose requests are the "
            "scenario's"
        )
    arrivals = _arrivals(blocks, result, len(result.prompt_tokens))
    return [RequestBlock(arrivals, result.prompt_tokens, result.output_tokens)]


def _shares(prefix: PrefixIds | None) -> bool:
    """Whether requests of a block may have tokens in common."""
    return prefix is not None and bool(prefix.shared_tokens or len(prefix.unit_ids) or (prefix.stream >= 0).any())


def _stretched(scenario: Scenario, result: EngineResult) -> list[RequestBlock]:
    """The scenario's requests, with what they share, their turns and priorities, at the result's mean lengths."""
    blocks = list(request_blocks(scenario.workload, scenario.seed))
    prompts, outputs = lengths_of(blocks)
    ends = np.cumsum([len(block.prompt_tokens) for block in blocks])[:-1]
    lengths = zip(
        np.split(matched(prompts, result.mean_prompt_tokens), ends),
        np.split(matched(outputs, result.mean_output_tokens), ends),
        strict=True,
    )
    return [
        block._replace(prompt_tokens=prompt, output_tokens=output)
        for block, (prompt, output) in zip(blocks, lengths, strict=True)
    ]


def lengths_of(blocks: Sequence[RequestBlock]) -> tuple[Ints, Ints]:
    """Prompt and output lengths of all requests."""
    return (
        np.concatenate([block.prompt_tokens for block in blocks]),
        np.concatenate([block.output_tokens for block in blocks]),
    )


def only_longest(workload: WorkloadSettings, prompts: Ints, outputs: Ints) -> WorkloadSettings:
    """The workload with all requests as long as the longest of these: what the checks of a cell need to know."""
    longest = int(np.argmax(prompts.astype(np.int64) + outputs))
    return workload.model_copy(update={"trace": None, "lengths": f"fixed:{prompts[longest]}/{outputs[longest]}"})


def matched(tokens: Ints, mean: float) -> Ints:
    """Lengths stretched to a mean, at least 1 token each."""
    stretched = np.maximum(np.rint(tokens * (mean / tokens.mean())), 1)
    return np.asarray(stretched, dtype=np.int32)


def _arrivals(blocks: Sequence[RequestBlock], result: EngineResult, count: int) -> Any:
    """Send times: the result's own, unless a cap on concurrency set the pace."""
    if result.arrival_s is not None and result.max_concurrency is None:
        return result.arrival_s
    return np.concatenate([block.arrival_s for block in blocks])[:count]


def _with_measured_acceptance(scenario: Scenario, result: EngineResult) -> tuple[Scenario, bool]:
    """The scenario with the result's acceptance, and true, where it tells one and drafts are a chain."""
    tree = parse_tree(scenario.speculation.tree)
    depth = tree.max_depth
    if not depth or max(tree.width_by_depth) > 1:
        return scenario, False
    per_depth: tuple[float, ...]
    if len(result.per_position) == depth:
        before = (1.0, *result.per_position[:-1])
        per_depth = tuple(s / b if b > 0 else 0.0 for s, b in zip(result.per_position, before, strict=True))
    elif result.acceptance_length is not None and 1 <= result.acceptance_length <= depth + 1:
        per_depth = (chain_acceptance(result.acceptance_length, depth),) * depth
    else:
        return scenario, False
    acceptance = scenario.speculation.acceptance.model_copy(update={"preset": None, "per_depth": per_depth})
    speculation = scenario.speculation.model_copy(update={"acceptance": acceptance})
    return scenario.model_copy(update={"speculation": speculation}), True


def chain_acceptance(acceptance_length: float, depth: int) -> float:
    """The chance per draft of a chain of `depth` drafts that emits `acceptance_length` tokens a step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        emitted = sum(middle**j for j in range(depth + 1))
        low, high = (middle, high) if emitted < acceptance_length else (low, middle)
    return (low + high) / 2
