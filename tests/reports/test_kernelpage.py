"""`docs/kernels.md` says what the shipped profile and the table of targets say."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kernels_cupy.chained import cases as chained_cases
from lab.data import data_path, read_csv
from lab.errors import UsageError
from lab.profiles.rows import KernelRow, write_rows
from reports.evidence import H200
from reports.kernelcells import Cell, Kernel, OtherHeads, Steps, base_batch, cells, other_heads
from reports.kernelparts import PARTS, Record
from reports.kernels import fill, parts_of, pictures, write_page
from reports.roofline import METHODS_DRAWN, Spot, roofline_svg, spots, step_flop

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "kernels.md").read_text(encoding="utf-8")
STALE = "run `make kernels`: the page is not what the profile and kernel_targets.csv give"
TREES = ("chain:0", "chain:1", "chain:3", "chain:7", "binary:15", "binary:31", "binary:63")


def step(method: str, tree: str, rows: int, latency_us: float | None = 10.0, **more: object) -> KernelRow:
    """A step at heads 16/32, batch 8, fp32 state, one million bytes."""
    row = KernelRow(
        method, "step", 16, 32, 128, "float32", 8, rows, tree, "graph", latency_us, latency_us, latency_us, 9,
        1_000_000, None, 0.0, 0.0,
    )  # fmt: skip
    return replace(row, **more)


def marks(svg: str) -> list[str]:
    """What the points and lines of a picture stand for, as its labels for screen readers say."""
    return re.findall(r'aria-label="([^"]*)"', svg)


@pytest.mark.parametrize("name", PARTS)
def test_the_generated_parts_are_what_the_profile_gives(name: str) -> None:
    assert parts_of(PAGE)[name] == PARTS[name](Record()), STALE


@pytest.mark.parametrize("name", ["kernels-roofline-fp32.svg", "kernels-roofline-bf16.svg"])
def test_the_pictures_are_what_the_profile_gives(name: str) -> None:
    assert f"]({name})" in PAGE
    fresh = marks(pictures(Record())[name])
    assert sum("rows: " in mark for mark in fresh) > 100
    assert marks((DOCS / name).read_text(encoding="utf-8")) == fresh, STALE


def test_the_page_counts_the_cells() -> None:
    with data_path("kernel_targets.csv").open(encoding="utf-8") as file:
        targets = list(csv.DictReader(file))
    with (H200 / "kernels.csv").open(encoding="utf-8") as file:
        wanted = {"phase": "step", "key_heads": "16", "value_heads": "32"}
        rows = [row for row in csv.DictReader(file) if wanted.items() <= row.items()]
    judged = "chained" if any(row["timer"] == "chained" for row in rows) else "graph"
    timed = {
        (row["method"], row["tree"], row["state_dtype"], row["batch"]): row["latency_us_p50"]
        for row in rows
        if row["timer"] == judged
    }
    met = slower = missing = 0
    for target in targets:
        tree = f"{'binary' if target['kind'] == 'tree' else 'chain'}:{int(target['rows']) - 1}"
        time = timed.get(("treelog", tree, target["state_dtype"], target["batch"]))
        missing += time is None
        met += time is not None and float(time) <= float(target["target_us"])
        slower += time is not None and float(time) > float(target["public_us"])
    sentence = f"**{met} of 70 cells meet their target, {slower} of 70 are slower than the strongest public kernel.**"
    assert sentence in PAGE
    assert (f"{missing} have no time in this profile" in PAGE) == (missing > 0)


@pytest.mark.parametrize("name", ["Gram", "cursor", "cut"])
def test_a_term_is_explained_where_it_comes_first(name: str) -> None:
    first = re.search(rf"(\*?)\b{name}s?\b(\*?)", PAGE)
    assert first is not None
    assert first.groups() == ("*", "*"), first


def test_a_letter_stands_for_one_thing() -> None:
    assert "With T = (I + L)⁻¹" in PAGE
    assert re.findall(r"\bT = \d|\bT counts", PAGE) == []
    assert "N counts the rows of a chain" in PAGE


def test_errors_stand_beside_their_limits() -> None:
    gate = json.loads((H200 / "gate.json").read_text(encoding="utf-8"))["summary"]
    assert f"| treelog | bf16 | {gate['treelog bfloat16']['u']:.1e} / 4e-03 | " in parts_of(PAGE)["errors"]


def test_targets_are_a_whole_grid_and_below_the_public_times() -> None:
    targets = read_csv("kernel_targets.csv").rows(named=True)
    grid = {(row["state_dtype"], row["kind"], row["rows"], row["batch"]) for row in targets}
    kernels = [("decode", 1), *(("chain", rows) for rows in (2, 4, 8)), *(("tree", rows) for rows in (16, 32, 64))]
    assert len(targets) == len(grid) == 70
    assert grid == {
        (state, *kernel, batch)
        for state in ("float32", "bfloat16")
        for kernel in kernels
        for batch in (1, 8, 32, 128, 256)
    }
    assert all(0 < row["target_us"] < row["public_us"] for row in targets)


def test_the_page_says_what_each_public_kernel_is() -> None:
    for name in read_csv("kernel_targets.csv")["public_kernel"].unique():
        assert f"\n| {name} | " in PAGE


def test_kernels_have_the_trees_of_the_profile() -> None:
    kernels = {cell.kernel for cell in cells(Steps([]), Steps([]))}
    assert {kernel.tree for kernel in kernels} == set(TREES)
    assert {kernel.method for kernel in kernels} == {"treelog"}


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (None, "not measured"),
        (9.9, "met"),
        (10.0, "met"),
        (10.1, "missed"),
        (15.0, "missed"),
        (15.1, "slower than public"),
    ],
)
def test_the_verdict_of_a_cell(measured: float | None, verdict: str) -> None:
    assert Cell(Kernel.of("chain", 4), "float32", 8, 10.0, 15.0, "FLA", measured, 1).verdict == verdict


def test_a_floor_is_bytes_over_bandwidth() -> None:
    assert Cell(Kernel.of("decode", 1), "float32", 8, 1, 2, "FLA", 3, 4_000_000).floor_us(4e12) == pytest.approx(1.0)


def test_only_graph_replays_of_whole_steps_with_a_time_count() -> None:
    others = {
        "eager": {"timer": "eager"},
        "chained": {"timer": "chained"},
        "verify": {"phase": "verify"},
        "red": {"latency_us_p50": None},
    }
    for other in others.values():
        assert Steps([step("treelog", "chain:3", 4, **other)]).at("treelog", "chain:3", "float32", 8) is None
    assert Steps([step("treelog", "chain:3", 4)]).at("treelog", "chain:3", "float32", 8) is not None


def test_chained_steps_are_judged_with_the_time_alone_beside_them(tmp_path: Path) -> None:
    """Batch 8 of 4 rows: the target is 11 µs, the public kernel takes 15.1; batch 32 has no chained time."""
    rows = [step("treelog", "chain:3", 4, 10.0, timer="chained"), step("treelog", "chain:3", 4, 11.9)]
    rows.append(step("treelog", "chain:3", 4, 99.0, batch=32))
    found = {cell.batch: cell for cell in cells(Steps(rows), Steps(rows, "chained")) if cell.alone_us}
    assert {batch: (cell.measured_us, cell.alone_us) for batch, cell in found.items()} == {
        8: (10, 11.9),
        32: (None, 99),
    }
    assert (found[8].verdict, found[8].alone_verdict) == ("met", "missed")
    assert (found[32].verdict, found[32].alone_verdict) == ("not measured", "slower than public")
    record = record_of(tmp_path, rows)
    text = PARTS["score"](record)
    assert "**1 of 70 cells meet their target, 0 of 70 are slower than the strongest public kernel.** 69 have" in text
    assert "Alone, 0 meet it and 1 are slower.\n\nThese are times of *chained* launches" in text
    assert "| cells | met | missed, faster than public | slower than public | not measured | met alone |" in text
    assert "| fp32 state, chain of 4 rows | 1 | – | – | 4 | – | 1.51 to 1.51 |" in text
    text = PARTS["cells, fp32 state"](record)
    assert "| **10.0** / 11 = 0.91<br>alone 11.9 = 1.08<br>met<br>15.1 ReplaySSM (SGLang) |" in text
    assert "| not measured / 31<br>alone 99.0 = 3.19<br>42.7 ReplaySSM (vLLM fork) |" in text


def test_a_profile_without_chained_steps_speaks_of_none(tmp_path: Path) -> None:
    record = record_of(tmp_path, [step("treelog", "chain:3", 4)])
    own = set(PARTS) - {"ceilings", "errors"}  # which repeat what a profile says of itself
    assert not any(re.search("chained|alone", PARTS[name](record), re.IGNORECASE) for name in own)


def record_of(folder: Path, rows: list[KernelRow], **gate: object) -> Record:
    """A profile with these rows, and with more in its gate's record."""
    shutil.copy(H200 / "device.json", folder)
    known = json.loads((H200 / "gate.json").read_text(encoding="utf-8"))
    known.pop("chained", None)
    (folder / "gate.json").write_text(json.dumps(known | gate), encoding="utf-8")
    (folder / "kernels.csv").write_text(write_rows(rows), encoding="utf-8")
    return Record(folder)


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ([], "Chained launches wrote what the same launches write one after another, bit for bit, in all 1 cases"),
        (
            ["u of layer 1"],
            "**Chained launches differ from the same launches one after another in 1 of 1 cases** (treelog chain:0, ",
        ),
    ],
)
def test_the_page_says_what_the_gate_found_of_chained_launches(
    tmp_path: Path, differs: list[str], sentence: str
) -> None:
    entry = {**next(chained_cases()).record(), "plan": "stream-w4", "differs": differs}
    assert sentence in PARTS["errors"](record_of(tmp_path, [], chained=[entry]))


