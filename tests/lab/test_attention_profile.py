"""Measured verify attention: reading attention.csv, interpolation, what is flagged, and which GPU it serves."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from attention_profiles import BATCHES, BLOCK_ROWS, CONTEXTS, ROWS, attention_us, grid_rows, row, write_attention
from hypothesis import given
from hypothesis import strategies as st
from kernel_profiles import write_profile

from lab.errors import UsageError
from lab.profiles import folders, load_system, load_tables
from lab.profiles.attention import (
    DEVICE_FILE,
    ROWS_FILE,
    HeadsKey,
    HeadsTimes,
    attention_record,
    gpu_attention,
    load_attention,
    padded_rows,
)

HEADS = HeadsKey(16, 2, 256, "bf16")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's profiles, and no profiles of the user's."""
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "shipped"


# the look-up ---------------------------------------------------------------------------------------------

POINTS = {(b, c, n): attention_us(b, c, n) for b in BATCHES for c in CONTEXTS for n in ROWS}
TIMES = HeadsTimes.of(8, POINTS, BLOCK_ROWS)


@given(st.floats(1, 64), st.floats(128, 32_768), st.integers(1, 64))
def test_times_between_points_are_linear_in_batch_context_and_padded_rows(
    batch: float, context: float, rows: int
) -> None:
    found = TIMES.at(batch, context, rows)
    assert found.latency_us == pytest.approx(attention_us(batch, context, rows), rel=2e-3)
    assert not found.extrapolated


@pytest.mark.parametrize(
    ("query_rows", "padded"), [(1, 16), (16, 16), (17, 32), (72, 128), (128, 128), (129, 256), (320, 384)]
)
def test_rows_are_padded_to_blocks(query_rows: int, padded: int) -> None:
    assert padded_rows(query_rows, BLOCK_ROWS) == padded


def test_rows_of_one_block_size_cost_what_the_block_costs() -> None:
    """24 and 32 query rows are one block of 32; 17 tree rows of 8 heads are two blocks of 128, as 32 rows are."""
    assert TIMES.at(8, 2048, 3).latency_us == pytest.approx(TIMES.at(8, 2048, 4).latency_us, rel=2e-3)
    assert TIMES.at(8, 2048, 17).latency_us == pytest.approx(TIMES.at(8, 2048, 32).latency_us, rel=2e-3)
    assert TIMES.at(8, 2048, 17).latency_us > 1.3 * TIMES.at(8, 2048, 16).latency_us


def test_measured_points_are_themselves(tmp_path: Path) -> None:
    profile = load_attention(write_attention(tmp_path))
    for (batch, context, rows), latency in profile.points[HEADS].items():
        found = profile.verify(HEADS, batch, context, rows)
        assert found is not None
        assert found.latency_us == pytest.approx(latency)
        assert not found.extrapolated
        assert found.stand_in == ""


def test_beyond_the_last_points_their_rate_is_held_and_flagged() -> None:
    last = TIMES.at(64, 32_768, 16).latency_us
    found = TIMES.at([128, 64, 128], [32_768, 65_536, 65_536], 16)
    np.testing.assert_allclose(found.latency_us / last, [2, 2, 4])
    assert found.extrapolated.all()


def test_below_the_first_points_their_value_counts_and_is_flagged() -> None:
    found = TIMES.at(1, [0, 127, 128], 4)
    np.testing.assert_allclose(found.latency_us, TIMES.at(1, 128, 4).latency_us)
    assert found.extrapolated.tolist() == [True, True, False]
    assert TIMES.at(1, 128, 0.5).extrapolated


def test_a_batch_that_did_not_fit_holds_the_rate_of_the_largest_that_did(tmp_path: Path) -> None:
    profile = load_attention(write_attention(tmp_path))
    found = profile.verify(HEADS, [8, 64], 32_768, 4)
    assert found is not None
    assert found.latency_us[1] / found.latency_us[0] == pytest.approx(8)
    assert found.extrapolated.tolist() == [False, True]


# heads ---------------------------------------------------------------------------------------------------


def test_kv_heads_count_like_requests(tmp_path: Path) -> None:
    profile = load_attention(write_attention(tmp_path))
    found = profile.verify(HeadsKey(8, 1, 256, "bf16"), 16, 500, 4)
    assert found is not None
    assert found.latency_us == pytest.approx(attention_us(16, 500, 4, 8, 1), rel=2e-3)
    assert not found.extrapolated
    assert found.stand_in == "heads 16/2 stand in for 8/1"


