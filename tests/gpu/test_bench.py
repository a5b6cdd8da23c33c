"""The bench on a real GPU: every method gated, timed and written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.backend import Effort
from lab.bench.cuda_backend import CudaBackend
from lab.bench.harness import run_bench
from lab.bench.points import Axes
from lab.bench.results import new_result, save
from lab.profiles.folders import ROWS_FILE
from lab.profiles.rows import read_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("chains")]

TREES = ("chain:0", "chain:3", "2,2,2")


def test_every_method_is_gated_and_timed(tmp_path: Path) -> None:
    backend = CudaBackend(eager=True)
    axes = Axes(backend.methods, (("Qwen3.5-35B-A3B", 1),), ("float32", "bfloat16"), (1, 33), TREES)
    points = axes.points()
    result = new_result(backend, {})
    run_bench(backend, points, result, effort=Effort(min_samples=3, limit_s=0.01))
    assert result.red == []
    assert result.skipped == []
    save(result, tmp_path / "profile")
    rows = read_rows(tmp_path / "profile" / ROWS_FILE)
    wanted = {p.key(phase, timer) for p in points for phase in backend.phases(p) for timer in backend.timers(phase)}
    assert {row.key for row in rows} == wanted
    assert all(row.latency_us_p50 and row.latency_us_p20 <= row.latency_us_p50 <= row.latency_us_p80 for row in rows)
    assert result.device["read_bandwidth_bytes_per_s"] > result.device["copy_bandwidth_bytes_per_s"] / 2
