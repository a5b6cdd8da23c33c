"""Every command in the README runs, and what it says about files is true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from lab.data import model_names
from lab.errors import InfeasibleError
from lab.methods import get_method
from lab.shapes import load_shape
from lab.trees import DraftTree
from reports import validation
from reports.serving import groups, halves
from reports.serving_rows import sorted_rows
from simulator.scenario import expand
from simulator.settings import EngineSettings
from simulator.stepcost import build_step_cost

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shell_commands(text: str) -> list[str]:
    """Lines of the `sh` blocks, continuation lines joined, comments dropped."""
    lines: list[str] = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines if line.strip()]


@pytest.mark.slow
def test_every_readme_command_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    binaries = Path(sys.executable).parent
    commands = [command for command in shell_commands(README) if not command.startswith("make ")]
    assert len(commands) > 8
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", f'export PATH="{binaries}:$PATH"; {command}'], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_readmes_scenario_is_valid() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert len(expand(yaml.safe_load(block))) == 2 * 2 * 2 * 3


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in shell_commands(README):
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in makefile


def covered(name: str) -> bool:
    """Whether the operator tables price a shipped model."""
    small = EngineSettings(max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64)
    try:
        build_step_cost(load_shape(name), "h200", 1, small, get_method("recurrent"), DraftTree.chain(0), 1.0)
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize("name", model_names())
def test_the_readme_names_the_models_that_can_be_simulated(name: str) -> None:
    named = re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", README) is not None
    assert named == covered(name)


@pytest.fixture(scope="module")
def evaluation() -> pl.DataFrame:
    """The published evaluation, simulated."""
    return validation.simulate_all(validation.scenarios(), jobs=2)


@pytest.mark.slow
def test_memory_of_the_published_evaluation_is_met(evaluation: pl.DataFrame) -> None:
    # arXiv 2608.20961, table 3: peak KV reduction 2.32 to 2.48, nobody waits below the knee
    for row in validation.table_3(evaluation):
        published, predicted = row["published"], row["predicted"]
        assert predicted["peak_kv_reduction"] == pytest.approx(published["peak_kv_reduction"], rel=0.05)
        assert predicted["batch_ratio"] == pytest.approx(1.0, abs=0.011)
        assert predicted["output_throughput_ratio"] == pytest.approx(published["output_throughput_ratio"], rel=0.12)


@pytest.mark.slow
def test_the_knee_lies_between_the_published_memory_budgets(evaluation: pl.DataFrame) -> None:
    knee = {row["utilization"]: row["at_256"] for row in validation.knees(evaluation)}
    assert knee[0.6] > 1.5
    assert 1.05 < knee[0.75] < knee[0.6]
    assert knee[0.9] == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_throughput_ratio_is_batch_ratio_over_tpot_ratio_once_saturated(evaluation: pl.DataFrame) -> None:
    found = validation.identity(validation.table_4(evaluation))
    assert found["throughput"] == pytest.approx(found["batch_over_tpot"], rel=0.03)


@pytest.mark.slow
def test_validation_page_is_what_the_command_writes(tmp_path: Path) -> None:
    """All but the published serving results, whose fits take minutes; test_serving.py fits a part of them."""
    validation.write_validation(tmp_path / "validation.md", serving_part=False)
    number = re.compile(r"\d+(?:\.\d+)?")
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    fresh = (tmp_path / "validation.md").read_text(encoding="utf-8").strip()
    kept = page.split("\n## Published serving results")[0].strip()
    assert number.sub("#", fresh) == number.sub("#", kept)
    simulated = len(number.findall(kept.split("\n## Two engine logs")[0]))  # beyond it stand fits, which amplify noise
    for i, (new, old) in enumerate(zip(number.findall(fresh), number.findall(kept), strict=True)):
        allowed = {"rel": 0.02, "abs": 0.011} if i < simulated else {"rel": 0.3, "abs": 0.5}
        assert float(new) == pytest.approx(float(old), **allowed)


def test_the_validation_page_counts_every_published_row() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    rows = sorted_rows()
    assert f"**Usable: {len(rows.usable)}.**" in page
    for reason, count in rows.reasons:
        assert f"| {reason} | {count} |" in page
    predicted, fitted = (sum(len(halves(group)[half]) for group in groups().values()) for half in (1, 0))
    assert f"**{predicted} rows predicted, {fitted} used for fits**" in page


def test_the_readme_quotes_the_validation_pages_errors_of_sglang() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"\| SGLang \| ([\d.]+) % \(\d+\) \| ([\d.]+) % .*\| ([\d.]+) % \(\d+\) \|\n", page)
    throughput, tpot, ttft = (round(float(error)) for error in row)
    quoted = f"off by {throughput} % in output throughput, {tpot} % in TPOT and {ttft} % in TTFT"
    assert quoted in " ".join(README.split())
