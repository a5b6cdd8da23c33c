"""Numbers and short phrases as the report prints them; what is not a finite number is printed as a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reports.data import LoadField

DASH = "–"


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands separators and a fixed number of decimals."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits; whole numbers are not cut."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def plain(value: float) -> str:
    """A setting the way a user wrote it: 64, 0.75, 1e+06."""
    return f"{value:g}" if abs(value) < 1e15 else str(value)


def ratio(value: float | None) -> str:
    """A ratio such as 1.35x; beyond 100 its size says nothing more (one of the two is saturated)."""
    if value is not None and math.isfinite(value) and value > 100:
        return "> 100x"
    text = number(value, 2)
    return text if text == DASH else f"{text}x"


def percent(share: float | None) -> str:
    """A share (0-1) in per cent; a share that would round to 0 % is told apart from none."""
    if share is None or not math.isfinite(share):
        return DASH
    if 0 < share < 0.001:
        return "< 0.1\N{NO-BREAK SPACE}%"
    return f"{100 * share:.{1 if 0 < share < 0.1 else 0}f}\N{NO-BREAK SPACE}%"


def latencies(*values: float) -> list[str]:
    """Latencies given in ms, all in one unit: ms, or s when one of them reaches ten seconds."""
    known = [value for value in values if math.isfinite(value)]
    scale, unit = (1000, "s") if known and max(known) >= 10_000 else (1, "ms")
    return [f"{significant(value / scale)} {unit}" if math.isfinite(value) else DASH for value in values]


def quotient(above: float | None, below: float | None) -> float:
    """`above / below`, NaN where that is no finite number."""
    if above is None or below is None or below == 0:
        return math.nan
    value = above / below
    return value if math.isfinite(value) else math.nan


def listing(items: Sequence[str], word: str = "and") -> str:
    """a; a and b; a, b and c."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {word} {items[-1]}"


def counted(count: int, noun: str) -> str:
    """1 cell, 3 cells, no cells."""
    return f"{number(count) if count else 'no'} {noun}{'' if count == 1 else 's'}"


def load_phrase(field: LoadField, load: float) -> str:
    """A load in words, for sentences."""
    if field == "max_concurrency":
        return f"{plain(load)} concurrent request{'' if load == 1 else 's'}"
    if field == "request_rate":
        return f"{plain(load)} requests/s"
    return "the trace's own arrivals"


#: Title of the load axis in charts and tables.
LOAD_TITLES: dict[LoadField, str] = {
    "max_concurrency": "concurrent requests",
    "request_rate": "requests/s",
    "none": "load (the trace's clock)",
}