def test_other_groups_stand_in_with_as_many_query_rows_and_are_flagged(tmp_path: Path) -> None:
    profile = load_attention(write_attention(tmp_path))
    found = profile.verify(HeadsKey(24, 4, 256, "bf16"), 4, 500, 8)
    assert found is not None
    assert found.latency_us == pytest.approx(attention_us(4, 500, 8, 24, 4), rel=2e-3)
    assert found.extrapolated
    assert found.stand_in == "heads 16/2 stand in for 24/4, at as many query rows per KV head"


def test_the_same_group_goes_before_a_nearer_number_of_kv_heads(tmp_path: Path) -> None:
    profile = load_attention(write_attention(tmp_path, [*grid_rows(32, 1), *grid_rows(16, 2)]))
    assert profile.nearest(HeadsKey(8, 1, 256, "bf16")) == HEADS


def test_a_coarse_grid_of_the_same_group_gives_way_to_a_dense_one(tmp_path: Path) -> None:
    coarse = [row(batch, 128, 1, 8, 1) for batch in BATCHES]
    profile = load_attention(write_attention(tmp_path, [*coarse, *grid_rows(16, 2)]))
    assert profile.nearest(HeadsKey(8, 1, 256, "bf16")) == HEADS


def test_another_width_or_cache_has_no_answer(tmp_path: Path) -> None:
    profile = load_attention(write_attention(tmp_path))
    assert profile.verify(HEADS._replace(head_dim=128), 1, 500, 4) is None
    assert profile.verify(HEADS._replace(kv_dtype="fp8"), 1, 500, 4) is None


