"""Verdicts on two results."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_profiles import row, write_profile

from lab.bench.compare import compare, verdict_of
from lab.errors import UsageError
from lab.profiles.rows import KernelRow

SUMMARY = "cell,model,state_method,max_concurrency,seed,output_throughput,mean_ttft_ms,mean_tpot_ms\n"


def timed(p50: float, spread: float = 0.01, batch: int = 1, **changed: object) -> KernelRow:
    """A row whose 20th and 80th percentile lie `spread` (relative) around the median."""
    values = {"latency_us_p50": p50, "latency_us_p20": p50 * (1 - spread), "latency_us_p80": p50 * (1 + spread)}
    return row("treelog", batch, 1, "chain:0", **{**values, **changed})


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (timed(100), timed(101), "SAME"),
        (timed(100), timed(90), "FASTER"),
        (timed(100), timed(110), "SLOWER"),
        (timed(100, 0.10), timed(110, 0.10), "AMBIGUOUS"),  # the spreads overlap
        (timed(100), timed(102.5), "SLOWER"),
        (timed(100), timed(101.9), "SAME"),  # clear, but it does not matter
        (timed(100, 0.2), timed(100, 0.2), "AMBIGUOUS"),  # too noisy to be called the same
    ],
)
def test_verdicts_on_two_times(old: KernelRow, new: KernelRow, verdict: str) -> None:
    assert verdict_of(old, new, 0.02) == verdict


def folders(tmp_path: Path, a: list[KernelRow], b: list[KernelRow]) -> tuple[Path, Path]:
    return write_profile(tmp_path / "a", a), write_profile(tmp_path / "b", b)


def test_rows_are_matched_by_what_they_measured(tmp_path: Path) -> None:
    a = [timed(100, batch=1), timed(100, batch=2), timed(100, batch=4)]
    b = [timed(50, batch=2), timed(100, batch=1), timed(100, batch=8)]
    found = compare(*folders(tmp_path, a, b))
    assert [(each.key[6], each.verdict, each.ratio) for each in found.rows] == [(1, "SAME", 1.0), (2, "FASTER", 0.5)]
    assert ([key[6] for key in found.only_a], [key[6] for key in found.only_b]) == ([4], [8])
    assert not found.any_worse


def test_a_time_lost_to_a_red_gate_is_worse_and_one_gained_is_not(tmp_path: Path) -> None:
    none: dict[str, object] = {"latency_us_p50": None, "latency_us_p20": None, "latency_us_p80": None}
    a, b = folders(tmp_path, [timed(1)], [timed(1, **none)])
    lost, gained = compare(a, b), compare(b, a)
    assert (lost.rows[0].verdict, lost.rows[0].note, lost.any_worse) == ("AMBIGUOUS", "gate red in B", True)
    assert (gained.rows[0].verdict, gained.any_worse) == ("AMBIGUOUS", False)


def summary(path: Path, *lines: str) -> Path:
    path.mkdir()
    (path / "summary.csv").write_text(SUMMARY + "\n".join(lines) + "\n")
    return path


def test_cells_of_two_runs_are_judged_by_throughput_and_latency(tmp_path: Path) -> None:
    a = summary(tmp_path / "a", "0,M,x,1,0,100,10,5", "1,M,x,2,0,100,10,5", "2,M,x,4,0,100,10,5", "3,M,y,4,0,100,10,5")
    b = summary(tmp_path / "b", "0,M,x,2,0,110,10,4", "1,M,x,1,0,100,10,5", "2,M,x,4,0,110,20,5", "3,M,y,4,0,90,10,5")
    found = compare(a, b / "summary.csv")
    assert found.columns == ("state_method", "max_concurrency")
    assert {each.key: each.verdict for each in found.rows} == {
        ("x", "1"): "SAME", ("x", "2"): "FASTER", ("x", "4"): "AMBIGUOUS", ("y", "4"): "SLOWER",
    }  # fmt: skip
    assert found.any_worse


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("bench", "run", "compare two benches or two runs"),
        ("empty", "bench", "holds neither kernels.csv"),
        ("bench", "other", "no row in common"),
        ("run", "twice", "two cells that simulate the same"),
        ("bench", "other", "batch is 1 in A and 9 in B"),
        ("bench", "gone", "gone does not exist, and no profile has this name"),
        ("bench", "half", "half lacks device.json"),
        ("run", "broken", "mean_ttft_ms is 'x'"),
        ("run", "run-nan", "output_throughput is 'nan'; a positive number"),
        ("run", "run--1", "output_throughput is '-1'; a positive number"),
        ("run", "run-", "output_throughput is ''; a positive number"),
        ("run", "run-inf", "output_throughput is 'inf'; a positive number"),
        ("run", "nothing", "is no summary of a run"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, a: str, b: str, message: str) -> None:
    write_profile(tmp_path / "bench", [timed(1)])
    write_profile(tmp_path / "other", [timed(1, batch=9)])
    summary(tmp_path / "run", "0,M,x,1,0,100,10,5")
    summary(tmp_path / "twice", "0,M,x,1,0,100,10,5", "1,M,x,1,0,100,10,5")
    summary(tmp_path / "broken", "0,M,x,1,0,100,x,5")
    summary(tmp_path / "nothing")
    for value in ("nan", "-1", "", "inf"):
        summary(tmp_path / f"run-{value}", f"0,M,x,1,0,{value},10,5")
    (write_profile(tmp_path / "half", [timed(1)]) / "device.json").unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        compare(tmp_path / a, tmp_path / b)


def test_a_latency_that_one_side_lacks_leaves_the_verdict_open(tmp_path: Path) -> None:
    a = summary(tmp_path / "a", "0,M,x,1,0,100,10,", "1,M,y,1,0,100,10,5")
    b = summary(tmp_path / "b", "0,M,x,1,0,100,10,nan", "1,M,y,1,0,200,10,")
    assert [row.verdict for row in compare(a, b).rows] == ["SAME", "AMBIGUOUS"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ({"name": "another"}, "name differs: NVIDIA H200 in A, another in B"),
        ({"source_hash": "def"}, "source_hash differs: abc in A, def in B"),
        ({"threads": 4}, "threads differs: None in A, 4 in B"),
        ({"copy_bandwidth_bytes_per_s": 8 * 10**11}, "copies ran at 1,000.0 GB/s in A, 800.0 GB/s in B"),
        ({"runs": [{"copy_bandwidth_bytes_per_s": 5 * 10**11}]}, "1,000.0 GB/s in A, 500.0 GB/s in B"),
        ({"cores": 2, "load_average": [1.5, 1, 1]}, "B was measured on a busy machine (load 1.5 on 2 cores)"),
    ],
)
def test_benches_that_are_hard_to_compare_say_so(tmp_path: Path, device: dict[str, object], message: str) -> None:
    a, b = write_profile(tmp_path / "a", [timed(1)]), write_profile(tmp_path / "b", [timed(1)], **device)
    (warning,) = compare(a, b).warnings
    assert message in warning
    assert compare(a, a).warnings == ()


def test_copies_within_a_tenth_and_an_idle_machine_are_no_matter(tmp_path: Path) -> None:
    calm = {"cores": 2, "load_average": [0.9, 1, 1], "copy_bandwidth_bytes_per_s": 92 * 10**10}
    a, b = write_profile(tmp_path / "a", [timed(1)]), write_profile(tmp_path / "b", [timed(1)], **calm)
    assert compare(a, b).warnings == ()