def test_other_heads_are_compared_by_time_per_byte() -> None:
    kernel = Kernel.of("chain", 4)
    base = step("treelog", "chain:3", 4, batch=64)
    more = step("treelog", "chain:3", 4, 18.0, batch=64, value_heads=48, bytes_moved=1_500_000)
    found = [other for other in other_heads(Steps([base, more]), [kernel], "float32") if other.ratio]
    assert found == [OtherHeads(kernel, "float32", (16, 48), 64, pytest.approx(1.2))]
    assert not found[0].within
    assert replace(found[0], ratio=1.15).within


def test_fewer_heads_are_compared_at_the_same_load() -> None:
    """64 requests with 8 value heads are as much work as 16 with 32."""
    kernel = Kernel.of("chain", 4)
    base = [step("treelog", "chain:3", 4, us, batch=batch) for batch, us in ((16, 10.0), (64, 30.0))]
    fewer = step("treelog", "chain:3", 4, 11.0, batch=64, key_heads=2, value_heads=8)
    found = [other for other in other_heads(Steps([*base, fewer]), [kernel], "float32") if other.ratio]
    assert found == [OtherHeads(kernel, "float32", (2, 8), 64, pytest.approx(1.1))]
    assert [base_batch(heads, 64) for heads in ((2, 8), (16, 32), (16, 48))] == [16, 64, 64]


