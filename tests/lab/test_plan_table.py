"""`plans.csv`: what is read and refused, the order in which places lend plans, and the table of a device's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import UsageError
from lab.profiles import plans
from lab.profiles.plans import COLUMNS, Place, PlanRow, PlanTable, read_plans, table_of, write_plans

HERE = Place(16, 32, 128, "float32", False, 32, 4, 16)


def row(plan: str, **changes: object) -> PlanRow:
    return PlanRow(replace(HERE, **changes), plan, 2.5, "wide-h1-s1", 3.0)


def order(*rows: PlanRow, place: Place = HERE) -> list[str]:
    return [each.plan for each in PlanTable(rows).nearest(place)]


@st.composite
def places(draw: st.DrawFn) -> Place:
    key_heads, group = draw(st.sampled_from([1, 2, 16])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    return Place(
        key_heads, key_heads * group, draw(st.sampled_from([64, 128])), draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.booleans()), draw(st.integers(1, 600)), draw(st.integers(1, 64)), draw(st.integers(0, 64)),
    )  # fmt: skip


@given(st.lists(places(), unique=True, min_size=1, max_size=8))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, where: list[Place]) -> None:
    rows = [PlanRow(place, f"block-h{i}", 1.25 * (i + 1), "wide-h1-s1", 2.5 * (i + 1)) for i, place in enumerate(where)]
    path = tmp_path_factory.mktemp("plans") / "plans.csv"
    path.write_text(write_plans(rows))
    assert set(read_plans(path).rows) == set(rows)
    assert write_plans(reversed(rows)) == path.read_text(), "in the order of the places"


@given(places(), st.lists(places(), unique=True, max_size=12))
def test_only_places_of_the_same_sizes_and_type_lend_their_plans(place: Place, where: list[Place]) -> None:
    nearest = PlanTable(PlanRow(each, "a", 1.0, "b", 1.0) for each in where).nearest(place)
    assert {each.place for each in nearest} == {each for each in where if each.size_class == place.size_class}
    if place in where:
        assert nearest[0].place == place


def test_sizes_are_rounded_up_to_classes() -> None:
    assert [replace(HERE, rows=rows).size_class.rows for rows in (1, 2, 3, 5, 15, 17, 40, 64)] == [
        1, 2, 4, 8, 16, 32, 64, 64,
    ]  # fmt: skip
    assert [replace(HERE, log_rows=rows).size_class.log_rows for rows in (0, 1, 16, 17, 40)] == [0, 16, 16, 32, 64]


def test_the_nearest_work_comes_first_then_the_same_group_then_the_nearest_sizes() -> None:
    assert order(row("far", batch=256), row("near", batch=16), row("here")) == ["here", "near", "far"]
    assert order(row("four", key_heads=8), row("two", batch=16, key_heads=32, value_heads=64)) == ["two", "four"]
    assert order(row("three rows", rows=3), row("log of 8", log_rows=8)) == ["log of 8", "three rows"]


def test_a_log_of_the_same_type_comes_before_all_others() -> None:
    rows = (row("single"), row("half, far", log_bf16=True, batch=512))
    assert order(*rows) == ["single", "half, far"]
    assert order(*rows, place=replace(HERE, log_bf16=True)) == ["half, far", "single"]


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("batch", "0", "batch is '0'; a whole number from 1"),
        ("rows", "2.5", "rows is '2.5'"),
        ("log_rows", "-1", "log_rows is '-1'; a whole number from 0"),
        ("batch", "9" * 5000, "batch is .9{20}.; a whole number"),
        ("log_bf16", "2", "log_bf16 is 2; 0 or 1"),
        ("state_dtype", "half", "state_dtype is 'half'; allowed are float32"),
        ("value_heads", "33", "value_heads is 33; a multiple of key_heads"),
        ("head_dim", "96", "head_dim is 96; allowed are 64, 128$"),
        ("rows", "65", "rows is 65; at most 64 is possible"),
        ("log_rows", "65", "log_rows is 65; at most 64 is possible"),
        ("plan", "", "plan is missing"),
        ("plan", "magic-h1", "plan is 'magic-h1'; the name of a plan is needed: one of block, stream, wide"),
        ("plan", "block", "plan is 'block'; .* then its choices as in stream-w4"),
        ("plan", "block-h2-s1 ", "plan is 'block-h2-s1 '"),
        ("runner_up", "stream-w4-16", "runner_up is 'stream-w4-16'"),
        ("latency_us", "nan", "latency_us is 'nan'; a positive number"),
        ("runner_up_us", "", "runner_up_us is ''"),
        ("runner_up_us", "1.2", "the runner-up takes 1.2 us, less than the plan; swap the two"),
        ("runner_up_us", "3,more", "has other cells than the 12 columns of plans.csv; mend it"),
    ],
)
def test_cells_that_no_tuning_writes_are_refused(tmp_path: Path, column: str, cell: str, words: str) -> None:
    header, line = write_plans([row("block-h2-s1")]).splitlines()
    cells = line.split(",")
    cells[COLUMNS.index(column)] = cell
    path = tmp_path / "plans.csv"
    path.write_text(f"{header}\n{','.join(cells)}\n")
    with pytest.raises(UsageError, match=f"line 2:? {words}") as error:
        read_plans(path)
    assert str(path) in str(error.value)


def test_other_columns_a_place_twice_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plans.csv"
    with pytest.raises(UsageError, match="cannot read"):
        read_plans(path)
    path.write_text("plan\nblock-h2-s1\n")
    with pytest.raises(UsageError, match="has other columns than"):
        read_plans(path)
    path.write_text(write_plans([]))
    with pytest.raises(UsageError, match=r"holds no plan; run treewy bench --tune again, or remove it"):
        read_plans(path)
    path.write_text(f"{','.join(COLUMNS)}\n{'9' * 200_000}\n")
    with pytest.raises(UsageError, match=r"plans\.csv: field larger than field limit .* after line 1; put a copy back"):
        read_plans(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="no UTF-8 text"):
        read_plans(path)
    path.write_text(write_plans([row("wide-h1"), row("wide-h2")]))
    with pytest.raises(UsageError, match=r"plans\.csv: .*a place twice: heads 16/32 of 128, float32, batch 32, 4 rows"):
        read_plans(path)


def test_a_device_finds_the_table_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "SHIPPED", tmp_path)
    assert table_of("NVIDIA H200") is None
    (tmp_path / "h200").mkdir()
    path = tmp_path / "h200" / "plans.csv"
    path.write_text(write_plans([row("block-h1")]))
    found = table_of("NVIDIA H200")
    assert found is not None
    assert found.rows == (row("block-h1"),)
    assert table_of("NVIDIA H200") is found, "read once"
    assert table_of("NVIDIA H100 80GB HBM3") is table_of("NVIDIA A100-SXM4-80GB") is None
