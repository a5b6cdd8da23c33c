"""`treewy compare`: what it prints and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernel_profiles import grid_rows, row, write_profile


@pytest.fixture
def call(call: Any) -> Any:
    """The verb's own calls."""
    return lambda *arguments: call("compare", *arguments)


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Two benches: in the second one row is twice as slow, one is missing and one is new."""
    rows = grid_rows(("treelog",))
    slow = {"latency_us_p50": 99.0, "latency_us_p20": 98.0, "latency_us_p80": 100.0}
    changed = [row("treelog", 1, 1, "chain:0", **slow), *rows[2:], row("bole", 3, 1, "chain:0")]
    return str(write_profile(tmp_path / "a", rows)), str(write_profile(tmp_path / "b", changed))


def test_every_row_gets_a_verdict_and_lonely_rows_are_listed(call: Any, two: tuple[str, str]) -> None:
    code, out, err = call(*two)
    assert code == 0
    assert out.count("SLOWER") == 1
    assert "only in A: treelog, step, 16, 32, 128, float32, 1, 2, chain:1, graph" in out
    assert "only in B: bole, step" in out
    assert "0 FASTER, 1 SLOWER, 0 AMBIGUOUS" in err


def test_fail_on_slower_exits_with_1_only_when_a_row_is_slower(call: Any, two: tuple[str, str]) -> None:
    assert call(*two, "--fail-on", "slower")[0] == 1
    assert call(*reversed(two), "--fail-on", "slower")[0] == 0
    assert call(two[0], two[0], "--fail-on", "slower")[0] == 0


def test_json_names_the_columns(call: Any, two: tuple[str, str]) -> None:
    code, out, _ = call(*two, "--json", "--fail-on", "slower")
    result = json.loads(out)
    assert code == 1
    (slower,) = [each for each in result["rows"] if each["verdict"] == "SLOWER"]
    assert (slower["method"], slower["batch"], slower["timer"]) == ("treelog", 1, "graph")
    assert result["only_b"][0]["method"] == "bole"


def test_unusable_input_is_one_sentence_and_exit_2(call: Any, two: tuple[str, str], tmp_path: Path) -> None:
    assert call(two[0], str(tmp_path))[0] == 2
    code, _, err = call(*two, "--fail-on", "anything")
    assert code == 2
    assert "--fail-on is 'anything'" in err


def test_profiles_are_compared_by_their_names(call: Any, tmp_path: Path) -> None:
    rows = grid_rows(("treelog",))
    write_profile(tmp_path / "home" / "treewy-lab" / "profiles" / "mine", rows, name="My CPU")
    write_profile(tmp_path / "other", rows)
    code, out, err = call("mine", str(tmp_path / "other"), "--json")
    assert code == 0
    assert "warning: name differs: My CPU in A, NVIDIA H200 in B" in err
    assert json.loads(out)["warnings"] == ["name differs: My CPU in A, NVIDIA H200 in B"]
    assert call("h200", "h200")[0] == 0