@pytest.mark.parametrize(("rows", "megaflop"), [(1, 0.066), (4, 0.268), (8, 0.549), (16, 1.147)])
def test_flop_of_a_verification_over_no_log(rows: int, megaflop: float) -> None:
    """`bole` on a chain: 4 N d² + 3 N² d with two value heads per key head; the commit adds 2 d² per row, d² once."""
    row = step("bole", f"chain:{rows - 1}", rows)
    commit = (2 * max(0.6 * rows, 1.0) + 1) * 128 * 128
    assert step_flop(row) / 8 / 32 - commit == pytest.approx(megaflop * 1e6, rel=0.01)


def test_flop_of_a_log() -> None:
    """A log of 16 that takes one row a step: 16 steps per flush, 7.5 rows on average, 1.5 × 4 h N d for all heads."""
    verify = 4 * 128 * 128 + 3 * 128 + 6 * 7.5 * 128
    fold = (2 + 1 / 16) * 128 * 128
    assert step_flop(step("deltalog", "chain:0", 1)) / 8 / 32 == pytest.approx(verify + fold)


def test_flop_of_a_recurrence() -> None:
    assert step_flop(step("storeall", "binary:15", 16)) == 8 * 32 * 7 * 16 * 128 * 128


def test_a_step_at_the_memory_roof_reaches_all_of_it() -> None:
    spot = Spot("treelog", Kernel.of("chain", 4), 8, 4e6, 1_000_000, 0.25, 4e12)
    assert (spot.percent, spot.flop_per_byte) == (pytest.approx(100), 4)
    assert replace(spot, flop=990e6, time_us=2.0).percent == pytest.approx(50)  # the tensor cores need 1 µs


def test_all_methods_of_the_profile_are_drawn() -> None:
    record = Record()
    drawn = Counter(spot.method for spot in spots(record.steps, "float32", record.bandwidth))
    assert set(drawn) == set(METHODS_DRAWN) == {row.method for row in record.steps.rows}
    assert drawn["treelog"] == 2 * len(TREES)


def test_a_picture_of_nothing_has_its_roofs() -> None:
    assert any("copy bandwidth 4.00 TB/s" in mark for mark in marks(roofline_svg([], 4e12, "fp32")))


