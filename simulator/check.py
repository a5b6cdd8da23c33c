"""What can be found before time starts to run: whether a cell can be served, its ledger, its acceptance."""

from __future__ import annotations

from dataclasses import dataclass

from lab.acceptance import AcceptanceModel, acceptance_from
from lab.errors import InfeasibleError, UsageError
from lab.methods import get_method
from lab.methods.base import StateMethod
from lab.shapes import ModelShape, load_shape
from lab.trees import DraftTree, parse_tree
from simulator.ledger import Ledger, build_ledger
from simulator.memory import PoolLayout
from simulator.scenario import Scenario
from simulator.settings import EngineSettings
from simulator.sglang import cell as sglang
from simulator.sglang.ledger import SglangLedger
from simulator.stepcost import DEFAULT_ROUTING
from simulator.workload import length_limits, request_blocks


@dataclass(frozen=True, slots=True)
class CheckedCell:
    """A scenario that can run: its parts by name, its ledger and its acceptance.

    `engine` are the engine's settings by vLLM's names: the scenario's own, or what SGLang's come to.
    """

    scenario: Scenario
    engine: EngineSettings
    shape: ModelShape
    method: StateMethod
    tree: DraftTree
    ledger: Ledger | SglangLedger
    acceptance: AcceptanceModel
    acceptance_length: float

    @property
    def tree_name(self) -> str:
        """How tables call the tree: the scenario's text, or `none` when nothing is drafted."""
        return self.scenario.speculation.tree if self.tree.num_drafts else "none"

    @property
    def moe_routing(self) -> str:
        """How rows choose experts; empty for a dense model."""
        return (self.scenario.moe_routing or DEFAULT_ROUTING) if self.shape.is_moe else ""


def check(scenario: Scenario) -> CheckedCell:
    """Check a scenario without building its tables.

    Raises `UsageError` for impossible values and `InfeasibleError` for combinations that cannot run.
    """
    shape = load_shape(scenario.model)
    method = get_method(scenario.speculation.state_method)
    tree = parse_tree(scenario.speculation.tree)
    if scenario.moe_routing is not None and not shape.is_moe:
        raise InfeasibleError(
            f"moe_routing = {scenario.moe_routing}: {shape.name} is dense and routes no rows to experts; "
            "leave moe_routing out or name a model with experts"
        )
    engine, ledger = _engine(scenario, shape, method, tree)
    request_blocks(scenario.workload, scenario.seed)  # its own checks
    settings = scenario.speculation.acceptance
    acceptance = acceptance_from(
        preset=settings.preset,
        per_depth=settings.per_depth,
        rank_rescue=settings.rank_rescue,
        concentration=settings.concentration,
    )
    return CheckedCell(
        scenario,
        engine,
        shape,
        method,
        tree,
        ledger,
        acceptance,
        acceptance.served_acceptance_length(tree),
    )


def _engine(
    scenario: Scenario, shape: ModelShape, method: StateMethod, tree: DraftTree
) -> tuple[EngineSettings, Ledger | SglangLedger]:
    """Settings and ledger of the scenario's engine, after its checks."""
    gpu, tp, engine = scenario.gpu, scenario.tensor_parallel_size, scenario.engine
    if not isinstance(engine, EngineSettings):
        longest = length_limits(scenario.workload)
        pools = sglang.checked_ledger(shape, gpu, tp, engine, method, tree, longest)
        return sglang.vllm_settings(pools, gpu, tp), pools
    ledger = build_ledger(shape, gpu, tp, engine, method, tree)
    ledger.check_num_seqs(engine.num_seqs)
    ledger.check_fits()
    _check_workload(scenario, engine, tree)
    _check_alignment(engine, ledger.layout, tree)
    return engine, ledger


def _check_workload(scenario: Scenario, engine: EngineSettings, tree: DraftTree) -> None:
    """Every request must fit `max_model_len`, and one step when prompts are not cut into chunks."""
    _, longest_total = length_limits(scenario.workload)
    if longest_total > engine.max_model_len:
        raise UsageError(
            f"engine.max_model_len = {engine.max_model_len}: the longest request of the workload has {longest_total} "
            f"tokens (prompt and output); raise max_model_len to at least {longest_total} or use another workload"
        )
    if not engine.enable_chunked_prefill and longest_total > engine.max_num_batched_tokens:
        raise UsageError(
            f"engine.max_num_batched_tokens = {engine.max_num_batched_tokens}: without chunked prefill it must hold "
            f"the longest request, {longest_total} tokens, which may be recomputed in one step"
        )
    if engine.max_num_batched_tokens < tree.num_rows:
        raise InfeasibleError(
            f"engine.max_num_batched_tokens = {engine.max_num_batched_tokens} is below the {tree.num_rows} rows of "
            f"tree {scenario.speculation.tree}; it must be at least that"
        )


def _check_alignment(engine: EngineSettings, layout: PoolLayout, tree: DraftTree) -> None:
    """With prefix caching prompts are cut at block boundaries, so that a step must hold a block."""
    block = layout.block_size_tokens
    if not engine.enable_prefix_caching:
        return
    if not engine.enable_chunked_prefill:
        raise UsageError("engine.enable_prefix_caching needs enable_chunked_prefill: true")
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        tokens = getattr(engine, name)
        if 0 < tokens < block:
            raise InfeasibleError(
                f"engine.{name} = {tokens} is below the block of {block} tokens at which prefix caching cuts prompts; "
                f"raise it to at least {block}"
            )
    if tree.num_rows > block:
        raise InfeasibleError(f"prefix caching allows trees of up to {block} rows (one block), not {tree.num_rows}")
