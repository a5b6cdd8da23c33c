"""What faster kernels bring to a service: two profiles under equal settings, and the section that says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_profiles import row, write_profile

from lab.errors import UsageError
from lab.methods import LayerHeads
from lab.profiles.attention import gpu_attention
from lab.profiles.kernels import load_profile
from lab.profiles.rows import read_rows
from lab.shapes import load_shape
from lab.trees import parse_tree
from reports.consequence import HEADING, earlier_profile, main, put_into, section
from reports.consequence_runs import METHOD, TREES, Consequence, consequences, paired
from simulator.replications import BASELINE
from simulator.scenario import read_yaml, replace_fields

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qwen3.5-35b-h200.yaml"
SPEED_UP = 4.0


def scenario(gpu: Path) -> dict[str, Any]:
    """The default report's scenario with few requests, on a profile."""
    small = {
        ("gpu",): str(gpu),
        ("workload", "max_concurrency"): [4, 16],
        ("workload", "num_requests"): 48,
        ("workload", "num_warmup_requests"): 16,
    }
    return replace_fields(read_yaml(EXAMPLE), small)


def profile(folder: Path, speed_up: float = 1.0) -> Path:
    """The earlier profile with its treelog steps so many times as fast."""
    rows = []
    for kept in read_rows(earlier_profile() / "kernels.csv"):
        assert kept.latency_us_p50 is not None
        factor = speed_up if kept.method == METHOD else 1.0
        rows.append(row(kept.method, kept.batch, kept.rows, kept.tree, latency_us_p50=kept.latency_us_p50 / factor))
    return write_profile(folder, rows, date="2026-01-02")


@pytest.fixture(scope="module")
def faster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile(tmp_path_factory.mktemp("faster"), SPEED_UP)


@pytest.fixture(scope="module")
def found(faster: Path) -> list[Consequence]:
    return consequences(scenario(faster), earlier_profile(), seeds=2, jobs=1)


@pytest.mark.parametrize("method", ["storeall", "treewy", METHOD])
@pytest.mark.parametrize("tree", [*TREES, "3,3,3"])
def test_the_earlier_profile_holds_what_the_default_report_looks_up(method: str, tree: str) -> None:
    heads = LayerHeads.of(load_shape("Qwen3.5-35B-A3B"), "float32")
    kept = load_profile(earlier_profile())
    requests = np.arange(1, 257)
    times = kept.step(method, heads, parse_tree(tree), requests)
    assert times is not None
    assert not times.extrapolated.any()
    named = {kept_row.batch: kept_row.latency_us_p50 for kept_row in kept.rows
             if (kept_row.method, kept_row.tree) == (method, {"1,1,1": "chain:3"}.get(tree, tree))}  # fmt: skip
    assert {b: times.latency_us[b - 1] for b in named if b <= 256} == {b: us for b, us in named.items() if b <= 256}


def test_the_earlier_profile_takes_the_shipped_gpus_attention() -> None:
    shipped = gpu_attention("h200")
    assert shipped is not None
    assert gpu_attention(str(earlier_profile())) == shipped


def test_the_comparison_is_at_the_largest_budget_and_load(found: list[Consequence]) -> None:
    assert [consequence.tree for consequence in found] == list(TREES)
    for consequence in found:
        assert [(run.method, run.earlier) for run in consequence.runs()] == [
            (BASELINE, True), (BASELINE, False), (METHOD, True), (METHOD, False)
        ]  # fmt: skip
        for run in consequence.runs():
            assert {row["gpu_memory_utilization"] for row in run.rows} == {0.9}
            assert {row["max_concurrency"] for row in run.rows} == {16}
            assert [row["seed"] for row in run.rows] == [0, 1]


def test_only_the_step_kernels_differ(found: list[Consequence]) -> None:
    """storeall's kernels are as fast in both, and so is its service; treelog's are faster, and so are its steps."""
    for consequence in found:
        before, after = consequence.kernel_us
        assert after == pytest.approx(before / SPEED_UP, rel=1e-3)  # kernels.csv holds three decimals
        assert paired(consequence.base, consequence.base_earlier, "mean_tpot_ms") == {"ratio": 1, "low": 1, "high": 1}
        assert consequence.base.rows[0]["mean_step_ms"] == consequence.base_earlier.rows[0]["mean_step_ms"]
        assert paired(consequence.ours, consequence.ours_earlier, "mean_tpot_ms")["high"] < 1


