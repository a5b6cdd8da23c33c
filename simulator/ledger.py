"""The memory ledger: named lines that add up to a GPU's whole memory, and what the engine's log would say.

Weights, drafter and runtime come first; what is left is the block pool of `simulator.memory`. The pool's lines are
shown with the pool as full of requests of `max_model_len` as it gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lab.errors import InfeasibleError, UsageError
from lab.methods.base import StateMethod
from lab.profiles.system import load_system
from lab.shapes import ModelShape
from lab.trees import DraftTree
from lab.units import GIB, gib
from simulator.memory import PoolLayout, kv_cache_tokens, max_concurrency, pool_layout, requested_bytes
from simulator.settings import EngineSettings


class TooManySeqsError(InfeasibleError):
    """The engine refuses `max_num_seqs`; `viable` is the largest that it takes."""

    def __init__(self, viable: int, message: str) -> None:
        super().__init__(message)
        self.viable = viable


@dataclass(frozen=True, slots=True)
class Ledger:
    """Memory of one rank: `lines` (name → bytes) add up to the GPU's memory, to the byte.

    `gpu_blocks_source` is `estimated` (from the lines) or `override` (a measured block count was given). When no GPU
    was named, the lines hold the pool alone.
    """

    layout: PoolLayout
    num_gpu_blocks: int
    gpu_blocks_source: str
    max_model_len: int
    max_viable_num_seqs: int
    lines: dict[str, int]
    reserved_blocks: int = 0

    @property
    def speculative_blocks(self) -> int:
        """Blocks of speculative states that a running request takes from the pool in each recurrent group."""
        return 0 if self.reserved_blocks else self.layout.states_per_group - 1

    @property
    def state_blocks_per_request(self) -> int:
        """State blocks that a running request takes from the pool."""
        reserved = self.layout.states_per_group - 1 - self.speculative_blocks
        return self.layout.state_blocks_per_request - self.layout.linear_groups * reserved

    @property
    def blocks_per_request(self) -> int:
        """Blocks of one running request of `max_model_len` tokens."""
        return self.layout.attention_blocks(self.max_model_len) + self.state_blocks_per_request

    @property
    def max_concurrency(self) -> float:
        return float(max_concurrency(self.num_gpu_blocks - self.reserved_blocks, self.blocks_per_request))

    @property
    def kv_cache_tokens(self) -> int:
        blocks = self.num_gpu_blocks - self.reserved_blocks
        return kv_cache_tokens(blocks, self.blocks_per_request, self.max_model_len)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: block 0 is the null block, and speculative states may have theirs reserved."""
        return self.num_gpu_blocks - 1 - self.reserved_blocks

    def to_json(self) -> dict[str, Any]:
        """The fixed shape that other programs read (bytes, blocks, tokens)."""
        return {
            "block_size_tokens": self.layout.block_size_tokens,
            "bytes_per_block": self.layout.bytes_per_block,
            "num_gpu_blocks": self.num_gpu_blocks,
            "blocks_per_request": self.blocks_per_request,
            "kv_cache_tokens": self.kv_cache_tokens,
            "max_concurrency": self.max_concurrency,
            "max_viable_num_seqs": self.max_viable_num_seqs,
            "gpu_blocks_source": self.gpu_blocks_source,
            "lines": self.lines,
        }

    def check_fits(self) -> None:
        """Raise `InfeasibleError` unless one request of `max_model_len` fits beside the null block."""
        if self.blocks_per_request > self.usable_blocks:
            spare = self.usable_blocks - self.state_blocks_per_request
            tokens = spare // self.layout.attention_groups * self.layout.block_size_tokens
            remedy = (
                f"the largest max_model_len that fits is {tokens}"
                if tokens > 0
                else "no length fits: raise gpu_memory_utilization or tensor_parallel_size, or use a narrower tree"
            )
            raise InfeasibleError(
                f"max_model_len {self.max_model_len} needs {self.blocks_per_request} blocks per request but the pool "
                f"has {max(self.usable_blocks, 0)} usable; {remedy}"
            )

    def check_num_seqs(self, max_num_seqs: int) -> None:
        """Raise the engine's own refusal, with the number that works."""
        if self.reserved_blocks and self.blocks_per_request > self.usable_blocks:
            per_seq = self.reserved_blocks // max_num_seqs
            viable = max((self.num_gpu_blocks - 1 - self.blocks_per_request) // per_seq, 0)
            raise TooManySeqsError(
                viable,
                f"reserve_speculative_blocks sets {per_seq} blocks aside for each of {max_num_seqs} requests "
                f"(max_num_seqs), and the rest of {self.num_gpu_blocks} blocks is too few for one request of "
                f"max_model_len {self.max_model_len}; the largest viable max_num_seqs is {viable}",
            )
        if max_num_seqs > self.max_viable_num_seqs:
            raise TooManySeqsError(
                self.max_viable_num_seqs,
                f"max_num_seqs ({max_num_seqs}) exceeds available Mamba cache blocks ({self.num_gpu_blocks}); "
                f"the largest viable max_num_seqs is {self.max_viable_num_seqs}",
            )


def build_ledger(
    shape: ModelShape,
    gpu: str | None,
    tp: int,
    engine: EngineSettings,
    method: StateMethod,
    tree: DraftTree,
) -> Ledger:
    """Ledger of one rank.

    The pool's size comes, in this order, from `num_gpu_blocks_override`, from `kv_cache_memory_bytes`, or from the
    GPU's memory less everything else (then `gpu` must be named). Raises `UsageError` when nothing is left for the pool.
    """
    layout = pool_layout(
        shape,
        tp,
        engine.kv_dtype,
        engine.state_dtype(shape.mamba_ssm_dtype),
        method,
        tree,
        prefix_caching=engine.enable_prefix_caching,
    )
    before = {} if gpu is None else _lines_before_pool(shape, gpu, tp, engine, tree)
    total = 0 if gpu is None else load_system(gpu).memory_capacity_bytes
    scratch = engine.num_seqs * layout.scratch_bytes_per_request
    available = engine.kv_cache_memory_bytes
    if available is None and gpu is not None:
        available = total - sum(before.values())
    if engine.num_gpu_blocks_override is not None:
        blocks, source = engine.num_gpu_blocks_override, "override"
    elif available is None:
        raise UsageError(
            "the pool's size is unknown: name a gpu, or give num_gpu_blocks_override or kv_cache_memory_bytes"
        )
    else:
        blocks, source = max(available - scratch, 0) // layout.bytes_per_block, "estimated"
        if available < 2 * layout.bytes_per_block:
            raise InfeasibleError(_no_room(shape, gpu, tp, engine, available))
    viable = _viable_num_seqs(layout, engine.max_model_len, available) if source == "estimated" else blocks
    if scratch and blocks < layout.blocks_per_request(engine.max_model_len) and 1 <= viable < engine.num_seqs:
        raise TooManySeqsError(
            viable,
            f"max_num_seqs {engine.num_seqs} reserves {gib(scratch)} for the records of {method.name}, of "
            f"{gib(available or 0)} for all; the largest viable max_num_seqs is {viable}",
        )
    lines = before | _pool_lines(layout, blocks, engine.max_model_len) | {"method_scratch": scratch}
    slack = (total or available or sum(lines.values())) - sum(lines.values())
    if gpu is not None and (source == "override" or engine.kv_cache_memory_bytes is not None):
        lines["runtime_and_activations"] += slack  # the pool is given: the estimate of the rest gives way
        slack = 0
        if lines["runtime_and_activations"] < 0:
            raise UsageError(
                f"the given pool and {gib(before['weights'])} of weights need "
                f"{gib(-lines['runtime_and_activations'])} more than gpu_memory_utilization "
                f"{engine.gpu_memory_utilization} of {gpu} ({gib(total)}) allows; give fewer blocks or bytes"
            )
    lines["pool_remainder"] = slack
    reserved = layout.linear_groups * (layout.states_per_group - 1) * engine.num_seqs
    reserved = reserved if engine.reserve_speculative_blocks else 0
    return Ledger(layout, blocks, source, engine.max_model_len, viable, lines, reserved)


def _lines_before_pool(shape: ModelShape, gpu: str, tp: int, engine: EngineSettings, tree: DraftTree) -> dict[str, int]:
    system = load_system(gpu)
    total = system.memory_capacity_bytes
    return {
        "outside_gpu_memory_utilization": total - requested_bytes(total, engine.gpu_memory_utilization),
        "weights": shape.weight_bytes(engine.weight_dtype, tp),
        "drafter_weights": shape.drafting_weight_bytes(engine.weight_dtype, tp) if tree.num_drafts else 0,
        "runtime_and_activations": _runtime_bytes(engine, system.other_memory_bytes),
        "collectives": system.nccl_memory_bytes(tp) if tp > 1 else 0,
    }


def _runtime_bytes(engine: EngineSettings, estimate: int) -> int:
    return estimate if engine.runtime_and_activations_gib is None else round(engine.runtime_and_activations_gib * GIB)


def _pool_lines(layout: PoolLayout, blocks: int, max_model_len: int) -> dict[str, int]:
    """What the pool's blocks hold when it is as full of requests of `max_model_len` as it gets."""
    attention_blocks = layout.attention_blocks(max_model_len)
    requests = max(blocks - 1, 0) // layout.blocks_per_request(max_model_len)
    page, linear = layout.page_bytes_layer, layout.linear_layers
    attention = requests * attention_blocks // layout.attention_groups * page
    states = requests * linear
    lines = {
        "attention_kv": attention * (layout.attention_layers - layout.drafter_layers),
        "drafter_kv": attention * layout.drafter_layers,
        "recurrent_state": states * layout.state_bytes_layer,
        "speculative_states": states * (layout.states_per_group - 1) * layout.state_bytes_layer,
        "prefix_cache_states": states
        * (layout.state_blocks_per_group - layout.states_per_group)
        * layout.state_bytes_layer,
        "convolution_rows": states * layout.state_blocks_per_group * layout.conv_bytes_layer,
    }
    held = requests * layout.blocks_per_request(max_model_len) * layout.bytes_per_block
    lines["padding"] = held - sum(lines.values())
    lines["free_blocks"] = blocks * layout.bytes_per_block - held
    return lines


def _viable_num_seqs(layout: PoolLayout, max_model_len: int, available: int | None) -> int:
    """Most running requests whose records leave a block each, and room for one request of `max_model_len`."""
    available = available or 0
    viable = available // (layout.bytes_per_block + layout.scratch_bytes_per_request)
    if layout.scratch_bytes_per_request:
        rest = available - (layout.blocks_per_request(max_model_len) + 1) * layout.bytes_per_block
        viable = min(viable, rest // layout.scratch_bytes_per_request)
    return max(viable, 0)


def _no_room(shape: ModelShape, gpu: str | None, tp: int, engine: EngineSettings, available: int) -> str:
    if engine.kv_cache_memory_bytes is not None:
        return f"kv_cache_memory_bytes = {engine.kv_cache_memory_bytes} is less than two blocks of the pool; give more"
    where = f"on {gpu} at gpu_memory_utilization {engine.gpu_memory_utilization}"
    left = f"{gib(available)} is left" if available >= 0 else f"{gib(-available)} is missing"
    advice = "raise gpu_memory_utilization or tensor_parallel_size"
    if engine.weight_dtype == "bf16":
        advice += ", or use fp8 weights"
    return (
        f"{shape.name} ({engine.weight_dtype} weights) with tensor_parallel_size {tp} does not fit {where}: {left} for "
        f"the pool; {advice}"
    )
