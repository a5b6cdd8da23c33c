"""The report's table of methods that were compared seed by seed."""

from __future__ import annotations

from typing import Any

from reports.replications import PairedRow, replication_rows


class Paired:
    """A run directory as far as the table reads it."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self._entries = entries

    def entries(self, name: str) -> list[dict[str, Any]]:
        assert name == "replications"
        return [{"seeds": 3, "paired": list(self._entries)}]


def entry(**changed: Any) -> dict[str, Any]:
    where = {"model": "M", "gpu": "h200", "tree": "1,1", "request_rate": None, "max_concurrency": 8}
    found = {"metric": "output_throughput", "num_seeds": 3, "ratio": 1.25, "low": 1.2, "high": 1.3}
    return where | {"state_method": "treelog"} | found | changed


def rows(*entries: dict[str, Any]) -> list[PairedRow]:
    return replication_rows(Paired(*entries))  # type: ignore[arg-type]


def test_every_column_that_varies_is_shown() -> None:
    one, other = rows(entry(), entry(gpu="b200", max_concurrency=16))
    assert one.columns == other.columns == ("gpu", "tree", "max_concurrency")
    assert (one.setting, other.setting) == (("h200", "1,1", "8"), ("b200", "1,1", "16"))


def test_metrics_of_one_cell_share_a_row() -> None:
    (row,) = rows(entry(), entry(metric="mean_ttft_ms", ratio=0.5, low=0.4, high=0.6))
    assert row.ratios[:3] == ("1.250 (1.200 to 1.300)", "0.500 (0.400 to 0.600)", "–")
    assert row.columns == ("tree", "max_concurrency")


def test_a_dash_stands_for_the_interval_where_nothing_was_drawn() -> None:
    (row,) = rows(entry(low=None, high=None))
    assert row.ratios[0] == "1.250 (–)"
