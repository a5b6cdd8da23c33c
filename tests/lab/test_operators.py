"""Operator tables: values at measured points, the rules between and beyond them, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from lab.errors import UsageError
from lab.profiles import GPU_NAMES, UncoveredShapeError, load_system, load_tables
from lab.profiles.grids import Curve, Grid

H200 = load_tables("h200")
EXPERTS_35B = (2048, 512, 8, 256)


def test_importing_profiles_loads_neither_polars_nor_numba() -> None:
    code = "import sys, lab.profiles; print([m for m in ('polars', 'numba', 'scipy') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


# Curves and grids ----------------------------------------------------------------------------------------


def test_a_curve_is_linear_between_points_and_holds_the_last_rate() -> None:
    found = Curve(np.array([1.0, 3.0]), np.array([10.0, 20.0])).at([0, 1, 2, 3, 6])
    assert found.latency_us.tolist() == [10, 10, 15, 20, 40]
    assert found.extrapolated.tolist() == [True, False, False, False, True]


def test_despiking_takes_the_smallest_value_at_any_larger_point() -> None:
    curve = Curve(np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0, 43.0, 25.0, 26.0])).despiked()
    assert curve.latency_us.tolist() == [5, 25, 25, 26]


def test_a_grid_fills_a_missing_corner_at_the_rate_of_the_largest_batch_that_reaches_the_length() -> None:
    grid = Grid.from_points([1, 1, 2, 2, 4], [8, 16, 8, 16, 8], [1.0, 2.0, 2.0, 3.0, 4.0])
    found = grid.at([4, 4, 3, 2, 8], [16, 8, 8, 16, 8])
    assert found.latency_us.tolist() == [6, 4, 3, 3, 8]
    assert found.extrapolated.tolist() == [True, False, False, False, True]


def test_a_square_grid_interpolates_the_square_root_and_grows_with_the_square() -> None:
    grid = Grid.from_points([1, 1, 2, 2], [10, 20, 10, 20], [4.0, 16.0, 8.0, 32.0], power=2)
    assert grid.at(1, [15, 40]).latency_us.tolist() == [9, 64]


# Measured points -----------------------------------------------------------------------------------------


def test_measured_points_come_back_unchanged() -> None:
    assert H200.gdn("recurrent_decode", 16, 32, 256).latency_us == pytest.approx(267.4)
    assert H200.attention_decode(16, 2, 256, "bf16", 64, 8192).latency_us == pytest.approx(261.3)
    assert H200.attention_prefill(16, 2, 256, "bf16", 1, 16384).latency_us == pytest.approx(2850)
    assert H200.moe("bf16", *EXPERTS_35B, 1, 32, "balanced").latency_us == pytest.approx(401, rel=0.01)


def test_one_vllm_row_stands_for_each_point_even_where_another_engine_measured_it() -> None:
    # h200_sxm/allreduce.csv: 8 GPUs, 4 KiB, vLLM custom kernel in a CUDA graph 4.8 us
    assert H200.all_reduce(8, 4096).latency_us == pytest.approx(4.8, rel=0.02)


def test_sglang_rows_stand_in_where_vllm_measured_nothing() -> None:
    found = load_tables("b200").moe("fp8_block128", *EXPERTS_35B, 8, [1, 256])
    assert (found.latency_us > 0).all()
    assert not found.extrapolated.any()


# Rules ---------------------------------------------------------------------------------------------------


def test_narrow_products_cost_as_much_as_32_columns_and_wide_ones_grow_in_proportion() -> None:
    rows = np.array([1, 64, 4096])
    narrow, thirty_two = H200.gemm("bf16", 1, 2048, rows), H200.gemm("bf16", 32, 2048, rows)
    assert narrow.latency_us.tolist() == thirty_two.latency_us.tolist()
    wide, widest = H200.gemm("bf16", 248320, 2048, rows), H200.gemm("bf16", 65536, 2048, rows)
    assert wide.latency_us == pytest.approx(widest.latency_us * 248320 / 65536)


def test_products_between_columns_lie_between_their_neighbours() -> None:
    low, high = H200.gemm("bf16", 8192, 2048, 512).latency_us, H200.gemm("bf16", 10240, 2048, 512).latency_us
    assert H200.gemm("bf16", 9216, 2048, 512).latency_us == pytest.approx((low + high) / 2)


def test_products_beyond_the_last_row_hold_its_rate_and_say_so() -> None:
    found = H200.gemm("bf16", 2048, 4096, [32768, 65536])
    assert found.latency_us[1] == pytest.approx(2 * found.latency_us[0])
    assert found.extrapolated.tolist() == [False, True]


def test_block_fp8_products_have_no_spikes() -> None:
    # h200_sxm/gemm.csv.gz, 12288 x 2048: m = 256 measured 43.4 us, m = 512 25.0 us
    found = H200.gemm("fp8_block128", 12288, 2048, [128, 256, 512]).latency_us
    assert found[1] <= found[2]
    assert (np.diff(H200.gemm("fp8_block128", 12288, 2048, np.arange(1, 4097)).latency_us) >= -1e-9).all()


def test_block_fp8_products_narrower_than_a_block_are_priced_as_bf16() -> None:
    block, plain = H200.gemm("fp8_block128", 2048, 64, 7), H200.gemm("bf16", 2048, 64, 7)
    assert block.latency_us == plain.latency_us


def test_qwen3_next_experts_follow_from_those_of_the_35b() -> None:
    tokens = 64
    spread = H200.moe("bf16", *EXPERTS_35B, 1, 0.625 * tokens).latency_us
    work = H200.moe("bf16", *EXPERTS_35B, 1, 1.25 * tokens).latency_us
    found = H200.moe("bf16", 2048, 512, 10, 512, 1, tokens).latency_us
    assert found == pytest.approx(max(2 * (spread - 20) + 20, work))


def test_balanced_routing_touches_more_experts_and_costs_more_at_small_batch() -> None:
    skewed, balanced = (H200.moe("bf16", *EXPERTS_35B, 1, 32, routing) for routing in ("power_law_1.2", "balanced"))
    assert balanced.latency_us > 1.5 * skewed.latency_us


def test_attention_beyond_the_sweep_holds_the_rate_of_the_largest_batch() -> None:
    reached = H200.attention_decode(16, 2, 256, "bf16", 128, 2048)
    beyond = H200.attention_decode(16, 2, 256, "bf16", 256, 2048)
    assert beyond.latency_us == pytest.approx(2 * reached.latency_us)
    assert (bool(reached.extrapolated), bool(beyond.extrapolated)) == (False, True)


def test_one_gpu_needs_no_all_reduce() -> None:
    assert H200.all_reduce(1, [1e6, 1e9]).latency_us.tolist() == [0, 0]


def test_elementwise_kernels_pay_a_launch_and_four_fifths_of_the_bandwidth() -> None:
    assert H200.elementwise(3.84e9) == pytest.approx(1000 + 3)


@pytest.mark.parametrize("gpu", GPU_NAMES)
def test_attention_of_every_measured_head_shape_grows_with_context(gpu: str) -> None:
    tables = load_tables(gpu)
    lengths = np.array([1024, 4096, 16384, 262144])
    for q_heads, kv_heads in (
        (16, 2),
        (8, 1),
        (4, 1),
        (2, 1),
        (32, 2),
        (16, 1),
        (24, 4),
        (12, 2),
        (6, 1),
        (3, 1),
    ):
        for kv_dtype in ("bf16", "fp8"):
            found = tables.attention_decode(q_heads, kv_heads, 256, kv_dtype, 32, lengths).latency_us
            assert (np.diff(found) > 0).all()


# Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_tables, load_system])
def test_an_unknown_gpu_is_refused_with_the_known_names(load: object) -> None:
    with pytest.raises(UsageError, match="gpu is 'a100'; allowed are h200, b200, h100"):
        load("a100")  # type: ignore[operator]


def test_a_product_far_from_any_column_is_refused_with_what_is_measured() -> None:
    with pytest.raises(UncoveredShapeError, match="n = 12288, k = 4096; at k = 4096 n is measured at 32, 64"):
        H200.gemm("bf16", 12288, 4096, 1)


def test_experts_of_another_width_are_refused_with_the_covered_ones() -> None:
    with pytest.raises(UncoveredShapeError, match="2048/512/8/256"):
        H200.moe("bf16", 2304, 1024, 8, 256, 1, 1)
    with pytest.raises(UncoveredShapeError, match="over 8 ranks; covered are bf16 over 1"):
        H200.moe("fp8_block128", *EXPERTS_35B, 8, 1)


def test_attention_of_another_width_is_refused_with_the_covered_ones() -> None:
    with pytest.raises(UncoveredShapeError, match="16/2 of 256"):
        H200.attention_decode(30, 30, 128, "bf16", 1, 1)


def test_unmeasured_recurrent_heads_are_refused_and_the_nearest_ones_named() -> None:
    with pytest.raises(UncoveredShapeError, match="2/4"):
        H200.gdn("recurrent_decode", 1, 4, 1)
    assert H200.nearest_gdn_heads(1, 4) == (2, 4)
    assert H200.nearest_gdn_heads(16, 32) == (16, 32)


def test_unknown_types_and_routings_are_refused() -> None:
    with pytest.raises(UsageError, match="weight_dtype is 'int4'; allowed are bf16"):
        H200.gemm("int4", 2048, 2048, 1)
    with pytest.raises(UsageError, match=r"routing is 'uniform'; allowed are power_law_1\.2"):
        H200.moe("bf16", *EXPERTS_35B, 1, 1, "uniform")


# Systems -------------------------------------------------------------------------------------------------


def test_systems_know_memory_and_communication_buffers() -> None:
    system = load_system("H200")
    assert system.memory_capacity_bytes == 141 << 30
    assert system.nccl_memory_bytes(1) == 0
    assert 0 < system.nccl_memory_bytes(2) < system.nccl_memory_bytes(4) == system.nccl_memory_bytes(16)
