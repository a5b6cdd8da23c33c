"""The flush rule that all log-structured methods share."""

from __future__ import annotations


def steps_per_flush(capacity_rows: int, longest_append: int, rows_committed: float) -> float:
    """Expected steps between two flushes.

    A step may append up to `longest_append` rows, so it flushes first when fewer are free. With `rows_committed` rows
    appended per step on average, F = (capacity - longest_append) / rows_committed + 1.
    """
    return max(capacity_rows - longest_append, 0) / max(rows_committed, 1e-9) + 1


def mean_log_rows(flush_steps: float, rows_committed: float) -> float:
    """Mean rows in the log when a step starts: it climbs from 0 by `rows_committed` a step, then falls back."""
    return (flush_steps - 1) * rows_committed / 2
