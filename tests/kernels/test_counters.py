"""Counters of the main cells: what is read of ncu's table, and what the command says where it cannot run."""

from __future__ import annotations

import csv
import io
import subprocess
from types import SimpleNamespace

import pytest

from kernels_cupy import counters
from lab.errors import MissingError

WAITS = {"long_scoreboard": "2.50", "selected": "1.00", "barrier": "1.50", "wait": "0"}


def table(launches: int, **changed: str) -> str:
    """What ncu prints: words of its own, then names, units and a line per launch."""
    values = {
        "ID": "0",
        "Kernel Name": "verify_stream",
        "gpu__time_duration.sum": "1,233,312",
        **dict.fromkeys(counters.COUNTERS.values(), "81.25"),
        **{f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": x for name, x in WAITS.items()},
        "smsp__average_warps_issue_stalled_barrier.ratio": "9",
    } | changed
    text = io.StringIO()
    writer = csv.DictWriter(text, list(values), quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerow(dict.fromkeys(values, "%"))
    writer.writerows([values] * launches)
    return f"==PROF== Connected to process 7\n==WARNING== clocks\n{text.getvalue()}"


def test_a_reading_has_a_time_in_microseconds_percent_and_shares_of_what_warps_wait_for() -> None:
    (found,) = counters.readings(table(1))
    assert found["launch_us"] == 1233.312
    assert {found[name] for name in counters.COUNTERS} == {81.25}
    assert found["waits"] == {"long_scoreboard": 50.0, "barrier": 30.0, "wait": 0.0}


def test_the_longest_waits_are_kept() -> None:
    more = {f"smsp__average_warps_issue_stalled_w{i}_per_issue_active.ratio": str(i) for i in range(1, 9)}
    (found,) = counters.readings(table(1, **more))
    assert list(found["waits"]) == ["w8", "w7", "w6", "w5", "w4"]


def test_every_launch_has_a_reading() -> None:
    assert len(counters.readings(table(3))) == 3
    assert counters.readings("==ERROR== no permission") == []


def test_cells_are_those_of_both_states_and_fit_the_kernels() -> None:
    found = counters.cells()
    assert len(found) == len(set(found)) == 2 * len(counters.CELLS)
    assert all(cell.shape.problem.rows == cell.shape.tree.num_rows for cell in found)


def test_without_ncu_the_error_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(MissingError, match="ncu is not on PATH; it comes with the CUDA toolkit"):
        counters.counters()


@pytest.mark.parametrize(
    ("code", "launches", "said"),
    [(1, 0, "ERR_NVGPUCTRPERM"), (0, 3, "gave counters of 3 launches, 20 are needed")],
)
def test_what_ncu_refuses_is_shown(monkeypatch: pytest.MonkeyPatch, code: int, launches: int, said: str) -> None:
    done = SimpleNamespace(returncode=code, stdout=table(launches), stderr="ERR_NVGPUCTRPERM")
    monkeypatch.setattr("shutil.which", lambda name: "/bin/ncu")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(MissingError, match=said):
        counters.counters()


def test_ncu_looks_at_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout=table(len(counters.cells())), stderr="")

    monkeypatch.setattr("shutil.which", lambda name: "/bin/ncu")
    monkeypatch.setattr(subprocess, "run", run)
    assert len(counters.counters()) == len(counters.cells())
    (command,) = asked
    assert command[:3] == ["/bin/ncu", "--clock-control", "none"]
    assert command[-3:] == ["-m", "kernels_cupy.counters", "--launches"]
