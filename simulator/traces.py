"""Request traces: pairs of prompt and output length, with arrival times where the source has them.

A trace is a shipped one, by name, or a CSV file with the columns input_tokens, output_tokens and, for its
clock, t_s or t_ms; the header of the Azure LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens)
is understood as well. Rows are counted from 1, the header not included.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.data import data_path
from lab.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

MAX_TOKENS = np.iinfo(np.int32).max


class ShippedTrace(NamedTuple):
    """A trace of the package: its file, where it comes from, and whether it has time stamps."""

    file: str
    source: str
    has_clock: bool


SHIPPED: dict[str, ShippedTrace] = {
    "azure-conv": ShippedTrace("azure_conv_2023.csv.gz", "Azure LLM inference trace 2023, conversation, 1 h", True),
    "azure-code": ShippedTrace("azure_code_2023.csv.gz", "Azure LLM inference trace 2023, code, 1 h", True),
    "mooncake-conversation": ShippedTrace("mooncake_conversation.csv.gz", "Mooncake trace, conversation, 1 h", True),
    "sharegpt": ShippedTrace(
        "sharegpt_first_pairs.csv.gz",
        "ShareGPT first pairs of 4 tokens or more each, prompt <= 1024, sum <= 2048 (benchmark filter)",
        False,
    ),
    "arxiv-summarization": ShippedTrace(
        "arxiv_summarization.csv.gz", "arXiv papers and their summaries, as processed by Vidur", False
    ),
}

#: Header of the original Azure files -> our column.
_AZURE_NAMES = {"TIMESTAMP": "timestamp", "ContextTokens": "input_tokens", "GeneratedTokens": "output_tokens"}
_TIME_UNITS_S = {"t_s": 1.0, "t_ms": 1e-3}


class Trace(NamedTuple):
    """Requests in the order of the source; rows without input or output tokens are left out and counted."""

    source: str
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrival_s: NDArray[np.float64] | None  # non-decreasing, from 0; None when no clock was asked for
    num_dropped: int


def load_trace(name: str, *, clock: bool = False) -> Trace:
    """A shipped trace or a CSV file, with its time stamps when `clock` is set.

    Raises `UsageError` that names the file, the column and the row.
    """
    if name in SHIPPED:
        return _shipped(name, clock)
    if len(name) > 4096 or not Path(name).is_file():
        known = ", ".join(SHIPPED)
        raise UsageError(f"workload.trace = '{name[:200]}': neither a shipped trace ({known}) nor a file")
    stat = Path(name).stat()
    return _parsed(name, clock, stat.st_mtime_ns, stat.st_size)


@cache
def _parsed(name: str, clock: bool, mtime_ns: int, size: int) -> Trace:
    """A user's file, read once as long as its time and size stay the same."""
    return _parse(_read(Path(name)), name, name, clock)


@cache
def _shipped(name: str, clock: bool) -> Trace:
    shipped = SHIPPED[name]
    if clock and not shipped.has_clock:
        timed = ", ".join(key for key, value in SHIPPED.items() if value.has_clock)
        raise UsageError(
            f"workload.trace = '{name}' has no time stamps, which arrivals 'trace' needs; traces with a clock: {timed}"
        )
    frame = _read(data_path("traces", shipped.file))
    if "vllm_filter" in frame.columns:
        frame = frame.filter(frame["vllm_filter"] == "1")
    trace = _parse(frame, name, shipped.source, clock)
    for column in (trace.prompt_tokens, trace.output_tokens, trace.arrival_s):
        if column is not None:
            column.flags.writeable = False
    return trace


#: Largest time stamp in seconds.
LATEST_S = 1e10


def _read(path: Path) -> pl.DataFrame:
    """The file with every column as text, so that a bad value can be shown as it stands there."""
    import polars as pl

    try:
        frame = pl.read_csv(path, infer_schema=False, glob=False)
        return frame.rename({column: column.strip() for column in frame.columns})
    except pl.exceptions.NoDataError:
        raise UsageError(f"trace {path} is empty; its first line must name the columns") from None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UsageError(f"trace {path} cannot be read as CSV: {str(error).splitlines()[0]}") from None


def _parse(frame: pl.DataFrame, name: str, source: str, clock: bool) -> Trace:
    if set(_AZURE_NAMES) <= set(frame.columns):
        frame = frame.rename(_AZURE_NAMES)
    for column in ("input_tokens", "output_tokens"):
        if column not in frame.columns:
            raise UsageError(f"trace {name} has no column {column}; found {', '.join(frame.columns)}")
    if frame.is_empty():
        raise UsageError(f"trace {name} holds no rows")
    prompt, output = (_tokens(frame, name, column) for column in ("input_tokens", "output_tokens"))
    keep = (prompt > 0) & (output > 0)
    if not keep.any():
        raise UsageError(f"trace {name} holds no row with both input and output tokens")
    arrival_s = _clock(frame, name)[keep] if clock else None
    if arrival_s is not None:
        arrival_s = arrival_s - arrival_s[0]
    return Trace(source, prompt[keep], output[keep], arrival_s, int(len(keep) - keep.sum()))


def _numbers(frame: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """A text column as float64; NaN where it is not a number."""
    import polars as pl

    numbers = frame[column].str.strip_chars().cast(pl.Float64, strict=False)
    return np.array(numbers.fill_null(float("nan")), dtype=np.float64)


def _tokens(frame: pl.DataFrame, name: str, column: str) -> NDArray[np.int32]:
    values = _numbers(frame, column)
    with np.errstate(invalid="ignore"):
        good = (values >= 0) & (values <= MAX_TOKENS) & (values == np.floor(values))
    _require(good, frame, name, column, f"a whole number from 0 to {MAX_TOKENS}")
    return values.astype(np.int32)


def _clock(frame: pl.DataFrame, name: str) -> NDArray[np.float64]:
    """Time stamps in seconds, in the order of the file."""
    import polars as pl

    column = next((column for column in (*_TIME_UNITS_S, "timestamp") if column in frame.columns), None)
    if column is None:
        raise UsageError(f"trace {name} has no column t_s or t_ms, which arrivals 'trace' needs")
    if column == "timestamp":
        text = frame[column].str.strip_chars().str.replace(r"(Z|[+-]\d\d:?\d\d)$", "")
        stamps = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False).cast(pl.Int64)
        offsets = (stamps - (stamps.min() or 0)).cast(pl.Float64)
        time_s = np.array(offsets.fill_null(float("nan")), dtype=np.float64) * 1e-9
        column = "TIMESTAMP"
        frame = frame.rename({"timestamp": column})
        allowed = "a time like 2023-11-16 18:17:03.979960"
    else:
        time_s = _numbers(frame, column) * _TIME_UNITS_S[column]
        allowed = f"a time from 0 to {LATEST_S:.0e} s"
    with np.errstate(invalid="ignore"):
        _require((time_s >= 0) & (time_s <= LATEST_S), frame, name, column, allowed)
    back = np.flatnonzero(np.diff(time_s) < 0)
    if back.size:
        row = int(back[0]) + 1
        value = frame[column][row]
        raise UsageError(
            f"trace {name}, column {column}, row {row + 1}: {value} is earlier than the row before; "
            "sort the file by time"
        )
    return time_s


def _require(good: NDArray[np.bool_], frame: pl.DataFrame, name: str, column: str, allowed: str) -> None:
    bad = np.flatnonzero(~good)
    if bad.size:
        value = frame[column][int(bad[0])]
        shown = "an empty field" if value is None or not value.strip() else repr(value)
        raise UsageError(f"trace {name}, column {column}, row {int(bad[0]) + 1}: {shown} is not {allowed}")
