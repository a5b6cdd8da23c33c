"""`treewy ledger`: where the memory of a GPU goes, in the words of the engine's log."""

from __future__ import annotations

import json
from typing import Any

import typer

from lab.cli.output import JSON_OPTION, print_json, print_table
from lab.cli.sglang_ledger import SGLANG_OPTIONS, check_options, sglang_option, show_ledger


def command(
    context: typer.Context,
    model: str = typer.Option(..., "--model", help="A shipped model (any letter case) or the path of a config.json."),
    gpu: str = typer.Option(None, "--gpu", help="h200, b200 or h100. Not needed when the pool is given."),
    gpu_memory_utilization: float = typer.Option(0.92, "--gpu-memory-utilization", help="Share of memory, 0 to 1."),
    tensor_parallel_size: int = typer.Option(1, "--tensor-parallel-size", help="GPUs that share the model."),
    max_model_len: int = typer.Option(32768, "--max-model-len", help="Longest request, tokens."),
    max_num_seqs: int = typer.Option(
        None,
        "--max-num-seqs",
        help="Most running requests; records of a method are reserved for this many (256).",
    ),
    kv_cache_dtype: str = typer.Option("auto", "--kv-cache-dtype", help="auto (bf16), bfloat16 or fp8."),
    mamba_ssm_cache_dtype: str = typer.Option(
        "auto", "--mamba-ssm-cache-dtype", help="auto (the checkpoint's), float32 or bfloat16."
    ),
    weight_dtype: str = typer.Option("bf16", "--weight-dtype", help="bf16, fp8_tensor or fp8_block128."),
    num_gpu_blocks_override: int = typer.Option(
        None, "--num-gpu-blocks-override", help="Blocks that a real engine measured."
    ),
    kv_cache_memory_bytes: int = typer.Option(None, "--kv-cache-memory-bytes", help="Bytes of the pool, per GPU."),
    enable_prefix_caching: bool = typer.Option(
        False, "--enable-prefix-caching/--no-enable-prefix-caching", help="Mode align (on) or none (off)."
    ),
    speculative_config: str = typer.Option(
        None, "--speculative-config", help='JSON, e.g. {"method": "mtp", "num_speculative_tokens": 3}.'
    ),
    state_method: str = typer.Option("storeall", "--state-method", help="State method of the recurrent layers."),
    tree: str = typer.Option(None, "--tree", help="Draft tree (2,2,2); instead of --speculative-config."),
    as_json: bool = JSON_OPTION,
    engine: str = typer.Option("vllm", "--engine", help="vllm or sglang; each has options of its own."),
    mem_fraction_static: float = sglang_option("--mem-fraction-static", "Share for weights and pools (0.85)."),
    context_length: int = sglang_option("--context-length", "Longest request, tokens (32768)."),
    max_running_requests: int = sglang_option("--max-running-requests", "Most running requests (48 with drafts)."),
    max_total_tokens: int = sglang_option("--max-total-tokens", "Most tokens of the KV pool."),
    mamba_radix_cache_strategy: str = sglang_option(
        "--mamba-radix-cache-strategy", "auto, no_buffer, extra_buffer, extra_buffer_lazy; none: no radix cache."
    ),
    mamba_full_memory_ratio: float = sglang_option("--mamba-full-memory-ratio", "State pool to KV pool (0.9)."),
    max_mamba_cache_size: int = sglang_option("--max-mamba-cache-size", "State slots, in place of the ratio."),
    mamba_ssm_dtype: str = sglang_option("--mamba-ssm-dtype", "auto (the checkpoint's), float32 or bfloat16."),
    page_size: int = sglang_option("--page-size", "Tokens of a page of the KV pool (1)."),
    disable_overlap_schedule: bool = sglang_option("--disable-overlap-schedule", "Host and GPU in turn.", flag=True),
    linear_replayssm_cache_len: int = sglang_option("--linear-replayssm-cache-len", "Rows of ReplaySSM's ring (16)."),
    speculative_num_draft_tokens: int = sglang_option(
        "--speculative-num-draft-tokens", "Rows of a chain, the root included; for trees --tree."
    ),
    request_tokens: float = sglang_option(
        "--request-tokens", "Mean tokens of a request, prompt and output: prints the ratio that fills both pools."
    ),
) -> None:
    """Memory ledger of one GPU: named lines, pools, KV tokens, maximum concurrency, how many requests may run."""
    given = locals()
    check_options(context, engine)
    if engine == "sglang":
        options = {name: given[name] for name in (*SGLANG_OPTIONS, "weight_dtype", "kv_cache_dtype")}
        show_ledger(model, gpu, tensor_parallel_size, state_method, tree, options, as_json)
        return
    from lab.methods import get_method
    from lab.shapes import load_shape
    from lab.trees import DraftTree
    from simulator.ledger import build_ledger
    from simulator.scenario import engine_settings

    settings = engine_settings(
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=256 if max_num_seqs is None else max_num_seqs,
        kv_cache_dtype=kv_cache_dtype,
        mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        weight_dtype=weight_dtype,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enable_prefix_caching=enable_prefix_caching,
    )
    method = get_method(state_method)
    draft_tree = _tree(tree, speculative_config)
    if method.topology == "decode" and tree is None and speculative_config is None:
        draft_tree = DraftTree.chain(0)
    result = build_ledger(load_shape(model), gpu, tensor_parallel_size, settings, method, draft_tree)
    result.check_fits()
    if max_num_seqs is not None:
        result.check_num_seqs(max_num_seqs)
    if as_json:
        print_json(result.to_json())
    else:
        _print(result, settings.max_num_seqs)


