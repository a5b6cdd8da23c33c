"""Kernel profiles: reading kernels.csv, the look-up, its flags, and what a GPU's name means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernel_profiles import BATCHES, CHAIN_ROWS, grid_rows, row, step_us, write_profile

from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.profiles import folders, load_system
from lab.profiles.folders import check_gpu, find_profile, target_folder
from lab.profiles.kernels import (
    GpuKernels,
    KernelProfile,
    gpu_kernels,
    interpolation_errors,
    kernels_record,
    load_profile,
)
from lab.profiles.rows import COLUMNS, read_rows, write_rows
from lab.trees import DraftTree

HEADS = LayerHeads(16, 32, 128, 128, "float32")
CHAIN = DraftTree.chain(3)
TREE = DraftTree.from_widths((2, 2, 2))


@pytest.fixture
def profile(tmp_path: Path) -> KernelProfile:
    return load_profile(write_profile(tmp_path / "gpu"))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's profiles, and no profiles of the user's."""
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return tmp_path / "shipped"


# kernels.csv ---------------------------------------------------------------------------------------------


def test_the_columns_are_the_fixed_ones() -> None:
    assert ", ".join(COLUMNS) == (
        "method, phase, key_heads, value_heads, head_dim, state_dtype, batch, rows, tree, timer, latency_us_p50, "
        "latency_us_p20, latency_us_p80, samples, bytes_moved, pct_copy_bandwidth, rel_err_output, rel_err_state"
    )


