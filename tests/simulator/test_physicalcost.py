"""Step costs from physical constants: bytes over bandwidth, operations over rate, closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.shapes import load_shape
from simulator.gputime import MEMORY_BOUND_ROWS, with_gpu_time
from simulator.physicalcost import BANDWIDTH_SHARE, FLOPS_SHARE, PhysicalGpu, Ranks, physical_cost
from simulator.settings import EngineSettings, GpuTimeSettings
from simulator.stepcost import step_breakdown

GPU = PhysicalGpu("test", 1e12, 1e15, 1e11, 10**11)
ENGINE = EngineSettings(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=8192)


def test_one_row_reads_the_dense_weights_once() -> None:
    shape = load_shape("Qwen3-32B")
    cost = physical_cost(shape, GPU, Ranks(), ENGINE)
    weights = 2 * (shape.parameters() - 2 * shape.vocab_size * shape.hidden_size)
    assert cost.tables.rows_us[1] == pytest.approx(weights / (BANDWIDTH_SHARE * 1e6))
    assert cost.tables.rows_us[0] == 0


def test_many_rows_compute() -> None:
    shape = load_shape("Qwen3-32B")
    cost = physical_cost(shape, GPU, Ranks(), ENGINE)
    operations = 2 * (shape.parameters() - 2 * shape.vocab_size * shape.hidden_size) * 4096
    assert cost.tables.rows_us[4096] == pytest.approx(operations / (FLOPS_SHARE * 1e9))


def test_attention_reads_every_cached_token() -> None:
    shape = load_shape("Qwen3-32B")
    step = step_breakdown(physical_cost(shape, GPU, Ranks(), ENGINE), 4, 1000.0)
    assert step["attention"] == pytest.approx(4 * 1000 * 262144 / (BANDWIDTH_SHARE * 1e6))
    assert step["state"] == 0


def test_few_rows_touch_few_experts() -> None:
    shape = load_shape("Qwen3-30B-A3B-Instruct-2507")
    rows = physical_cost(shape, GPU, Ranks(), ENGINE).tables.rows_us
    assert rows[1] < 0.2 * rows[256]
    assert np.all(np.diff(rows) >= 0)


def test_a_hybrids_states_are_read_and_written() -> None:
    shape = load_shape("Qwen3.5-9B")
    step = step_breakdown(physical_cost(shape, GPU, Ranks(), ENGINE), 8, 100.0)
    assert step["state"] == pytest.approx(8 * 2 * 48 * 2**20 / (BANDWIDTH_SHARE * 1e6))


def test_tensor_parallel_ranks_share_the_weights_and_exchange_rows() -> None:
    shape = load_shape("Qwen3-32B")
    slow, fast = (
        physical_cost(shape, PhysicalGpu("test", 1e12, 1e15, link, 10**11), Ranks(2), ENGINE) for link in (1e10, 1e15)
    )
    alone = physical_cost(shape, GPU, Ranks(), ENGINE)
    assert fast.tables.rows_us[1] == pytest.approx(alone.tables.rows_us[1] / 2, rel=1e-3)
    exchanged = 2 * 2 * 0.5 * 64 * 2 * 5120 * 100  # bytes of two all-reduces per layer for 100 rows
    assert slow.tables.rows_us[100] - fast.tables.rows_us[100] == pytest.approx(exchanged / 1e4, rel=1e-3)


def test_factors_scale_decoding_and_prompts() -> None:
    cost = physical_cost(load_shape("Qwen3.5-9B"), GPU, Ranks(), ENGINE)
    scaled = with_gpu_time(cost, GpuTimeSettings(decode_factor=2.0, prompt_factor=3.0)).tables
    rows, few = cost.tables.rows_us, MEMORY_BOUND_ROWS
    assert scaled.rows_us[few] == pytest.approx(2 * rows[few])
    assert scaled.rows_us[4096] == pytest.approx(2 * rows[few] + 3 * (rows[4096] - rows[few]))
    np.testing.assert_allclose(scaled.state_us, 2 * cost.tables.state_us)
    np.testing.assert_allclose(scaled.prefill_attn_us, 3 * cost.tables.prefill_attn_us)
    states = replace(cost, tables=cost.tables._replace(copy_us=np.arange(3.0), publish_us=np.arange(3.0)))
    moved = with_gpu_time(states, GpuTimeSettings(decode_factor=2.0, prompt_factor=3.0)).tables
    assert (moved.copy_us.tolist(), moved.publish_us.tolist()) == ([0, 3, 6], [0, 2, 4])


def test_no_factor_leaves_the_tables_alone() -> None:
    cost = physical_cost(load_shape("Qwen3.5-9B"), GPU, Ranks(), ENGINE)
    assert with_gpu_time(cost, GpuTimeSettings()) is cost