def _tree(tree: str | None, speculative_config: str | None) -> Any:
    from lab.errors import UsageError
    from lab.trees import MAX_ROWS, DraftTree, parse_tree

    if tree is not None and speculative_config is not None:
        raise UsageError("--tree and --speculative-config both say what is drafted; give one of them")
    if tree is not None:
        return parse_tree(tree)
    if speculative_config is None:
        return DraftTree.chain(0)
    example = '{"method": "mtp", "num_speculative_tokens": 3}'
    try:
        config = json.loads(speculative_config)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--speculative-config is not JSON ({error}); an example is {example}") from error
    drafts = config.get("num_speculative_tokens") if isinstance(config, dict) else None
    if not isinstance(drafts, int) or isinstance(drafts, bool) or not 1 <= drafts < MAX_ROWS:
        raise UsageError(
            f"--speculative-config needs num_speculative_tokens from 1 to {MAX_ROWS - 1}; an example is {example}"
        )
    return DraftTree.chain(drafts)


def _print_running_scratch(ledger: Any, max_num_seqs: int) -> None:
    """What a proposed engine would log that reserves speculative blocks once per running request."""
    from simulator.memory import max_concurrency_running_scratch

    layout = ledger.layout
    drafts = layout.states_per_group - 1
    if ledger.num_gpu_blocks <= max_num_seqs * layout.linear_groups * drafts:
        return
    concurrency = max_concurrency_running_scratch(
        ledger.num_gpu_blocks, ledger.blocks_per_request, max_num_seqs, layout.linear_groups, drafts
    )
    typer.echo(
        f"With speculative blocks reserved once per running request (vLLM pull 57261, max_num_seqs {max_num_seqs}): "
        f"{int(concurrency * ledger.max_model_len):,} tokens, {float(concurrency):.2f}x"
    )


def _print(ledger: Any, max_num_seqs: int) -> None:
    from lab.units import GIB
    from simulator.memory import kv_cache_tokens_before_0_20

    layout = ledger.layout
    rows = [(name.replace("_", " "), f"{size:,}", f"{size / GIB:.3f}") for name, size in ledger.lines.items()]
    total = sum(ledger.lines.values())
    rows.append(("total", f"{total:,}", f"{total / GIB:.3f}"))
    print_table("Memory of one GPU, the pool full of requests of max_model_len", ("line", "bytes", "GiB"), rows)
    typer.echo("")
    typer.echo(f"Setting attention block size to {layout.block_size_tokens} tokens")
    typer.echo(f"Padding mamba page size by {layout.padding_fraction * 100:.2f}%")
    typer.echo(
        f"GPU blocks: {ledger.num_gpu_blocks:,} ({ledger.gpu_blocks_source}), {layout.bytes_per_block:,} bytes each"
    )
    typer.echo(
        f"Blocks per request of {ledger.max_model_len:,} tokens: {ledger.blocks_per_request} "
        f"({layout.state_blocks_per_request} of them state)"
    )
    typer.echo(f"GPU KV cache size: {ledger.kv_cache_tokens:,} tokens")
    typer.echo(f"Maximum concurrency for {ledger.max_model_len:,} tokens per request: {ledger.max_concurrency:.2f}x")
    groups = layout.attention_groups + layout.linear_groups
    older = kv_cache_tokens_before_0_20(ledger.num_gpu_blocks, groups, layout.block_size_tokens)
    typer.echo(f"GPU KV cache size as logged before vLLM 0.20: {older:,} tokens (blind to recurrent state)")
    if layout.states_per_group > 1:
        _print_running_scratch(ledger, max_num_seqs)
    typer.echo(f"Largest max_num_seqs that the engine starts with: {ledger.max_viable_num_seqs}")
