"""Step costs: composed steps against published compositions, laws of the methods, marks of extrapolation."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from lab.data import data_path, read_csv
from lab.errors import UsageError
from lab.methods import get_method
from lab.profiles import load_tables
from lab.profiles.grids import Curve
from lab.shapes import load_shape
from lab.trees import DraftTree
from simulator.costtables import attention_us, prefill_us
from simulator.rowcost import RowPricer, gemms
from simulator.settings import EngineSettings
from simulator.statecost import GdnKernels
from simulator.stepcost import StepCost, build_step_cost, step_breakdown

ROOT = DraftTree.chain(0)
CHAIN = DraftTree.chain(3)
WIDE = DraftTree.from_widths((2, 2, 2))


def build(
    model: str = "Qwen3.5-35B-A3B",
    gpu: str = "h200",
    tp: int = 1,
    method: str = "recurrent",
    tree: DraftTree = ROOT,
    rows_committed: float = 1.0,
    **engine: object,
) -> StepCost:
    settings = EngineSettings(**engine)  # type: ignore[arg-type]
    return build_step_cost(load_shape(model), gpu, tp, settings, get_method(method), tree, rows_committed)


def step_ms(cost: StepCost, requests: int = 0, context: float = 0, **prefill: object) -> float:
    return sum(step_breakdown(cost, requests, context, **prefill).values()) / 1e3  # type: ignore[arg-type]


# Independent compositions of the same tables; decode steps at 2,048 tokens of context ---------------------


@pytest.mark.parametrize(
    ("batch", "state_ms", "attention_ms", "head_ms", "total_ms"),
    [
        (1, 0.06 + 0.14, 0.15, 0.26, 3.76),
        (32, 0.09 + 1.17, 0.46, 0.30, 12.41),
        (128, 0.19 + 4.11, 1.42, 0.29, 22.14),
        (256, 0.32 + 8.02, 2.84, 0.36, 28.87),
    ],
)
def test_decode_steps_of_the_35b_on_one_h200(
    batch: int, state_ms: float, attention_ms: float, head_ms: float, total_ms: float
) -> None:
    terms = step_breakdown(build(), batch, 2048)
    assert terms["state"] / 1e3 == pytest.approx(state_ms, abs=0.011)
    assert terms["attention"] / 1e3 == pytest.approx(attention_ms, abs=0.006)
    assert terms["head"] / 1e3 == pytest.approx(head_ms, abs=0.006)
    assert sum(terms.values()) / 1e3 == pytest.approx(total_ms, abs=0.01)


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "batch", "total_ms"),
    [
        ("Qwen3.5-397B-A17B", "h200", 8, 32, 15.70),
        ("Qwen3.5-27B", "h200", 1, 32, 19.86),
        ("Qwen3.5-35B-A3B", "b200", 1, 128, 13.74),
    ],
)
def test_decode_steps_of_other_models_and_gpus(model: str, gpu: str, tp: int, batch: int, total_ms: float) -> None:
    assert step_ms(build(model, gpu, tp), batch, 2048) == pytest.approx(total_ms, abs=0.01)


def test_balanced_routing_makes_a_decode_step_of_32_much_longer() -> None:
    shape, method = load_shape("Qwen3.5-35B-A3B"), get_method("recurrent")
    cost = build_step_cost(shape, "h200", 1, EngineSettings(), method, ROOT, 1.0, routing="balanced")
    assert step_ms(cost, 32, 2048) == pytest.approx(20.0, abs=0.06)


@pytest.mark.parametrize(("tokens", "total_ms"), [(342, 20.4), (2048, 40.7), (8192, 112.6)])
def test_prompts_of_the_35b_on_one_h200(tokens: int, total_ms: float) -> None:
    """The reference leaves out gated norm, rotary embedding and output gate of prompts; we charge them.

    It prices the rows there are, not those of the next CUDA graph.
    """
    tables = load_tables("h200")
    bf16 = 2 * tokens
    gated_norm, gate = tables.elementwise(bf16 * 3 * 32 * 128), tables.elementwise(bf16 * 3 * 16 * 256)
    rotary = tables.elementwise(bf16 * 2 * (16 + 2) * 256)
    extra_ms = (30 * gated_norm + 10 * gate + 10 * rotary) / 1e3
    assert step_ms(build(cudagraph_capture_sizes=()), prefill=[(0, tokens)]) - extra_ms == pytest.approx(
        total_ms, rel=0.003
    )
    assert extra_ms < 0.03 * total_ms


def test_matrix_shapes_agree_with_the_shipped_list() -> None:
    names = {"Qwen3-Next-80B-A3B": "Qwen3-Next-80B-A3B-Instruct"}
    with data_path("ops", "model_gemm_shapes.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = load_shape(names.get(row["model"], row["model"]))
            (found,) = [gemm for gemm in gemms(shape, int(row["tp"])) if gemm.op == row["op"]]
            assert (found.n, found.k) == (int(row["n"]), int(row["k"])), row
            assert found.quantised == (row["assumed_precision_in_fp8_checkpoint"] == "quantised"), row


# Every shape that the tables are meant for ---------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["h200", "b200", "h100"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "model",
    [
        "Qwen3.5-35B-A3B",
        "Qwen3.5-122B-A10B",
        "Qwen3.5-397B-A17B",
        "Qwen3.5-27B",
        "Qwen3-Next-80B-A3B-Instruct",
    ],
)
def test_tables_are_finite_positive_contiguous_float64(model: str, tp: int, gpu: str) -> None:
    experts_missing = tp == 8 and gpu == "b200" and model in ("Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B-Instruct")
    if experts_missing:
        with pytest.raises(UsageError, match="over 8 ranks"):
            build(model, gpu, tp)
        return
    cost = build(model, gpu, tp, "treelog", WIDE, 2.5, max_num_batched_tokens=2048, max_num_seqs=64)
    for name, array in cost.tables._asdict().items():
        assert array.dtype == np.float64
        assert array.flags.c_contiguous, name
        assert np.isfinite(array).all(), name
        assert (array >= 0).all(), name
    assert len(cost.tables.rows_us) == 2049
    assert len(cost.tables.head_us) == 64 * 15 + 1
    assert len(cost.tables.state_us) == len(cost.tables.draft_us) == 65
    assert len(cost.tables.prefill_state_us) == 2049
    assert set(cost.sources) == {
        "rows", "head", "state", "attention", "prefill_attention", "prefill_state", "draft"
    }  # fmt: skip


def test_building_twice_gives_the_same_arrays_and_no_shared_memory() -> None:
    first, second = build(method="treewy", tree=WIDE), build(method="treewy", tree=WIDE)
    for a, b in zip(first.tables, second.tables, strict=True):
        assert a.tobytes() == b.tobytes()
        assert not np.shares_memory(a, b)


def test_an_empty_step_costs_nothing() -> None:
    assert step_ms(build(method="storeall", tree=CHAIN)) == 0


def test_the_row_tables_reach_every_row_of_a_full_decode_batch() -> None:
    cost = build(method="storeall", tree=WIDE, max_num_batched_tokens=512, max_num_seqs=64)
    assert len(cost.tables.rows_us) == 64 * 15 + 1


# States --------------------------------------------------------------------------------------------------


def recurrence_us(cost: StepCost, requests: int) -> float:
    """State time without the convolution."""
    conv = load_tables("h200").gdn("conv_update", 16, 32, requests * cost.num_rows).latency_us
    whole = load_tables("h200").gdn("conv_prefill", 16, 32, requests, cost.num_rows).latency_us
    return float(cost.tables.state_us[requests] - 30 * (conv if cost.num_rows == 1 else min(conv, whole)))


def test_plain_decoding_takes_the_measured_recurrence() -> None:
    cost = build()
    assert recurrence_us(cost, 256) == pytest.approx(30 * 267.4)
    assert cost.sources["state"].startswith("measured")


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_chain_that_stores_all_states_costs_half_of_one_plus_its_rows(drafts: int) -> None:
    rows = drafts + 1
    cost = build(method="storeall", tree=DraftTree.chain(drafts), max_num_seqs=256)
    ratio = recurrence_us(cost, 256) / recurrence_us(build(), 256)
    assert ratio == pytest.approx((1 + rows) / 2, rel=0.03)
    assert cost.sources["state"].startswith("modelled")


@pytest.mark.parametrize(("gpu", "smallest_batch"), [("h200", 32), ("b200", 64), ("h100", 32)])
def test_bytes_on_the_decode_curve_predict_measured_chain_verification(gpu: str, smallest_batch: int) -> None:
    """kda_verify.csv: a sibling rule with a gate per key channel, the only verification measured."""
    frame = read_csv("ops", f"{gpu}_sxm", "kda_verify.csv")
    vllm = [row for row in frame.iter_rows(named=True) if row["engine"].startswith("vllm")]
    for heads in {row["value_heads"] for row in vllm}:
        state, operands = heads * 128 * 128 * 4, heads * (4 * 128 * 2 + 128 * 4 + 4)
        decode = sorted(
            (row["batch"], row["latency_us"])
            for row in vllm
            if row["value_heads"] == heads and row["kernel"] == "fused_recurrent_kda_packed_decode"
        )
        batches, times = np.array(decode, dtype=np.float64).T
        curve = Curve(batches * (2 * state + operands), times)
        for row in vllm:
            if row["value_heads"] == heads and row["phase"] == "verify" and row["batch"] >= smallest_batch:
                rows = row["tokens_per_request"]
                moved = row["batch"] * ((1 + rows) * state + rows * operands)
                assert curve.at(moved).latency_us == pytest.approx(row["latency_us"], rel=0.09)


def test_bf16_states_halve_the_recurrence_at_large_batch() -> None:
    full, half = build(), build(mamba_ssm_cache_dtype="bfloat16")
    assert recurrence_us(half, 256) / recurrence_us(full, 256) == pytest.approx(0.5, abs=0.02)
    assert half.sources["state"].startswith("modelled")


def test_logs_beat_writing_the_state_every_step_and_both_beat_storing_all_states() -> None:
    storeall, treewy, treelog = (
        build(method=name, tree=WIDE, rows_committed=3.4).tables.state_us[64]
        for name in ("storeall", "treewy", "treelog")
    )
    assert treelog < 0.8 * treewy < 0.2 * storeall
    assert build(method="deltalog").tables.state_us[256] < 0.75 * build().tables.state_us[256]


def test_state_time_grows_with_requests() -> None:
    for method, tree in (("recurrent", ROOT), ("storeall", WIDE), ("bole", WIDE), ("treelog", CHAIN)):
        assert (np.diff(build(method=method, tree=tree).tables.state_us) > 0).all()


def test_unmeasured_heads_are_scaled_from_the_nearest_and_named() -> None:
    shape, tables = load_shape("Qwen3.5-27B"), load_tables("h200")
    near = GdnKernels.of(shape, tables, 16)
    assert not near.exact
    assert (near.key_heads, near.value_heads) == (2, 4)
    assert near.state_ratio == 3 / 4


# Attention and prompts -----------------------------------------------------------------------------------


def test_attention_grows_with_requests_and_context() -> None:
    for tree, method in ((ROOT, "recurrent"), (WIDE, "treelog")):
        tables = build(method=method, tree=tree).tables
        requests = [attention_us(tables, n, 4096)[0] for n in (16, 64, 256, 1024, 4096)]
        contexts = [attention_us(tables, 64, c)[0] for c in (256, 1000, 4096, 30000, 300000)]
        assert requests == sorted(requests)
        assert contexts == sorted(contexts)


def test_attention_matches_the_table_between_points() -> None:
    tables = build().tables
    expected = load_tables("h200").attention_decode(16, 2, 256, "bf16", 47, 1235).latency_us
    assert attention_us(tables, 47, 1234.0)[0] == pytest.approx(10 * expected)


def test_attention_of_a_tree_reads_the_cache_once() -> None:
    plain, tree = build().tables, build(method="treelog", tree=WIDE).tables
    layers = (10 + 3) / 10  # three drafting passes add one layer's attention each
    assert attention_us(tree, 64, 8192)[0] == pytest.approx(layers * attention_us(plain, 64, 8206)[0], rel=0.01)


def test_drafting_attention_grows_with_the_context() -> None:
    plain = build().tables
    chain = build(method="treelog", tree=DraftTree.chain(3)).tables
    for context in (1000, 8000, 30000):
        added = attention_us(chain, 16, context)[0] - attention_us(plain, 16, context)[0]
        assert added == pytest.approx(3 / 10 * attention_us(plain, 16, context)[0], rel=0.05)


def test_attention_of_a_tree_over_no_context_is_a_prompt_of_its_rows() -> None:
    chain = DraftTree.chain(63)
    tables = build(method="treelog", tree=chain, max_num_seqs=128).tables
    prompt = load_tables("h200").attention_prefill(16, 2, 256, "bf16", 128, 64).latency_us
    draft = load_tables("h200").attention_decode(16, 2, 256, "bf16", 128, 1).latency_us
    assert attention_us(tables, 128, 0)[0] == pytest.approx(10 * prompt + 63 * draft)


def test_attention_marks_what_was_not_measured() -> None:
    tables = build().tables
    assert not attention_us(tables, 128, 2047)[1]
    assert attention_us(tables, 256, 2047)[1]
    assert attention_us(tables, 1, 100000)[1]
    assert attention_us(tables, 0, 0) == (0, False)


def test_chunks_of_a_prompt_cost_the_attention_of_the_whole() -> None:
    tables = build().tables
    whole = prefill_us(tables, 0, 8192)[0]
    last = prefill_us(tables, 6144, 2048)[0]
    assert last == pytest.approx(whole * (1 - 0.75**2))
    assert prefill_us(tables, 100, 0) == (0, 0, False)


def test_prompts_beyond_the_measured_length_are_marked() -> None:
    tables = build(max_model_len=32768).tables
    assert not prefill_us(tables, 8192, 8192)[2]
    attention, _, extrapolated = prefill_us(tables, 24576, 8192)
    assert extrapolated
    assert attention == pytest.approx(10 * 2850 * 4 * (1 - 0.75**2))


@pytest.mark.parametrize(("gpu", "ratio"), [("b200", 0.55), ("h200", 1.38)])
def test_an_8_bit_cache_takes_its_own_rows_which_are_slow_on_hopper(gpu: str, ratio: float) -> None:
    """attention_decode.csv.gz, 16/2 heads, batch 64, 8,192 tokens: H200 261.3 us in bf16, 359.5 us in fp8."""
    cost = build(gpu=gpu, kv_cache_dtype="fp8")
    plain = attention_us(build(gpu=gpu).tables, 64, 8191)[0]
    assert attention_us(cost.tables, 64, 8191)[0] / plain == pytest.approx(ratio, abs=0.01)
    assert ("slower" in cost.sources["attention"]) == (gpu == "h200")


# Drafting and weights ------------------------------------------------------------------------------------


def test_drafting_costs_one_pass_per_depth() -> None:
    one, three = (build(method="storeall", tree=DraftTree.chain(drafts)).tables.draft_us[64] for drafts in (1, 3))
    assert three == pytest.approx(3 * one)
    assert not build().tables.draft_us.any()


def test_the_last_depth_of_a_tree_is_not_run() -> None:
    narrow = build(method="storeall", tree=DraftTree.from_widths((2, 1))).tables.draft_us[64]
    wide = build(method="storeall", tree=DraftTree.from_widths((2, 4))).tables.draft_us[64]
    assert wide == narrow


def test_a_model_without_a_drafting_layer_is_charged_one_of_its_own() -> None:
    cost = build("Qwen3-Next-80B-A3B-Instruct", method="treelog", tree=CHAIN, max_num_seqs=32)
    assert cost.tables.draft_us[1:].all()
    assert "names no drafting layer" in cost.sources["draft"]
    assert cost.sources["rows"].startswith("modelled: experts estimated from 2048/512/8/256")


def test_block_fp8_weights_shorten_a_step() -> None:
    assert step_ms(build(weight_dtype="fp8_block128"), 32, 2048) < 0.8 * step_ms(build(), 32, 2048)


def test_the_shared_expert_hides_behind_the_routed_ones_up_to_256_rows() -> None:
    shape, tables = load_shape("Qwen3.5-35B-A3B"), load_tables("h200")
    below, above = RowPricer(shape, tables, 1, "bf16", "power_law_1.2", np.array([256.0, 257.0])).mlp()
    products = ((1, 2048), (1024, 2048), (2048, 512))
    shared = sum(float(tables.gemm("bf16", n, k, 257).latency_us) for n, k in products)
    assert above - below > shared


# Refusals and limits -------------------------------------------------------------------------------------


def test_limits_say_how_far_the_measured_points_reach() -> None:
    limits = build(max_num_batched_tokens=32768, max_num_seqs=2048).tables.limits
    assert limits.tolist() == [16384, 16384, 1024, 32768, 2048, 2048]
    drafting = build(method="treelog", tree=DraftTree.chain(3), max_num_seqs=2048).tables.limits
    assert drafting[5] == 2048


def test_prompts_of_one_step_are_launched_together() -> None:
    cost, tables = build(), load_tables("h200")
    prompts = [(0, 512)] * 16
    terms = step_breakdown(cost, prefill=prompts)
    assert terms["prefill_attention"] == pytest.approx(
        10 * float(tables.attention_prefill(16, 2, 256, "bf16", 16, 512).latency_us)
    )
    state = sum(float(tables.gdn(op, 16, 32, 16, 512).latency_us) for op in ("conv_prefill", "chunk_prefill"))
    assert terms["prefill_state"] == pytest.approx(30 * state)
    alone = step_breakdown(cost, prefill=prompts[:1])
    assert terms["prefill_state"] < 0.5 * 16 * alone["prefill_state"]


def test_one_prompt_costs_what_the_table_says_and_unequal_ones_no_more_than_alone() -> None:
    cost = build()
    alone = [step_breakdown(cost, prefill=[prompt])["prefill_attention"] for prompt in ((0, 4000), (1000, 300))]
    together = step_breakdown(cost, prefill=[(0, 4000), (1000, 300)])["prefill_attention"]
    assert max(alone) < together <= sum(alone)


@pytest.mark.parametrize(
    ("model", "tp", "named"),
    [
        ("Olmo-Hybrid-7B", 1, "widths 96/192"),
        ("Kimi-Linear-48B-A3B", 2, "a gate per key channel"),
        ("Qwen3.5-9B", 1, "n is measured at"),
    ],
)
def test_uncovered_models_are_refused_by_name_size_and_shape(model: str, tp: int, named: str) -> None:
    with pytest.raises(UsageError, match=f"model {model} at tensor_parallel_size {tp} is not covered .*{named}"):
        build(model, tp=tp)


def test_methods_refuse_trees_they_cannot_verify() -> None:
    with pytest.raises(UsageError, match="replayssm"):
        build(method="replayssm", tree=WIDE)


def test_a_step_larger_than_the_tables_is_refused() -> None:
    with pytest.raises(UsageError, match="decode_requests = 300; the tables hold at most 256"):
        step_breakdown(build(), 300, 10)
