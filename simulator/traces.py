"""Request traces: pairs of prompt and output length, with arrival times where the source has them.

A trace is a shipped one, by name, or a CSV file with the columns input_tokens, output_tokens and, for its
clock, t_s or t_ms; conversation, hash_ids and priority are read where they are there (`simulator.settings` says what
they mean); the header of the Azure LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens)
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
MAX_PRIORITY = 1000


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
    "sharegpt-multiturn": ShippedTrace(
        "sharegpt_multiturn.csv.gz", "ShareGPT conversations, every prompt with its history, up to 16,384 tokens", False
    ),
    "arxiv-summarization": ShippedTrace(
        "arxiv_summarization.csv.gz", "arXiv papers and their summaries, as processed by Vidur", False
    ),
}

#: Header of the original Azure files -> our column.
_AZURE_NAMES = {"TIMESTAMP": "timestamp", "ContextTokens": "input_tokens", "GeneratedTokens": "output_tokens"}
_TIME_UNITS_S = {"t_s": 1.0, "t_ms": 1e-3}


class HashIds(NamedTuple):
    """Numbers of the units of every prompt: those of row i are `ids[start[i]:start[i + 1]]`."""

    start: NDArray[np.int64]
    ids: NDArray[np.int64]

    def of(self, rows: NDArray[np.int64], offset: NDArray[np.int64]) -> HashIds:
        """The units of the given rows, each number raised by its row's offset."""
        counts = self.start[rows + 1] - self.start[rows]
        start = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(start[-1]) + np.repeat(self.start[rows] - start[:-1], counts)
        return HashIds(start, self.ids[places] + np.repeat(offset, counts))


class Trace(NamedTuple):
    """Requests in the order of the source; rows without input or output tokens are left out and counted.

    Conversations are numbered from 0. Where no clock was asked for, their turns stand together.
    """

    source: str
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrival_s: NDArray[np.float64] | None  # non-decreasing, from 0; None when no clock was asked for
    num_dropped: int
    conversation: NDArray[np.int64] | None = None
    priority: NDArray[np.int32] | None = None
    hash_ids: HashIds | None = None


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
    for column in trace:
        if isinstance(column, np.ndarray):
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
    rows = np.flatnonzero(keep)
    conversation = None
    if "conversation" in frame.columns:
        conversation = _numbered(frame["conversation"])[rows]
        if not clock:
            order = np.argsort(conversation, kind="stable")
            rows, conversation = rows[order], conversation[order]
    hash_ids = None
    if "hash_ids" in frame.columns:
        hash_ids = _hash_ids(frame, name).of(rows, np.zeros(len(rows), np.int64))
    priority = _priorities(frame, name)[rows] if "priority" in frame.columns else None
    dropped = int(len(keep) - keep.sum())
    return Trace(source, prompt[rows], output[rows], arrival_s, dropped, conversation, priority, hash_ids)


def _numbered(column: pl.Series) -> NDArray[np.int64]:
    """Numbers from 0 for the values of a column as they first appear; an empty field has a number of its own."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(value or f"\0{row}", len(numbers)) for row, value in enumerate(column)]
    return np.array(found, dtype=np.int64)


def _hash_ids(frame: pl.DataFrame, name: str) -> HashIds:
    import polars as pl

    lists = frame["hash_ids"].fill_null("").str.strip_chars().str.split(" ")
    counts = lists.list.len().to_numpy().astype(np.int64)
    ids = lists.explode(empty_as_null=False).cast(pl.Int64, strict=False)
    if ids.null_count():
        empty = lists.list.eval(pl.element().cast(pl.Int64, strict=False).is_null().any()).list.first().to_numpy()
        _require(~empty, frame, name, "hash_ids", "a list of whole numbers with spaces between them")
    return HashIds(np.concatenate([[0], np.cumsum(counts)]), ids.to_numpy().astype(np.int64))


def _priorities(frame: pl.DataFrame, name: str) -> NDArray[np.int32]:
    values = _numbers(frame, "priority")
    with np.errstate(invalid="ignore"):
        good = (np.abs(values) <= MAX_PRIORITY) & (values == np.floor(values))
    _require(good, frame, name, "priority", f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return values.astype(np.int32)


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
