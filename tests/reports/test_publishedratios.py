"""The ratios that stand beside published ones outside tables 3 and 4."""

from __future__ import annotations

import polars as pl
import pytest

from reports.publishedratios import FIGURE_3, REPLAY_T4, memory_bound, replay_t4


def test_the_gain_over_snapshots_grows_with_the_batch_and_stays_below_the_published_one() -> None:
    rows = replay_t4()
    assert [row["batch"] for row in rows] == list(REPLAY_T4)
    ours = [row["ours"] for row in rows]
    assert ours == sorted(ours)
    assert all(1 <= row["ours"] < row["published"] for row in rows)


def test_only_points_where_storeall_waits_for_memory_count() -> None:
    columns = ("output_throughput", "p99_ttft_ms", "mean_e2el_ms", "peak_kv_usage", "mean_tpot_ms")
    base = dict.fromkeys(columns, 1.0) | {"workload": "w", "gpu_memory_utilization": 0.6}
    cells = [
        base | {"state_method": method, "max_concurrency": load, "memory_bound": method == "storeall" and load == 256}
        for method in ("storeall", "treewy")
        for load in (1, 256)
    ]
    cells[-1] |= {"output_throughput": 2.0, "p99_ttft_ms": 0.25}
    found = memory_bound(pl.DataFrame(cells))
    assert (found["points"], found["of"]) == (1, 2)
    assert found["gains"] == pytest.approx(
        {"output throughput": 2, "p99 TTFT": 4, "mean E2EL": 1, "peak KV": 1, "speed per token": 1}
    )
    assert found["gains"].keys() == FIGURE_3.keys()
