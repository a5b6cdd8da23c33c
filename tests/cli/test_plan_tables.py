"""What doctor says of tables of plans: broken and missing ones are told, whatever reason a profile is kept for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kernel_profiles import write_profile

from lab.profiles import folders, plans
from lab.profiles.plans import PLANS_FILE, Place, PlanRow, write_plans

PLACE = Place(16, 32, 128, "float32", False, 32, 4, 16)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shipped profiles: that of the H200, kept for a reason, with a table of one place."""
    root = tmp_path / "shipped"
    for module in (folders, plans):
        monkeypatch.setattr(module, "SHIPPED", root)
    write_profile(root / "h200", stale_reason="comments only", sources={f"h200/{PLANS_FILE}": "hash"})
    (root / "h200" / PLANS_FILE).write_text(table("wide-h1-s1-r2", rows=16))
    return root


def table(plan: str, rows: int = 4) -> str:
    place = Place(16, 32, 128, "float32", False, 32, rows, 16)
    return write_plans([PlanRow(place, plan, 1.0, plan, 2.0)])


def said(call: Any) -> str:
    code, text, _ = call("doctor")
    assert code == 0
    return " ".join(text.split())


def test_a_table_that_can_be_read_is_counted(call: Any, shipped: Path) -> None:
    assert "kept because: comments only) table of plans: 1 places" in said(call)
    (profile,) = json.loads(call("doctor", "--json")[1])["profiles"]
    assert profile["plans"] == {"places": 1, "errors": []}


def test_a_broken_table_is_told(call: Any, shipped: Path) -> None:
    path = shipped / "h200" / PLANS_FILE
    path.write_text(path.read_text().replace(",128,", ",96,"))
    assert f"table of plans cannot be used: {path}, line 2: head_dim is 96; allowed are 64, 128" in said(call)
    path.unlink()
    path.mkdir()
    assert f"table of plans cannot be used: cannot read {path}: Is a directory" in said(call)


def test_a_missing_table_is_told_by_every_profile_that_was_measured_with_it(call: Any, shipped: Path) -> None:
    path = shipped / "h200" / PLANS_FILE
    path.unlink()
    assert f"table of plans cannot be used: {path} is missing, and the profile was measured with it; put it" in said(
        call
    )
    write_profile(folders.user_profiles() / "mine", stale_reason="kept", sources={f"h200/{PLANS_FILE}": "hash"})
    write_profile(folders.user_profiles() / "without", stale_reason="kept", sources={"serial.py": "hash"})
    found = {profile["name"]: profile["plans"] for profile in json.loads(call("doctor", "--json")[1])["profiles"]}
    assert found["h200"] == found["mine"]
    assert len(found["mine"]["errors"]) == 1
    assert found["without"] is None


@pytest.mark.parametrize("plan", ["block-h9-s1", "wide-h1-s1-r2"], ids=["of no verification", "of larger trees"])
def test_plans_that_would_be_passed_over_are_told(call: Any, shipped: Path, plan: str) -> None:
    path = shipped / "h200" / PLANS_FILE
    path.write_text(table(plan))
    words = (
        f"{path}: 1 of 1 rows name a plan that the kernels do not have there, such as {plan} for {PLACE}; tune again"
    )
    assert words in said(call)


def test_the_table_of_a_profile_that_cannot_be_read_is_read_all_the_same(call: Any, shipped: Path) -> None:
    (shipped / "h200" / "kernels.csv").write_text("nonsense")
    (shipped / "h200" / PLANS_FILE).write_text("nonsense")
    text = said(call)
    assert "h200 cannot be used: " in text
    assert "table of plans cannot be used: " in text


def test_a_table_without_a_profile_is_told_when_it_is_broken(call: Any, shipped: Path) -> None:
    shutil.copytree(shipped / "h200", shipped / "b200", ignore=lambda *_: ["kernels.csv", "device.json"])
    assert "profile b200" not in said(call)
    (shipped / "b200" / PLANS_FILE).write_text("nonsense")
    assert f"profile b200 cannot be used: {shipped / 'b200' / PLANS_FILE} has other columns" in said(call)
