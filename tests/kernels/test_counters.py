"""Counters of the main cells: what is read of ncu's table, and what the command says where it cannot run."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from types import SimpleNamespace

import pytest

from kernels_cupy import counters
from kernels_cupy.compiler import KERNELS
from kernels_cupy.lanes_plans import LanesPlan
from kernels_cupy.plans import BlockPlan, StreamPlan
from kernels_cupy.wide_plans import WidePlan
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


def said_by(monkeypatch: pytest.MonkeyPatch, stdout: str, code: int = 0) -> str:
    """The sentence that `counters` ends with after this output of ncu."""
    done = SimpleNamespace(returncode=code, stdout=stdout, stderr="")
    monkeypatch.setattr("shutil.which", lambda name: "/bin/ncu")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(MissingError) as caught:
        counters.counters()
    return str(caught.value)


def test_what_ncu_refuses_is_shown_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n\n==PROF== Disconnected\n"
    said = said_by(monkeypatch, words, code=1)
    assert said == "ncu ended with 1 and said: ==ERROR== ERR_NVGPUCTRPERM - no permission"
    assert said_by(monkeypatch, '"ID","cut', code=9) == 'ncu ended with 9 and said: "ID","cut'
    assert said_by(monkeypatch, "", code=2) == "ncu ended with 2 and said: nothing"
    assert said_by(monkeypatch, table(3)).startswith("ncu gave counters of 3 launches, 20 are needed")


@pytest.mark.parametrize("value", ["n/a", "", "nan", "inf"])
def test_a_counter_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    name = counters.COUNTERS["l2"]
    assert said_by(monkeypatch, table(20, **{name: value})) == f"ncu gave {value!r} as {name}; a number is needed"


def test_a_table_that_is_cut_short_or_lacks_a_counter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ncu gave '' as " in said_by(monkeypatch, table(20) + '"0","verify"\n')
    assert "ncu gave no counter 'lts__thr" in said_by(monkeypatch, table(20).replace("lts__throughput", "lts__other"))


def test_ncu_looks_at_every_kernel_that_verifies() -> None:
    names = {plan_class.kernel for plan_class in (BlockPlan, StreamPlan, LanesPlan, WidePlan)}
    assert len(names) == 4
    assert all(re.search(counters.VERIFICATIONS, name) for name in names)
    others = {name for file, kernels in KERNELS.items() for name in kernels} - names - {"verify_attention"}
    assert not any(re.search(counters.VERIFICATIONS, name) for name in others)


def test_clock_and_power_are_read_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter(range(100))
    monkeypatch.setattr(counters, "clocks", lambda: {"sm_clock_mhz": next(read)})
    monkeypatch.setattr(counters, "power", lambda: {"power_w": 7.0})
    watch = counters.Watch(seconds=0.1)
    spent = [0.0, 0.001, 0.03, 0.06, 0.061, 0.09, 0.2]
    assert [watch([], at) for at in spent] == [False] * 6 + [True]
    assert watch.late() == [{"sm_clock_mhz": clock, "power_w": 7.0} for clock in (2, 3, 4)]
    short = counters.Watch(seconds=1e-4)
    assert short([], 0.5)
    assert len(short.late()) == 1


def test_without_clocks_nothing_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML that stops answering: readings that lack something are left out, and none at all is an error."""
    monkeypatch.setattr(counters, "clocks", dict)
    monkeypatch.setattr(counters, "power", lambda: {"power_w": 7.0})
    monkeypatch.setattr(counters, "trim_pool", lambda keep: None)
    monkeypatch.setattr(counters, "pass_layers", lambda shape: 8)
    step = SimpleNamespace(chained_step=None, release=lambda: None)
    monkeypatch.setattr(counters, "Step", lambda shape, layers: step)

    def time_graph(launch: object, enough: counters.Watch) -> list[float]:
        assert enough([], 9.0)
        return [8.0] * 9

    monkeypatch.setattr(counters.timer, "time_graph", time_graph)
    cell = counters.cells()[0]
    with pytest.raises(MissingError, match="NVML gave no clock or no power of this GPU; install"):
        counters.sustained(cell, 1.0)
    monkeypatch.setattr(counters, "clocks", lambda: {"sm_clock_mhz": 1980, "throttle_reasons": ["power cap"]})
    found = counters.sustained(cell, 1.0)
    assert found["first_us"] == found["sustained_us"] == 1.0
    assert (found["sm_clock_mhz"], found["power_w"], found["held_down_by"]) == (1980, 7, ["power cap"])


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
