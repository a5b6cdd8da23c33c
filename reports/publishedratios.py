"""Two published sets of ratios beside ours: the memory-bound points of TreeWY, and ReplaySSM against snapshots.

Sources: arXiv 2608.20961, figure 3, 35B; vLLM pull request 49887, Qwen3.5-122B, three drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from lab.methods import get_method
from lab.shapes import load_shape
from lab.trees import DraftTree
from simulator.settings import EngineSettings, HostSettings
from simulator.stepcost import build_step_cost, step_breakdown

#: Figure 3: quantity -> what TreeWY gains over storeall where memory binds.
FIGURE_3 = {
    "output throughput": 1.15,
    "p99 TTFT": 2.94,
    "mean E2EL": 1.17,
    "peak KV": 1.60,
    "speed per token": 0.83,
}
#: Columns of a summary, and whether more is better.
_COLUMNS = {
    "output throughput": ("output_throughput", True),
    "p99 TTFT": ("p99_ttft_ms", False),
    "mean E2EL": ("mean_e2el_ms", False),
    "peak KV": ("peak_kv_usage", False),
    "speed per token": ("mean_tpot_ms", False),
}
#: Batch -> throughput of ReplaySSM over storeall (NVFP4 weights, one B300).
REPLAY_T4 = {1: 1.12, 32: 1.22, 128: 1.43, 256: 1.79, 512: 2.10}
REPLAY_CONTEXT, REPLAY_ROWS_COMMITTED = 1024, 2.4


def memory_bound(summary: pl.DataFrame) -> dict[str, Any]:
    """Geometric means of TreeWY's gains over the points where storeall waits for memory, and how many these are."""
    keys = ["workload", "gpu_memory_utilization", "max_concurrency"]
    base, ours = (
        summary.filter(pl.col("state_method") == name).sort(keys) for name in ("storeall", "treewy")
    )  # fmt: skip
    bound = base["memory_bound"].to_numpy()
    gains = {}
    for name, (column, more) in _COLUMNS.items():
        ratio = (ours[column].to_numpy() / base[column].to_numpy())[bound]
        gains[name] = float(np.exp(np.log(ratio if more else 1 / ratio).mean()))
    return {"points": int(bound.sum()), "of": len(bound), "gains": gains, "published": FIGURE_3}


def replay_t4() -> list[dict[str, float]]:
    """Step time of storeall over that of ReplaySSM by batch, a chain of 4 rows: throughput at equal acceptance."""
    shape, chain = load_shape("Qwen3.5-122B-A10B"), DraftTree.chain(3)
    engine = EngineSettings(max_num_seqs=max(REPLAY_T4), max_model_len=4096, weight_dtype="fp8_block128")
    costs = {
        name: build_step_cost(shape, "b200", 1, engine, get_method(name), chain, REPLAY_ROWS_COMMITTED)
        for name in ("storeall", "replayssm")
    }
    rows = []
    for batch, published in REPLAY_T4.items():
        times = {
            name: sum(step_breakdown(cost, batch, REPLAY_CONTEXT).values()) / 1e3 + HostSettings().ms_per_step
            for name, cost in costs.items()
        }
        rows.append({"batch": batch, "ours": times["storeall"] / times["replayssm"], "published": published})
    return rows