# files and GPUs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(1, 128, 1), row(1, 128, 1)], "line 3: a second row"),
        ([row(1, 128, 1, latency_us_p50=0)], "line 2: heads, rows, batch, context and time must be above 0"),
        ([row(1, 128, 1, samples="many")], "line 2: invalid literal"),
        ([row(1, 128, 1, latency_us_p80="inf")], "line 2: times must be finite"),
        ([row(1, 128, 1, latency_us_p20="nan")], "line 2: times must be finite"),
        ([row(1, 128, 1, latency_us_p20=9e9)], "line 2: times must be finite and p20 <= p50 <= p80"),
    ],
    ids=["twice", "no time", "no number", "no end", "not a time", "not ascending"],
)
def test_a_bad_row_is_named(tmp_path: Path, rows: list[dict[str, object]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_attention(write_attention(tmp_path, rows))


def test_other_columns_are_refused(tmp_path: Path) -> None:
    (write_attention(tmp_path) / ROWS_FILE).write_text("batch,latency\n1,2\n")
    with pytest.raises(UsageError, match="other columns"):
        load_attention(tmp_path)


def test_a_device_without_its_blocks_is_refused(tmp_path: Path) -> None:
    (write_attention(tmp_path) / DEVICE_FILE).write_text('{"name": "NVIDIA H200"}')
    with pytest.raises(UsageError, match="'block_rows'"):
        load_attention(tmp_path)


def test_other_gpus_are_scaled_by_bandwidth_and_say_so(shipped: Path) -> None:
    write_attention(shipped / "h200")
    own, other = gpu_attention("h200"), gpu_attention("b200")
    assert own is not None
    assert other is not None
    ratio = load_system("h200").memory_bandwidth_bytes_per_s / load_system("b200").memory_bandwidth_bytes_per_s
    times = [found.verify(HEADS, 8, 500, 4) for found in (own, other)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].latency_us / times[0].latency_us == pytest.approx(ratio)
    assert not times[0].extrapolated
    assert times[1].extrapolated
    assert own.describe() == "measured: verify attention on NVIDIA H200"
    assert other.describe() == (
        f"extrapolated: verify attention on NVIDIA H200 scaled by bandwidth (times {ratio:.3f})"
    )


def test_a_stand_in_of_another_group_is_no_measurement(shipped: Path) -> None:
    write_attention(shipped / "h200")
    found = gpu_attention("h200")
    assert found is not None
    notes = [found.profile.verify(HeadsKey(*heads, 256, "bf16"), 8, 500, 4) for heads in ((8, 1), (24, 4))]
    sources = [found.describe(note.stand_in) for note in notes if note is not None]
    assert [source.split(":")[0] for source in sources] == ["measured", "extrapolated"]
    assert all("stand in" in source for source in sources)


def test_without_measurements_there_is_none(shipped: Path) -> None:
    assert gpu_attention("h200") is None
    assert attention_record("h200") is None


def test_a_profile_of_ones_own_goes_first(shipped: Path, tmp_path: Path) -> None:
    write_attention(shipped / "h200")
    folder = write_profile(tmp_path / "mine")
    shared = gpu_attention(str(folder))
    assert shared is not None
    assert shared.profile.folder == (shipped / "h200").resolve()
    write_attention(folder, name="NVIDIA H200 NVL")
    own = gpu_attention(str(folder))
    assert own is not None
    assert own.profile.device_name == "NVIDIA H200 NVL"
    assert not own.scaled


def test_the_record_changes_with_the_rows(shipped: Path) -> None:
    write_attention(shipped / "h200")
    before = attention_record("h200")
    shutil.rmtree(shipped)
    changed = row(1, 128, 1, latency_us_p50=7.0, latency_us_p20=7.0, latency_us_p80=7.0)
    write_attention(shipped / "h200", [*grid_rows()[1:], changed])
    after = attention_record("h200")
    assert before is not None
    assert after is not None
    assert before["hash"] != after["hash"]
    assert before["time_factor"] == 1.0


# the shipped measurements --------------------------------------------------------------------------------

SHIPPED = load_attention(folders.SHIPPED / "h200")


def test_the_shipped_grid_is_whole_and_its_gate_green() -> None:
    assert SHIPPED.device["points"] == SHIPPED.device["points_wanted"] == len(SHIPPED.rows)
    assert SHIPPED.device["gate"]["red"] == {}
    assert {key[:2] for key in SHIPPED.points} >= {(16, 2), (24, 4), (32, 2), (16, 4)}


def test_no_time_is_faster_than_reading_the_cache_can_be() -> None:
    """Reads alone are a little faster than a copy, whose bandwidth is the yardstick; the memory's is 4.8 TB/s."""
    for measured in SHIPPED.rows:
        if measured.bytes_moved > SHIPPED.device["l2_bytes"]:
            assert measured.bytes_moved / (1e-6 * measured.latency_us_p50) < 4.8e12


def test_one_row_takes_about_what_an_engines_decode_kernel_takes() -> None:
    """attention_decode.csv.gz, FlashAttention 3 in vLLM: 15 % faster to 10 % slower from 100 MB on."""
    ratios = []
    for measured in SHIPPED.rows:
        heads = HeadsKey(measured.q_heads, measured.kv_heads, measured.head_dim, measured.kv_dtype)
        if measured.rows > 1 or measured.context_tokens < 2048 or measured.bytes_moved < 1e8 or heads[:2] == (16, 4):
            continue  # the tables hold no 16/4 heads
        decoded = load_tables("h200").attention_decode(*heads, measured.batch, measured.context_tokens)
        if not decoded.extrapolated:
            ratios.append(measured.latency_us_p50 / float(decoded.latency_us))
    assert len(ratios) > 20
    assert min(ratios) > 0.85
    assert max(ratios) < 1.1


def test_kv_heads_count_like_requests_in_the_measurements() -> None:
    """8/1 heads against 16/2 heads at half the batch."""
    part, whole = HeadsKey(8, 1, 256, "bf16"), HeadsKey(16, 2, 256, "bf16")
    errors = [
        abs(float(SHIPPED._times[whole].at(batch / 2, context, rows).latency_us) / latency - 1)
        for (batch, context, rows), latency in SHIPPED.points[part].items()
        if batch > 1
    ]
    assert np.median(errors) < 0.03
    assert max(errors) < 0.25  # at 8 requests, between the measured 4 and 16


@pytest.mark.parametrize("blocks", ['"16"', "[]", "16", "[16, 0]", '["16"]', "[true]", "[16.5]"])
def test_block_rows_are_whole_numbers(tmp_path: Path, blocks: str) -> None:
    (write_attention(tmp_path) / DEVICE_FILE).write_text(f'{{"name": "NVIDIA H200", "block_rows": {blocks}}}')
    with pytest.raises(UsageError, match="'block_rows' must be a list of whole numbers from 1"):
        load_attention(tmp_path)


@pytest.mark.parametrize("name", [DEVICE_FILE, ROWS_FILE])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    (write_attention(tmp_path) / name).write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match=f"{name} is no UTF-8 text"):
        load_attention(tmp_path)