def test_throughput_gains_what_the_kernels_share_of_a_step_allows(found: list[Consequence]) -> None:
    for consequence in found:
        share = consequence.ours_earlier.kernel_share
        assert 0.01 < share < consequence.ours_earlier.mean("state_share")
        assert consequence.ceiling == pytest.approx(1 / (1 - share))
        expected = 1 / (1 - share * (1 - 1 / SPEED_UP))
        assert consequence.throughput == pytest.approx(expected, abs=0.2 * (expected - 1))


def test_a_kernels_share_is_its_time_over_a_steps(faster: Path) -> None:
    """One client: every step that decodes verifies one request, in 30 recurrent layers."""
    raw = replace_fields(scenario(faster), {("workload", "max_concurrency"): 1, ("workload", "num_requests"): 20})
    for consequence in consequences(raw, earlier_profile(), seeds=2, jobs=1):
        for run in consequence.runs():
            assert set(run.steps["decoding"]) == {0, 1}
            verifying_us = 30 * run.kernel_us([1])[0] * int(run.steps["decoding"].sum())
            assert run.kernel_share == pytest.approx(verifying_us / run.steps["duration_us"].sum())


def test_equal_profiles_are_said_to_bring_nothing(tmp_path: Path) -> None:
    text = section(scenario(profile(tmp_path / "same")), seeds=2, jobs=1)
    assert "a service sees no difference" in text
    assert text.count("| treelog, this profile over the earlier |" + " 1.000 (1.000 to 1.000) |" * 4) == len(TREES)


def test_the_section_says_what_arrives(faster: Path) -> None:
    text = section(scenario(faster), seeds=2, jobs=1)
    assert text.startswith(HEADING)
    assert str(faster) not in text
    assert text.count("(-75.0\N{NO-BREAK SPACE}%). Of that arrive -") == len(TREES)
    assert re.search(r"The change of treelog's kernels comes to \+\d+\.\d\s% with 1,1,1 and \+", text)
    assert text == section(scenario(faster), seeds=2, jobs=2)
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {11, 7}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({("gpu",): ["h200", "b200"]}, "name one GPU or profile"),
        ({("gpu",): str(earlier_profile())}, "another than the earlier one"),
        ({("engine", "max_num_seqs"): [128, 256]}, "give other fields one value"),
        ({("engine", "mamba_ssm_cache_dtype"): "bfloat16"}, "holds no step of treelog with bfloat16 states"),
    ],
)
def test_scenarios_that_cannot_be_compared_are_refused(changed: dict[Any, Any], message: str, faster: Path) -> None:
    with pytest.raises(UsageError, match=message):
        section(replace_fields(scenario(faster), changed), seeds=2, jobs=1)


def test_a_spread_needs_two_seeds(faster: Path) -> None:
    with pytest.raises(UsageError, match="needs 2 or more"):
        section(scenario(faster), seeds=1)


def test_the_command_says_how_it_is_called(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="usage: python -m reports"):
        main([])
    with pytest.raises(SystemExit, match="error: cannot read scenario"):
        main([str(tmp_path / "none.yaml")])


@pytest.mark.slow
def test_the_page_of_the_kernels_holds_what_the_command_prints() -> None:
    page = ROOT / "docs" / "kernels.md"
    if not page.is_file():
        pytest.skip("docs/kernels.md is not there")
    text = page.read_text(encoding="utf-8")
    assert HEADING in text
    kept = HEADING + text.split(HEADING)[1].split("\n## ")[0]
    fresh = section(read_yaml(EXAMPLE))
    number = re.compile(r"\d[\d,]*(?:\.\d+)?")
    assert number.sub("#", fresh).strip() == number.sub("#", kept).strip()
    for new, old in zip(number.findall(fresh), number.findall(kept), strict=True):
        assert float(new.replace(",", "")) == pytest.approx(float(old.replace(",", "")), rel=0.02, abs=0.011)


@pytest.mark.parametrize("after", ["", "\n## Next\n\nmore\n"])
def test_the_section_is_put_where_its_heading_stands(tmp_path: Path, after: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{HEADING}\n\nold words\n{after}", encoding="utf-8")
    put_into(page, f"{HEADING}\n\nnew words\n")
    assert page.read_text(encoding="utf-8") == f"# Page\n\n{HEADING}\n\nnew words\n{after}"
    page.write_text("# Page\n", encoding="utf-8")
    with pytest.raises(UsageError, match="add it where"):
        put_into(page, "text")
