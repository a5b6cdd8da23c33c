"""What `treewy ledger --engine sglang` adds: SGLang's options, and its ledger in the words of its log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from lab.cli.output import print_json, print_table
from lab.errors import UsageError

#: Options of SGLang alone; the last two are no settings of the engine.
SGLANG_OPTIONS = (
    "mem_fraction_static",
    "context_length",
    "max_running_requests",
    "max_total_tokens",
    "mamba_radix_cache_strategy",
    "mamba_full_memory_ratio",
    "max_mamba_cache_size",
    "mamba_ssm_dtype",
    "page_size",
    "disable_overlap_schedule",
    "linear_replayssm_cache_len",
    "speculative_num_draft_tokens",
    "request_tokens",
)
_SHARED = {"engine", "model", "gpu", "tensor_parallel_size", "kv_cache_dtype", "weight_dtype", "state_method", "tree"}


def sglang_option(name: str, text: str, flag: bool = False) -> Any:
    """An option of SGLang alone, without a default: what is not given is the engine's own."""
    return typer.Option(False if flag else None, name, help=text, rich_help_panel="SGLang")


def check_options(context: typer.Context, engine: str) -> None:
    """Raise `UsageError` for an unknown engine, and for an option that belongs to the other one."""
    from simulator.sglang.settings import VLLM_NAMES

    if engine not in ("vllm", "sglang"):
        raise UsageError(f"--engine is '{engine}'; allowed are vllm and sglang")
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        flag = "--" + name.replace("_", "-")
        if engine == "vllm" and name in SGLANG_OPTIONS:
            raise UsageError(
                f"{flag} is an option of SGLang; add --engine sglang, or see treewy ledger --help for vLLM's"
            )
        if engine == "sglang" and name not in _SHARED and name not in (*SGLANG_OPTIONS, "as_json"):
            instead = {**VLLM_NAMES, "speculative_config": "speculative_num_draft_tokens"}.get(name, "")
            named = f"; SGLang has --{instead.replace('_', '-')}" if instead.isidentifier() else ""
            raise UsageError(f"{flag} is an option of vLLM{named}")


def show_ledger(
    model: str, gpu: str | None, tp: int, state_method: str, tree: str | None, options: Mapping[str, Any], as_json: bool
) -> None:
    """Print SGLang's ledger; `options` are its settings by name, None for the default, and what `--help` lists."""
    from lab.methods import get_method
    from lab.shapes import load_shape
    from lab.trees import DraftTree, parse_tree
    from simulator.scenario import sglang_settings
    from simulator.sglang.ledger import build_sglang_ledger
    from simulator.sglang.memory import balanced_full_memory_ratio

    given = {name: value for name, value in options.items() if value is not None}
    rows, request_tokens = given.pop("speculative_num_draft_tokens", None), given.pop("request_tokens", None)
    if gpu is None:
        raise UsageError("the pools' sizes are unknown: name a --gpu (h200, b200 or h100)")
    if request_tokens is not None and not request_tokens >= 1:
        raise UsageError(f"--request-tokens is {request_tokens:g}; give the mean tokens of a request, at least 1")
    if given.get("kv_cache_dtype") == "fp8":
        given["kv_cache_dtype"] = "fp8_e4m3"
    settings = sglang_settings(**given)
    if tree is not None and rows is not None:
        raise UsageError("--tree and --speculative-num-draft-tokens both say what is drafted; give one of them")
    draft_tree = DraftTree.chain(_drafts(rows)) if tree is None else parse_tree(tree)
    ledger = build_sglang_ledger(load_shape(model), gpu, tp, settings, get_method(state_method), draft_tree)
    ratio = None if request_tokens is None else balanced_full_memory_ratio(ledger.layout, request_tokens)
    if as_json:
        print_json(ledger.to_json() | ({} if ratio is None else {"balanced_full_memory_ratio": ratio}))
    else:
        _print(ledger)
        if ratio is not None:
            typer.echo(
                f"Both pools fill together for requests of {request_tokens:g} tokens at --mamba-full-memory-ratio "
                f"{ratio:.2f} (drafts are no state slots: they count with what is kept per running request)"
            )


def _drafts(rows: int | None) -> int:
    """Drafts of a chain with so many rows."""
    from lab.trees import MAX_ROWS

    if rows is not None and not 2 <= rows <= MAX_ROWS:
        raise UsageError(
            f"--speculative-num-draft-tokens is {rows}; it counts the root: give 2 to {MAX_ROWS}, or leave it out"
        )
    return 0 if rows is None else rows - 1


def _print(ledger: Any) -> None:
    from lab.units import GIB, MIB

    law, pools = ledger.layout, ledger.pools
    lines = [(name.replace("_", " "), f"{size:,}", f"{size / GIB:.3f}") for name, size in ledger.lines.items()]
    total = sum(ledger.lines.values())
    lines.append(("total", f"{total:,}", f"{total / GIB:.3f}"))
    print_table("Memory of one GPU, the pools as they are laid out at start-up", ("line", "bytes", "GiB"), lines)
    typer.echo("")
    typer.echo(
        f"max_total_num_tokens={pools.max_total_num_tokens}, max_running_requests={pools.max_running_requests}, "
        f"max_mamba_cache_size={pools.max_mamba_cache_size}, context_len={ledger.context_length}"
    )
    overlap = "with" if ledger.overlap_schedule else "without"
    typer.echo(
        f"State slots per running request: {law.slots_reserved} reserved, {law.slots_held} held ({ledger.strategy}, "
        f"{overlap} overlap schedule), {law.slot_bytes / MIB:.2f} MiB each"
    )
    if law.running_bytes:
        typer.echo(
            f"Beside the slots: {law.running_bytes / MIB:.2f} MiB per running request, laid out for "
            f"{pools.buffered_requests} and one for padding"
        )
    typer.echo(f"Maximum concurrency for {ledger.context_length:,} tokens per request: {ledger.max_concurrency:.2f}x")
    for note in pools.notes:
        typer.echo(note)