def test_rows_survive_the_file_and_a_red_row_has_no_time(tmp_path: Path) -> None:
    red = row(
        "treewy", 4, 2, "chain:1", latency_us_p50=None, latency_us_p20=None, latency_us_p80=None, samples=0,
        pct_copy_bandwidth=None, rel_err_state=float("inf"),
    )  # fmt: skip
    path = tmp_path / "kernels.csv"
    path.write_text(write_rows([row("treelog", 8, 15, "2,2,2"), red]))
    assert read_rows(path) == (row("treelog", 8, 15, "2,2,2", latency_us_p20=8.316, latency_us_p80=8.484), red)
    assert ",,,0," in path.read_text().splitlines()[2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("step,16", "stop,16", "phase is 'stop'; allowed are verify"),
        ("treelog,", "magic,", "method is 'magic'; allowed are recurrent"),
        ("float32", "fp8", "state_dtype is 'fp8'; allowed are float32, bfloat16"),
        ("graph", "sundial", "timer is 'sundial'; allowed are graph, chained, eager"),
        (",16,32,128", ",16,40,128", "value_heads is 40; a multiple of key_heads"),
        ("8,1,chain:0", "8,2,chain:0", "rows is 2, but tree 'chain:0' has 1"),
        ("8,1,chain:0", "8,1,oak", "rows is 1, but tree 'oak' is not understood"),
        ("6.160,6.098", "6.160,nan", "latency_us_p20 is nan"),
        ("6.160,6.098", "6.160,6.2", "latencies p20, p50, p80 are 6.2, 6.16, 6.222; they must ascend"),
        ("6.160,6.098", ",6.098", "latency_us_p50 is missing"),
        (",11,1000", ",11,-1000", "bytes_moved -1000; neither can be negative"),
        ("50.0", "inf", "pct_copy_bandwidth is inf"),
        ("0.001,", "nan,", "rel_err_output is nan"),
        (",16,32,128", ",16,x,128", "line 2: value_heads is 'x'; a number is needed"),
        ("6.160,", "nan,", "latency_us_p50 is nan"),
        ("6.160,6.098", "6.160,", "latency_us_p20 is missing; a positive number"),
        ("method,phase", "phase,method", "has other columns"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "kernels.csv"
    text = write_rows([row("treelog", 8, 1, "chain:0")])
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=message):
        read_rows(path)


def test_only_whole_steps_are_timed_chained(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    steps = [row("treelog", 8, 1, "chain:0", timer=timer) for timer in ("graph", "chained", "eager")]
    path.write_text(write_rows(steps))
    assert [found.timer for found in read_rows(path)] == ["graph", "chained", "eager"]
    path.write_text(write_rows([row("treelog", 8, 1, "chain:0", timer="chained", phase="verify")]))
    with pytest.raises(UsageError, match="phase 'verify'; only phase 'step' is timed chained"):
        read_rows(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schema_version", 99, "schema_version is 99; 1 is needed"),
        ("schema_version", None, "schema_version is None; 1 is needed"),
        ("copy_bandwidth_bytes_per_s", -1, "copy_bandwidth_bytes_per_s is -1; a positive number"),
        ("copy_bandwidth_bytes_per_s", "fast", "copy_bandwidth_bytes_per_s is 'fast'"),
        ("copy_bandwidth_bytes_per_s", float("nan"), "copy_bandwidth_bytes_per_s is nan"),
        ("red", "none", "red is 'none'; a list of sentences"),
        ("source_hash", None, "source_hash is None"),
        ("backend", "tpu", "backend is 'tpu'; cuda or cpu"),
        ("name", "", "name is ''"),
        ("operator_tables", "a100", "operator_tables is 'a100'"),
        ("runs", [1], r"runs is \[1\]; a list with a mapping for every run"),
        ("date", 7, "date is 7"),
    ],
)
def test_a_bad_record_is_refused_by_its_field(tmp_path: Path, field: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"device.json: {message}"):
        load_profile(write_profile(tmp_path, **{field: value}))


def test_a_record_without_a_field_says_that_it_is_missing(tmp_path: Path) -> None:
    path = write_profile(tmp_path) / "device.json"
    path.write_text(path.read_text().replace("source_hash", "hash"))
    with pytest.raises(UsageError, match="source_hash is missing; the hash of the kernels' sources is needed"):
        load_profile(tmp_path)


def test_a_row_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(write_rows([row("treelog", 8, 1, "chain:0")] * 2))
    with pytest.raises(UsageError, match="holds a row twice: treelog, step, 16, 32"):
        read_rows(path)


# Look-up -------------------------------------------------------------------------------------------------


def test_measured_points_come_back_and_points_between_are_linear(profile: KernelProfile) -> None:
    for tree, rows in ((CHAIN, 4), (TREE, 15), (DraftTree.chain(5), 6)):
        found = profile.step("treelog", HEADS, tree, [1, 8, 20, 256])
        assert found is not None
        np.testing.assert_allclose(found.latency_us, [step_us(b, rows) for b in (1, 8, 20, 256)], rtol=1e-3)
        assert not found.extrapolated.any()
        assert found.stand_in == ""


def test_outside_the_grid_the_rate_is_held_and_flagged(profile: KernelProfile) -> None:
    found = profile.step("treelog", HEADS, CHAIN, [256, 512])
    assert found is not None
    assert found.latency_us[1] == pytest.approx(2 * found.latency_us[0])
    assert found.extrapolated.tolist() == [False, True]
    long = profile.step("treelog", HEADS, DraftTree.chain(15), [8])
    assert long is not None
    assert long.extrapolated.all()
    assert long.latency_us[0] == pytest.approx(2 * step_us(8, 8), rel=1e-3)


def test_what_was_not_measured_has_no_answer(profile: KernelProfile) -> None:
    assert profile.step("specla", HEADS, CHAIN, [1]) is None
    assert profile.step("treelog", LayerHeads(16, 32, 128, 128, "bfloat16"), CHAIN, [1]) is None
    assert profile.step("treelog", LayerHeads(16, 32, 64, 64, "float32"), CHAIN, [1]) is None


def test_other_heads_take_the_nearest_at_equal_bytes_and_say_so(profile: KernelProfile) -> None:
    found = profile.step("treelog", LayerHeads(16, 64, 128, 128, "float32"), CHAIN, [4, 100])
    assert found is not None
    np.testing.assert_allclose(found.latency_us, [step_us(8, 4), step_us(200, 4)], rtol=1e-3)
    assert found.extrapolated.all()
    assert found.stand_in == "heads 16/32 stand in, scaled by bytes"


def test_chains_stand_in_for_trees_only_with_a_flag(tmp_path: Path) -> None:
    chains = [row("treelog", batch, rows, f"chain:{rows - 1}") for batch in BATCHES for rows in CHAIN_ROWS]
    found = load_profile(write_profile(tmp_path, chains)).step("treelog", HEADS, DraftTree.from_widths((3,)), [8])
    assert found is not None
    assert found.stand_in == "chains stand in for trees"
    assert found.extrapolated.all()


def test_graph_replays_go_before_eager_ones_and_red_rows_do_not_count(tmp_path: Path) -> None:
    rows = [row("treelog", batch, 1, "chain:0") for batch in (1, 8)]
    rows += [row("treelog", batch, 1, "chain:0", timer="eager", latency_us_p50=99.0) for batch in (1, 4, 8)]
    rows.append(row("treelog", 16, 1, "chain:0", latency_us_p50=None))
    found = load_profile(write_profile(tmp_path, rows)).step("treelog", HEADS, DraftTree.chain(0), [4, 16])
    assert found is not None
    assert found.latency_us[0] == pytest.approx(step_us(4, 1), rel=1e-3)
    assert found.extrapolated.tolist() == [False, True]


def test_chained_steps_price_nothing(tmp_path: Path) -> None:
    rows = [row("treelog", batch, 1, "chain:0") for batch in (1, 8)]
    rows += [row("treelog", batch, 1, "chain:0", timer="chained", latency_us_p50=1.0) for batch in (1, 8, 64)]
    rows += [row("recurrent", 8, 1, "chain:0", timer="chained", latency_us_p50=1.0)]
    profile = load_profile(write_profile(tmp_path, rows))
    assert {key.method for key in profile.points} == {"treelog"}
    found = profile.step("treelog", HEADS, DraftTree.chain(0), [8, 64])
    assert found is not None
    assert found.latency_us[0] == pytest.approx(step_us(8, 1), rel=1e-3)
    assert found.extrapolated.tolist() == [False, True]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    first = load_profile(write_profile(tmp_path))
    second = load_profile(write_profile(tmp_path, grid_rows(("bole",)), name="another"))
    assert (first.device_name, second.device_name) == ("NVIDIA H200", "another")
    assert first.hash != second.hash


# Leave one out -------------------------------------------------------------------------------------------


def test_a_bilinear_grid_interpolates_without_error(profile: KernelProfile) -> None:
    errors = {error.axis: error for error in interpolation_errors(profile)}
    assert set(errors) == {"batch", "rows"}
    assert all(error.worst < 1e-3 for error in errors.values())
    # 3 inner batches: on 4 chains and 4 trees (one row among both) of three methods, and of two decoding methods
    assert errors["batch"].points == 3 * (3 * 8 + 2)
    assert errors["rows"].points == 5 * 3 * (2 + 2)


def test_the_worst_point_is_named(tmp_path: Path) -> None:
    rows = grid_rows(("treelog",))
    bumpy = [r if (r.batch, r.rows) != (32, 4) else row("treelog", 32, 4, "chain:3", latency_us_p50=15.0) for r in rows]
    (batch, _) = interpolation_errors(load_profile(write_profile(tmp_path, bumpy)))
    assert batch.worst == pytest.approx(step_us(32, 4) / 15 - 1, rel=1e-3)
    assert batch.worst_at == "treelog float32 16/32, batch 32, chain of 4 rows"
    assert "median 0.0%" in str(batch)


def test_a_grid_without_inner_points_has_no_error(tmp_path: Path) -> None:
    assert interpolation_errors(load_profile(write_profile(tmp_path, [row("treelog", 1, 1, "chain:0")]))) == ()


# Names ---------------------------------------------------------------------------------------------------


def test_a_gpu_without_any_profile_has_no_measured_kernels(shipped: Path) -> None:
    assert gpu_kernels("h200") is None
    assert gpu_kernels("b200") is None
    assert kernels_record("h200") is None


def test_other_shipped_gpus_take_the_h200_scaled_by_bandwidth(shipped: Path) -> None:
    write_profile(shipped / "h200")
    own, scaled = gpu_kernels("H200"), gpu_kernels("b200")
    assert own is not None
    assert scaled is not None
    assert own.describe() == "measured: step kernels on NVIDIA H200"
    ratio = load_system("h200").memory_bandwidth_bytes_per_s / load_system("b200").memory_bandwidth_bytes_per_s
    assert scaled.time_factor == pytest.approx(ratio)
    assert scaled.describe() == f"extrapolated: step kernels of NVIDIA H200 scaled by bandwidth (times {ratio:.3f})"


def test_ones_own_profile_is_found_by_name_or_folder(shipped: Path, tmp_path: Path) -> None:
    folder = write_profile(target_folder("mine"))
    assert folder == tmp_path / "home" / "treewy-lab" / "profiles" / "mine"
    assert find_profile("mine") == folder
    assert check_gpu("mine") == check_gpu(str(folder)) == "h200"
    assert load_system("mine") == load_system("h200")
    assert gpu_kernels("mine") is not None


def test_a_profile_of_an_unknown_device_must_name_its_operator_tables(shipped: Path, tmp_path: Path) -> None:
    folder = write_profile(tmp_path / "cpu", name="Some CPU")
    with pytest.raises(UsageError, match="names no operator tables"):
        check_gpu(str(folder))
    assert check_gpu(str(write_profile(folder, name="Some CPU", operator_tables="h100"))) == "h100"


def test_a_profile_without_a_timed_step_says_what_to_measure(shipped: Path) -> None:
    red = row("treelog", 1, 1, "chain:0", latency_us_p50=None)
    write_profile(target_folder("mine"), [red, row("treelog", 1, 1, "chain:0", phase="verify")], backend="cpu")
    with pytest.raises(UsageError, match="bench --backend cpu --profile mine --resume --phase step"):
        gpu_kernels("mine")


@pytest.mark.parametrize("name", ["h200", "B200", "a b", "", ".hidden"])
def test_a_name_that_cannot_be_a_profile_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--profile"):
        target_folder(name)


def test_an_unknown_name_is_refused_with_what_is_allowed(shipped: Path) -> None:
    with pytest.raises(UsageError, match="gpu is 'a100'; allowed are h200, b200, h100, and the name or folder"):
        gpu_kernels("a100")


def test_a_stale_record_is_told_by_every_source(profile: KernelProfile, tmp_path: Path) -> None:
    stale = load_profile(write_profile(tmp_path / "stale", stale_reason="comments only"))
    assert GpuKernels(stale).describe().endswith("; stale record: comments only")
    assert GpuKernels(profile).describe("x stands in") == "extrapolated: step kernels on NVIDIA H200; x stands in"


def test_what_validation_says_of_the_h200_kernels() -> None:
    rows = {
        (at.method, at.phase, at.key_heads, at.value_heads, at.state_dtype, at.batch, at.tree): at
        for at in load_profile(folders.SHIPPED / "h200").rows
    }
    for (method, phase, *where), ours in rows.items():
        if (method, phase, where[4]) == ("treelog", "step", "binary:15") and where[3] >= 32:
            other = rows["treewy", "step", *where]
            assert ours.latency_us_p50 < other.latency_us_p50, where  # type: ignore[operator]
    commit = rows["bole", "commit", 16, 32, "float32", 256, "binary:15"]
    assert commit.pct_copy_bandwidth is not None
    assert commit.pct_copy_bandwidth >= 85
