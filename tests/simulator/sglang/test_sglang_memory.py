"""SGLang's two pools: the formulas of its configurator, worked examples, a start-up log, and the ledger that closes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InfeasibleError, UsageError
from lab.methods import METHODS, get_method
from lab.profiles.system import load_system
from lab.shapes import load_shape
from lab.trees import DraftTree, parse_tree
from lab.units import GIB, MIB
from simulator.scenario import sglang_settings
from simulator.sglang.ledger import SglangLedger, build_sglang_ledger
from simulator.sglang.memory import RequestLaw, balanced_full_memory_ratio, request_law, solve_pools, state_slots
from simulator.sglang.settings import SglangSettings

LOGS = Path(__file__).parents[2] / "golden" / "kv_cache_logs.csv"


def law(model: str = "Qwen3.5-35B-A3B", method: str = "storeall", tree: str = "1,1,1", **settings: Any) -> RequestLaw:
    return request_law(load_shape(model), 1, sglang_settings(**settings), get_method(method), parse_tree(tree))


def ledger(
    model: str = "Qwen3.5-35B-A3B",
    method: str = "storeall",
    tree: str = "1,1,1",
    tp: int = 1,
    gpu: str = "h200",
    **settings: Any,
) -> SglangLedger:
    return build_sglang_ledger(
        load_shape(model), gpu, tp, sglang_settings(**settings), get_method(method), parse_tree(tree)
    )


@pytest.mark.parametrize(
    ("strategy", "overlap", "slots"),
    [
        ("none", True, 1),
        ("no_buffer", False, 3),
        ("extra_buffer", True, 5),
        ("extra_buffer", False, 4),
        ("extra_buffer_lazy", True, 4),
    ],
)
def test_slots_that_a_running_request_reserves(strategy: str, overlap: bool, slots: int) -> None:
    assert state_slots(strategy, overlap) == slots


def test_auto_is_extra_buffer_and_no_buffer_for_replayssm_which_turns_the_overlap_off() -> None:
    settings = SglangSettings()
    assert settings.radix_strategy("storeall") == "extra_buffer"
    assert settings.radix_strategy("replayssm") == "no_buffer"
    assert settings.overlap_schedule("storeall")
    assert not settings.overlap_schedule("replayssm")


def test_worked_example_of_the_intermediate_buffer() -> None:
    # 35B, fp32, 15 rows, 64 running requests and one for padding: 60 MiB * 15 * 65 = 57 GiB of states
    wide = law(tree="2,2,2")
    assert wide.row_state_bytes == 60 * MIB * 15
    assert wide.row_state_bytes * 65 / GIB == pytest.approx(57, abs=0.2)
    assert law(tree="2,2,2", mamba_ssm_dtype="bfloat16").row_state_bytes == 30 * MIB * 15


@pytest.mark.parametrize(
    ("model", "mib"), [("Qwen3.5-35B-A3B", 11.3), ("Qwen3.5-397B-A17B", 28.3)]
)  # rings of 16 rows, all layers
def test_worked_examples_of_the_ring(model: str, mib: float) -> None:
    assert law(model, "replayssm").scratch_bytes / MIB == pytest.approx(mib, abs=0.05)


LAWS = st.sampled_from(["1,1,1", "2,2,2"])


@given(st.integers(8, 400), st.floats(0.05, 9), LAWS, st.sampled_from(["none", "no_buffer", "extra_buffer"]))
def test_storeall_slots_are_those_of_the_formula(gib: int, ratio: float, tree: str, strategy: str) -> None:
    """K = (budget - per_req (1 + D)) // (per_req (1 + D / S)), and K + 1 slots with their buffers fit the budget."""
    settings = sglang_settings(
        mamba_full_memory_ratio=ratio, mamba_radix_cache_strategy=strategy, max_running_requests=None
    )
    shape, method = load_shape("Qwen3.5-35B-A3B"), get_method("storeall")
    found = request_law(shape, 1, settings, method, parse_tree(tree))
    rest = gib * GIB
    try:
        pools = solve_pools(found, rest, settings)
    except InfeasibleError:
        return
    slot, rows, reserved = found.slot_bytes, found.rows, found.slots_reserved
    assert found.running_bytes == rows * slot
    if strategy == "none":  # one slot for each of the 48 requests
        assert pools.max_mamba_cache_size == 48
        return
    budget = rest * ratio / (1 + ratio)
    expected = (budget - slot * (1 + rows)) / (slot * (1 + rows / reserved))
    assert pools.max_mamba_cache_size == pytest.approx(expected, abs=1.001)
    running = min(48, pools.max_mamba_cache_size // reserved)
    used = (pools.max_mamba_cache_size + 1) * slot + (running + 1) * rows * slot
    assert used <= budget + 1
    kv_bytes = rest - used
    assert pools.max_total_num_tokens == kv_bytes // found.kv_token_bytes
    assert pools.max_running_requests == min(running, pools.max_total_num_tokens // 2)


def test_replayssm_slots_are_those_of_the_formula() -> None:
    """fixed = ring (max_running + 1); K = (budget - fixed - per_req) // per_req."""
    settings = sglang_settings(max_running_requests=64)
    found = law(method="replayssm", max_running_requests=64)
    rest = 50 * GIB
    pools = solve_pools(found, rest, settings)
    fixed, budget = found.scratch_bytes * 65, rest * 9 // 19
    assert pools.max_mamba_cache_size == (budget - fixed - found.slot_bytes) // found.slot_bytes
    kv_bytes = rest - fixed - (pools.max_mamba_cache_size + 1) * found.slot_bytes
    assert pools.max_total_num_tokens == kv_bytes // found.kv_token_bytes


def test_without_speculation_the_slots_are_those_of_the_formula() -> None:
    """K = (budget - per_req) // per_req."""
    pools = solve_pools(law(method="recurrent", tree="chain:0"), 50 * GIB, SglangSettings())
    slot = law(method="recurrent", tree="chain:0").slot_bytes
    assert pools.max_mamba_cache_size == (50 * GIB * 9 // 19 - slot) // slot


def test_given_slots_still_pay_for_the_buffers_of_the_requests_that_they_let_run() -> None:
    settings = sglang_settings(max_mamba_cache_size=100, max_running_requests=64)
    found = law(tree="2,2,2", max_mamba_cache_size=100)
    pools = solve_pools(found, 60 * GIB, settings)
    kv_bytes = 60 * GIB - 101 * found.slot_bytes - 21 * found.running_bytes
    assert pools.max_total_num_tokens == kv_bytes // found.kv_token_bytes


def test_start_up_log_of_a_capped_engine() -> None:
    """k009: GLM-5.3-Flash with DFlash, 10 slots of which a request reserves 5; 40 slots fixed it."""
    with LOGS.open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["id"] == "k009")
    assert "max_running_requests capped to 2: max_mamba_cache_size 10, 5 state slots per request" in row["notes"]
    asked = int(row["max_num_seqs"])

    def running(slots: int) -> tuple[int, tuple[str, ...]]:
        settings = sglang_settings(max_mamba_cache_size=slots, max_running_requests=asked)
        pools = solve_pools(law(), 60 * GIB, settings)
        return pools.max_running_requests, pools.notes

    limit, (note,) = running(10)
    assert limit == 2
    assert note.startswith(
        "max_running_requests is capped to 2 by the mamba state cache (max_mamba_cache_size=10, 5 state slots per "
        "request); raise max_mamba_cache_size (10)"
    )
    assert running(40) == (8, ())


def test_defaults_of_the_running_requests() -> None:
    # 48 with drafts; else tokens / context_len * 512 between 2,048 and 4,096, never above half the tokens
    def running(tokens: int | None = None, context: int = 32768, **changes: Any) -> int:
        settings = sglang_settings(
            max_total_tokens=tokens, context_length=context, max_mamba_cache_size=100_000,
            mamba_radix_cache_strategy="none",
        )  # fmt: skip
        return solve_pools(
            law(**changes, mamba_radix_cache_strategy="none"), 10_000 * GIB, settings
        ).max_running_requests

    plain = {"method": "recurrent", "tree": "chain:0"}
    assert running() == 48
    assert running(10_000, **plain) == 2048
    assert running(10_000, context=2000, **plain) == 2560
    assert running(**plain) == 4096
    assert running(3000, **plain) == 1500


def test_a_request_that_may_run_less_for_want_of_tokens_is_told() -> None:
    settings = sglang_settings(max_total_tokens=100, max_running_requests=64, max_mamba_cache_size=1000)
    pools = solve_pools(law(), 200 * GIB, settings)
    assert pools.max_running_requests == 50
    assert "reduced from 64 to 50 by the KV cache of 100 tokens" in pools.notes[0]
    assert not pools.by_state_cache


def test_the_balanced_ratio_fills_both_pools_together() -> None:
    tokens = 9024
    found = law("Qwen3.5-27B", "storeall", mamba_ssm_dtype="bfloat16")
    ratio = balanced_full_memory_ratio(found, tokens)
    settings = sglang_settings(mamba_full_memory_ratio=ratio, mamba_ssm_dtype="bfloat16", max_running_requests=4000)
    pools = solve_pools(found, 400 * GIB, settings)
    assert pools.max_mamba_cache_size / found.slots_reserved == pytest.approx(
        pools.max_total_num_tokens / tokens, rel=0.02
    )


def test_the_guide_that_counts_drafts_as_slots_asks_for_twice_the_ratio() -> None:
    """sgl-project/sglang pull 35064: 27B with ReplaySSM, S = D = 4: 2.08 where 1.04 is right."""
    found = law("Qwen3.5-27B", "replayssm", mamba_radix_cache_strategy="extra_buffer_lazy")
    by_slots = found.slots_reserved * found.slot_bytes / (9024 * found.token_bytes)
    assert round(by_slots, 2) == 1.04
    assert round(by_slots * (4 + 4) / 4, 2) == 2.08
    ours = balanced_full_memory_ratio(found, 9024)  # with the ring, and the drafter's KV
    assert ours == pytest.approx(by_slots, rel=0.03)


@pytest.mark.parametrize("gpu", ["h200", "b200", "h100"])
@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("tp", [2, 4])
def test_inv_7_lines_add_up_to_the_whole_memory(gpu: str, method: str, tp: int) -> None:
    tree = "chain:0" if METHODS[method].topology == "decode" else "1,1,1"
    for settings in ({}, {"max_mamba_cache_size": 60}, {"max_total_tokens": 5000}, {"page_size": 64}):
        result = ledger(method=method, tree=tree, tp=tp, gpu=gpu, max_running_requests=32, **settings)
        assert sum(result.lines.values()) == load_system(gpu).memory_capacity_bytes
        assert min(result.lines.values()) >= 0
        assert result.num_gpu_blocks * result.layout.bytes_per_block == (
            result.lines["attention_kv"] + result.lines["drafter_kv"]
        )


def test_every_method_pays_for_what_it_keeps_per_running_request() -> None:
    shape = load_shape("Qwen3.5-35B-A3B")
    raw_conv = 15 * 30 * shape.conv_row_bytes_layer(1)
    treelog = law(method="treelog", tree="2,2,2")
    assert treelog.scratch_bytes == 30 * (16 + 15) * 20_608
    assert treelog.row_conv_bytes == raw_conv
    assert law(method="treewy", tree="2,2,2").scratch_bytes == 30 * 15 * 32_896
    plain = law(method="recurrent", tree="chain:0")
    assert (plain.running_bytes, plain.drafter_token_bytes) == (0, 0)
    lines = ledger(method="treelog", tree="2,2,2", max_running_requests=32).lines
    assert lines["method_scratch"] == 32 * treelog.scratch_bytes
    assert lines["speculative_states"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mem_fraction_static": 0.99}, "lower it to at most 0.975, or set runtime_and_activations_gib"),
        ({"mem_fraction_static": 0.3}, "does not fit on h200 .* raise mem_fraction_static or tensor_parallel_size"),
        ({"mem_fraction_static": 0.5, "tree": "3,3,3"}, "Not enough GPU memory .* use a narrower tree"),
        (
            {"mem_fraction_static": 0.5, "method": "replayssm", "max_running_requests": 4000},
            "Not enough GPU memory .* lower max_running_requests",
        ),
        ({"max_mamba_cache_size": 4}, r"too small to serve any .* raise max_mamba_cache_size \(4\) to at least 5"),
        ({"max_total_tokens": 1}, "raise max_total_tokens to at least 2"),
        ({"max_total_tokens": 60, "page_size": 64}, "raise max_total_tokens to at least 64"),
        ({"async_scheduling": True}, "is vLLM's name; the engine sglang has disable_overlap_schedule"),
        ({"watermark": 0.1}, "is vLLM's name; the engine sglang has schedule_conservativeness"),
        ({"scheduling_policy": "priority"}, "is vLLM's name; the engine sglang has arrival order alone; leave it out"),
        ({"block_size": 16}, "is vLLM's name; the engine sglang has page_size"),
        ({"max_mamba_cache_size": 10_000}, "no memory is left for the KV cache"),
        ({"gpu_memory_utilization": 0.9}, "is vLLM's name; the engine sglang has mem_fraction_static"),
        ({"chunked_prefill_size": 100, "page_size": 64}, "must be a multiple of page_size 64"),
        ({"chunked_prefill_size": 0}, "or -1 to compute prompts whole"),
        ({"tree": "2,2", "method": "replayssm"}, "verifies chains only"),
        ({"tp": 3}, "tensor_parallel_size 3 does not divide"),
    ],
)
def test_impossible_requests_are_one_clear_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ledger(**settings)


def test_a_request_that_can_never_be_admitted_is_refused_with_what_to_change() -> None:
    small = ledger(max_total_tokens=2000, context_length=4096)
    small.check_request(1000, 1990)
    with pytest.raises(InfeasibleError, match=r"2100 tokens with .* raise max_total_tokens to at least 2104"):
        small.check_request(1000, 2100)
    ledger(max_total_tokens=2104, context_length=4096).check_request(1000, 2100)
    with pytest.raises(InfeasibleError, match="raise context_length to at least 5000"):
        small.check_request(1000, 5000)


def test_a_chain_without_drafts_is_no_speculation() -> None:
    tree = DraftTree.chain(0)
    found = request_law(load_shape("Qwen3.5-35B-A3B"), 1, SglangSettings(), get_method("storeall"), tree)
    assert found.running_bytes == 0
