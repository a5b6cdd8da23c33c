"""The rows of `attention.csv`: verify attention of one layer at one point of the grid.

`kernels_cupy.attention_bench` writes this file; its columns are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab.errors import UsageError
from lab.profiles.tables import table_lines


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One layer's verify attention on one rank; `context_tokens` are the tokens before the tree's `rows`.

    Latencies are microseconds; `bytes_moved` counts keys and values once, queries and outputs;
    `pct_copy_bandwidth` is those bytes per time against a copy measured in the same run.
    """

    gpu: str
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    page_tokens: int
    rows: int
    batch: int
    context_tokens: int
    timer: str
    latency_us_p50: float
    latency_us_p20: float
    latency_us_p80: float
    samples: int
    bytes_moved: int
    pct_copy_bandwidth: float
    row_blocks: int


def parse_rows(text: str, path: Path) -> Iterator[AttentionRow]:
    """Rows of the text of an `attention.csv`; `UsageError` naming file, line and what is wrong."""
    columns = {field.name: {"int": int, "float": float, "str": str}[str(field.type)] for field in fields(AttentionRow)}
    seen: set[tuple[Any, ...]] = set()
    for line, raw in table_lines(path, tuple(columns), "attention.csv", text):
        try:
            row = AttentionRow(**{name: of(raw[name]) for name, of in columns.items()})
        except (TypeError, ValueError) as error:
            raise UsageError(f"{line}: {error}; every column needs its value") from None
        if min(row.q_heads, row.kv_heads, row.rows, row.batch, row.context_tokens) < 1 or not row.latency_us_p50 > 0:
            raise UsageError(f"{line}: heads, rows, batch, context and time must be above 0")
        if not 0 < row.latency_us_p20 <= row.latency_us_p50 <= row.latency_us_p80 < math.inf:
            raise UsageError(f"{line}: times must be finite and p20 <= p50 <= p80")
        key = (row.q_heads, row.kv_heads, row.head_dim, row.kv_dtype, row.batch, row.context_tokens, row.rows)
        if key in seen:
            raise UsageError(f"{line}: a second row for {key}; keep one")
        seen.add(key)
        yield row
