"""Synthetic verify attention on disk: times linear in batch, context and padded rows, so that look-ups are known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from lab.profiles.attention import DEVICE_FILE, ROWS_FILE, padded_rows
from lab.profiles.attentionrows import AttentionRow

BATCHES, CONTEXTS, ROWS = (1, 8, 64), (128, 2048, 32_768), (1, 4, 16, 64)
BLOCK_ROWS = (16, 32, 64, 128)
COLUMNS = tuple(field.name for field in fields(AttentionRow))


def attention_us(batch: float, context: float, rows: float, q_heads: int = 16, kv_heads: int = 2) -> float:
    """A fixed part, and one in proportion to KV heads of all requests, their tokens and the rows that are worked on."""
    padded = padded_rows(rows * q_heads / kv_heads, BLOCK_ROWS)
    return 40.0 + 1e-3 * batch * kv_heads * context * (1 + padded / 64)


def row(
    batch: int, context: int, rows: int, q_heads: int = 16, kv_heads: int = 2, **changed: object
) -> dict[str, object]:
    latency = attention_us(batch, context, rows, q_heads, kv_heads)
    return {
        "gpu": "h200", "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 256, "kv_dtype": "bf16",
        "page_tokens": 1056, "rows": rows, "batch": batch, "context_tokens": context, "timer": "graph",
        "latency_us_p50": latency, "latency_us_p20": latency, "latency_us_p80": latency, "samples": 9,
        "bytes_moved": 1000, "pct_copy_bandwidth": 50.0, "row_blocks": 1,
    } | changed  # fmt: skip


def grid_rows(q_heads: int = 16, kv_heads: int = 2) -> list[dict[str, object]]:
    """The grid without its largest batch at the longest context, whose cache would not fit."""
    return [
        row(batch, context, rows, q_heads, kv_heads)
        for batch in BATCHES
        for context in CONTEXTS
        for rows in ROWS
        if (batch, context) != (BATCHES[-1], CONTEXTS[-1])
    ]


def write_attention(folder: Path, rows: Iterable[dict[str, object]] | None = None, name: str = "NVIDIA H200") -> Path:
    """Verify attention in a profile's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(COLUMNS)]
    lines += [",".join(str(row[column]) for column in COLUMNS) for row in (grid_rows() if rows is None else rows)]
    (folder / ROWS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / DEVICE_FILE).write_text(json.dumps({"name": name, "block_rows": BLOCK_ROWS}), encoding="utf-8")
    return folder
