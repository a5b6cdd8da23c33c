"""Attention of a step from measured verify attention: what changes with a profile, and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from attention_profiles import attention_us as layer_us
from attention_profiles import grid_rows, write_attention

from lab.methods import get_method
from lab.profiles import folders, load_tables
from lab.shapes import load_shape
from lab.trees import DraftTree
from simulator.costtables import attention_us
from simulator.settings import EngineSettings
from simulator.stepcost import StepCost, build_step_cost

CHAIN, TREE = DraftTree.chain(3), DraftTree.from_widths((4, 1))
LAYERS = 10
AT_LEAST = "at least the decode kernel of the operator tables"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "shipped"


def build(gpu: str = "h200", tree: DraftTree = CHAIN, **engine: object) -> StepCost:
    settings = EngineSettings(**{"max_num_seqs": 256, **engine})  # type: ignore[arg-type]
    return build_step_cost(load_shape("Qwen3.5-35B-A3B"), gpu, 1, settings, get_method("treelog"), tree, 2.5)


def decode_us(batch: int, tokens: int) -> float:
    return float(load_tables("h200").attention_decode(16, 2, 256, "bf16", batch, tokens).latency_us)


def test_a_verification_takes_the_measured_time_and_drafting_the_decode_kernel(shipped: Path) -> None:
    write_attention(shipped / "h200")
    cost = build()
    found, extrapolated = attention_us(cost.tables, 8, 2048)
    assert found == pytest.approx(LAYERS * layer_us(8, 2048, 4) + 3 * decode_us(8, 2049), rel=1e-3)
    assert not extrapolated
    assert cost.sources["attention"] == f"measured: verify attention on NVIDIA H200; {AT_LEAST}"


#: Columns of a measured time.
TIMES = ("latency_us_p50", "latency_us_p20", "latency_us_p80")


def test_a_verification_is_never_cheaper_than_decoding_with_the_engines_kernel(shipped: Path) -> None:
    """A faster kernel of ours must not make speculation look good."""
    write_attention(shipped / "h200", [line | dict.fromkeys(TIMES, 0.1) for line in grid_rows()])
    found, _ = attention_us(build().tables, 8, 2048)
    assert found == pytest.approx(LAYERS * decode_us(8, 2052) + 3 * decode_us(8, 2049), rel=1e-3)


def test_drafting_passes_of_several_rows_take_it_too(shipped: Path) -> None:
    """Widths 4, 1 are drafted by a pass over the root and one over four rows."""
    write_attention(shipped / "h200")
    found = attention_us(build(tree=TREE).tables, 8, 2048)[0]
    expected = LAYERS * layer_us(8, 2048, TREE.num_rows) + decode_us(8, 2049) + layer_us(8, 2048, 4)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("context", [128, 700, 5000])
def test_between_points_the_step_is_the_look_up(shipped: Path, batch: int, context: int) -> None:
    write_attention(shipped / "h200")
    found = attention_us(build().tables, batch, context)[0] - 3 * decode_us(batch, context + 1)
    assert found == pytest.approx(LAYERS * layer_us(batch, context, 4), rel=0.01)


def test_plain_decoding_stays_as_it_was(shipped: Path) -> None:
    plain = DraftTree.chain(0)
    before = build(tree=plain)
    write_attention(shipped / "h200")
    after = build(tree=plain)
    assert attention_us(after.tables, 47, 1234.0) == attention_us(before.tables, 47, 1234.0)
    assert after.sources == before.sources


def test_an_8_bit_cache_stays_modelled(shipped: Path) -> None:
    write_attention(shipped / "h200")
    assert build(kv_cache_dtype="fp8").sources["attention"].startswith("modelled: larger of the decode kernel")


def test_without_measurements_it_is_modelled(shipped: Path) -> None:
    assert build().sources["attention"].startswith("modelled: larger of the decode kernel")


def test_another_gpu_is_scaled_and_flagged(shipped: Path) -> None:
    write_attention(shipped / "h200")
    cost = build("b200")
    assert cost.sources["attention"].startswith("extrapolated: verify attention on NVIDIA H200 scaled by bandwidth")
    assert attention_us(cost.tables, 8, 2048)[1]


def test_contexts_beyond_the_measured_ones_are_flagged(shipped: Path) -> None:
    write_attention(shipped / "h200")
    tables = build().tables
    assert not attention_us(tables, 8, 30_000)[1]
    assert attention_us(tables, 8, 40_000)[1]
    assert attention_us(tables, 64, 30_000)[1]


def test_measured_heads_of_one_group_serve_every_tensor_parallel_size(shipped: Path) -> None:
    write_attention(shipped / "h200", grid_rows(16, 2))
    settings = EngineSettings(max_num_seqs=256)
    cost = build_step_cost(load_shape("Qwen3.5-35B-A3B"), "h200", 2, settings, get_method("treelog"), CHAIN, 2.5)
    assert cost.sources["attention"] == (
        f"measured: verify attention on NVIDIA H200; heads 16/2 stand in for 8/1; {AT_LEAST}"
    )