def test_another_profile_changes_the_numbers_and_leaves_the_prose(tmp_path: Path) -> None:
    for name in ("device.json", "gate.json"):
        shutil.copy(H200 / name, tmp_path)
    (tmp_path / "kernels.csv").write_text(write_rows([step("treelog", "chain:3", 4, 10.9)]), encoding="utf-8")
    page = tmp_path / "kernels.md"
    page.write_text(PAGE.replace("\n## Roofline\n", "\nA sentence of mine.\n\n## Roofline\n"), encoding="utf-8")
    write_page(page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "**1 of 70 cells meet their target, 0 of 70 are slower than the strongest public kernel.** 69 have" in text
    assert "**10.9** / 11 = 0.99<br>met<br>15.1 ReplaySSM (SGLang)" in text
    assert "\nA sentence of mine.\n" in text
    assert (tmp_path / "kernels-roofline-bf16.svg").is_file()
    text = text.replace("\nA sentence of mine.\n", "")
    assert fill(text, Record()) == fill(PAGE, Record())


@pytest.mark.parametrize("broken", ["<!-- generated: scores -->", "<!-- generated: floors -->"])
def test_a_page_whose_markers_do_not_fit_is_refused(broken: str) -> None:
    with pytest.raises(UsageError, match=r"each of ceilings, score, .* is needed once"):
        fill(PAGE.replace("<!-- generated: score -->", broken), Record())


def counted(folder: Path, *cells: dict[str, object]) -> str:
    """The page's counters with these changes to one cell of a record, a decode of 8 requests with an fp32 state."""
    one = json.loads((H200 / "counters.json").read_text(encoding="utf-8"))["cells"][0]
    one |= {"state_dtype": "float32", "tree": "chain:0", "batch": 8, "first_us": 8.0, "held_down_by": []}
    one |= {"sustained_us": 8.0, "sm_clock_mhz": 1980.0}
    record = {"seconds": 2.0, "cells": [one | cell for cell in cells]}
    (folder / "counters.json").write_text(json.dumps(record), encoding="utf-8")
    return PARTS["counters"](record_of(folder, [step("treelog", "chain:0", 1, 8.0)]))


def test_counters_stand_on_the_page() -> None:
    record = json.loads((H200 / "counters.json").read_text(encoding="utf-8"))
    assert parts_of(PAGE)["counters"].count("\n| ") == len(record["cells"]) > 10


def test_the_page_says_what_a_clock_that_is_held_down_costs(tmp_path: Path) -> None:
    """The target of the cell is 8.5 µs."""
    hot = {"held_down_by": ["power cap"], "sm_clock_mhz": 1500.0, "sustained_us": 8.8}
    text = counted(tmp_path, {}, hot, {**hot, "sm_clock_mhz": 1700.0, "sustained_us": 8.4})
    assert (
        "Replayed for 2 s, 2 of 3 cells have their clock held down (power cap): it falls to 1500 to 1700 MHz, and a "
        "step takes 5 to 10 % longer than at first." in text
    )
    assert text.endswith("miss the target that they meet: fp32 plain decode at batch 8 (8.8 µs / 8.5).")


def test_a_profile_without_counters_says_how_to_take_them(tmp_path: Path) -> None:
    assert "`python -m kernels_cupy.counters --out counters.json`" in PARTS["counters"](record_of(tmp_path, []))


def test_a_cool_gpu_is_not_said_to_be_held_down(tmp_path: Path) -> None:
    text = counted(tmp_path, {})
    assert text.count("\n| ") == 1
    assert "Replayed" not in text
    assert "miss the target" not in text


def test_kernels_for_older_gpus_are_told_where_the_gate_ran_them(tmp_path: Path) -> None:
    assert "compute_80" not in PARTS["errors"](record_of(tmp_path, []))
    case = {"failed": ["u"], "trees": 45}
    text = json.dumps({"device": "A GPU, compiled for compute_80", "cases": [case, {**case, "failed": []}]})
    (tmp_path / "gate_sm80.json").write_text(text, encoding="utf-8")
    sentence = "A GPU, compiled for compute_80 (`gate --quick --ptx 80`): 2 cases with 90 trees, 1 red."
    assert sentence in PARTS["errors"](record_of(tmp_path, []))


@pytest.mark.parametrize(("text", "words"), [(None, "is missing; give"), ("{", "is no JSON text"), ("\udcff", "is no")])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    record = record_of(tmp_path, [])
    gate = tmp_path / "gate.json"
    if text is None:
        gate.unlink()
    else:
        gate.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UsageError, match=re.escape(str(gate))) as caught:
        PARTS["errors"](record)
    assert words in str(caught.value)
