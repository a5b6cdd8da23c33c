"""Measures verify attention on this GPU: the gate first, then a grid of shapes, into `attention.csv`.

`python -m kernels_cupy.attention_bench --out DIR [--heads 16x2,24x4] [--limit-s 300]`

Times are per layer and hold both launches. A sequence covers several layers with caches of their own (more than twice
the L2 cache in all), is captured into a CUDA graph and replayed. A red gate ends the run before anything is timed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kernels_cupy import attention_gate, commandline
from kernels_cupy.attention import (
    HEAD_DIM,
    AttentionPlan,
    Scratch,
    VerifyAttention,
    block_rows,
    bytes_moved,
    kernel_hash,
    plan_here,
)
from kernels_cupy.compiler import load_cupy, multiprocessors
from kernels_cupy.device import clocks, device_record
from kernels_cupy.timer import Enough, copy_bandwidth, read_bandwidth, time_graph
from lab.errors import UsageError
from lab.files import check_writable
from lab.trees import DraftTree

#: Query x KV heads of one rank: the models' own, then two of their parts under tensor parallelism.
HEADS = ("16x2", "24x4", "32x2", "16x4", "8x1", "4x1")
ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 4096, 8192, 32_768, 131_072)
BATCHES = (1, 4, 16, 32, 64, 128, 256)
#: Parts with as many query heads per KV head as a whole model are measured on every other point: they only check that
#: KV heads count like requests.
PARTS = {"8x1": "16x2", "4x1": "16x4"}
#: Tokens of a page in vLLM's pool for a hybrid model: a page of attention holds a recurrent state.
PAGE_TOKENS = 1056
#: Layers cover at least this many times the L2 cache, with at most so many layers.
CACHE_COVER, MAX_LAYERS = 2.2, 96
#: Largest cache of a layer that is measured, and the pool that all layers take their pages from.
MAX_LAYER_BYTES, POOL_BYTES = 9_000_000_000, 10_500_000_000
FILES = ("attention.csv", "attention_device.json")
COLUMNS = (
    "gpu", "q_heads", "kv_heads", "head_dim", "kv_dtype", "page_tokens", "rows", "batch", "context_tokens", "timer",
    "latency_us_p50", "latency_us_p20", "latency_us_p80", "samples", "bytes_moved", "pct_copy_bandwidth", "row_blocks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One layer: heads of a rank, `rows` rows and `context` cached tokens for each of `batch` requests."""

    q_heads: int
    kv_heads: int
    rows: int
    batch: int
    context: int

    @property
    def seq_lens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.full(self.batch, self.context + self.rows, np.int32)

    @property
    def bytes_moved(self) -> int:
        return bytes_moved(self.q_heads, self.kv_heads, self.rows, self.seq_lens)

    @property
    def pages_per_request(self) -> int:
        return math.ceil((self.context + self.rows) / PAGE_TOKENS)


def points(heads: list[str], rows: list[int], contexts: list[int], batches: list[int]) -> Iterator[Point]:
    for pair, number, context, batch in product(heads, rows, contexts, batches):
        if PARTS.get(pair) in heads and (number in rows[1::2] or context in contexts[::2] or batch in batches[1::2]):
            continue
        q_heads, kv_heads = map(int, pair.split("x"))
        point = Point(q_heads, kv_heads, number, batch, context)
        if point.bytes_moved <= MAX_LAYER_BYTES:
            yield point


class Pool:
    """Random keys and values that every point takes its pages from; large enough that no page serves two layers."""

    def __init__(self, nbytes: int) -> None:
        cp = load_cupy()
        words = cp.empty(nbytes // 2, np.uint16)
        seed = cp.random.default_rng(1).standard_normal(1 << 24, dtype=np.float32)
        bits = (seed.view(np.uint32) >> 16).astype(np.uint16)
        for start in range(0, len(words), len(bits)):
            part = words[start : start + len(bits)]
            part[...] = bits[: len(part)]
        self.words = words

    def pages(self, kv_heads: int) -> Any:
        """`[pages, 2, page tokens, HKV, 256]`: keys, then values of a page."""
        page = 2 * PAGE_TOKENS * kv_heads * HEAD_DIM
        count = len(self.words) // page
        return self.words[: count * page].reshape(count, 2, PAGE_TOKENS, kv_heads, HEAD_DIM)


class Layers:
    """The launches of several layers of one point."""

    def __init__(self, point: Point, pool: Pool, plan: AttentionPlan | None = None, **options: Any) -> None:
        cp = load_cupy()
        plan = plan or plan_here(point.rows * point.q_heads // point.kv_heads)
        scratch = _scratch(plan.ctas * multiprocessors(), plan.layout.rows, point.batch)
        pages = pool.pages(point.kv_heads)
        l2_bytes = cp.cuda.Device().attributes["L2CacheSize"]
        needed = point.batch * point.pages_per_request
        cover = math.ceil(CACHE_COVER * l2_bytes / point.bytes_moved)
        self.number = max(1, min(cover, MAX_LAYERS, len(pages) // needed))
        rng = np.random.default_rng(point.rows)
        order = rng.permutation(len(pages))[: self.number * needed].astype(np.int32)
        tables = cp.asarray(order.reshape(self.number, point.batch, point.pages_per_request))
        seq_lens, masks = cp.asarray(point.seq_lens), cp.asarray(DraftTree.binary(point.rows - 1).mask_array()[None])
        shape = (point.batch, point.rows, point.q_heads, HEAD_DIM)
        bits = pool.words[: self.number * math.prod(shape)]
        queries = bits.reshape(self.number, *shape)
        outputs = cp.empty_like(queries)
        self.calls: list[VerifyAttention] = []
        for table, q, output in zip(tables, queries, outputs, strict=True):
            operands = (q, pages[:, 0], pages[:, 1], table, seq_lens, masks, output)
            self.calls.append(VerifyAttention(*operands, plan=plan, scratch=scratch, **options))

    def __call__(self) -> None:
        for call in self.calls:
            call()


@lru_cache(maxsize=4)
def _scratch(ctas: int, block_rows: int, batch: int) -> Scratch:
    return Scratch(ctas, block_rows, batch)


def _enough(limit_s: float) -> Enough:
    """Until the median's spread is below 0.3 %, or `limit_s` have been spent."""

    def enough(samples_us: Sequence[float], spent_s: float) -> bool:
        if not samples_us:
            return False
        p20, p50, p80 = np.percentile(samples_us, [20, 50, 80])
        return bool((p80 - p20) / 2 / len(samples_us) ** 0.5 < 0.003 * p50) or spent_s > limit_s

    return enough


def measure(point: Point, pool: Pool, gpu: str, bandwidth: float, limit_s: float, **options: Any) -> dict[str, Any]:
    """The row of `attention.csv` of one point."""
    layers = Layers(point, pool, **options)
    samples = np.array(time_graph(layers, _enough(limit_s))) / layers.number
    p20, p50, p80 = np.percentile(samples, [20, 50, 80])
    return {
        "gpu": gpu, "q_heads": point.q_heads, "kv_heads": point.kv_heads, "head_dim": HEAD_DIM, "kv_dtype": "bf16",
        "page_tokens": PAGE_TOKENS, "rows": point.rows, "batch": point.batch, "context_tokens": point.context,
        "timer": "graph", "latency_us_p50": f"{p50:.3f}",
        "latency_us_p20": f"{p20:.3f}", "latency_us_p80": f"{p80:.3f}",
        "samples": len(samples), "bytes_moved": point.bytes_moved,
        "pct_copy_bandwidth": f"{100 * point.bytes_moved / (p50 * 1e-6) / bandwidth:.1f}",
        "row_blocks": layers.calls[0].plan.row_blocks,
    }  # fmt: skip


def _compile(plan: AttentionPlan) -> None:
    plan.kernel("verify_attention").attributes  # noqa: B018 (loads it)


def compile_all(query_rows: set[int]) -> None:
    """Fill CuPy's disk cache with the variants of these sizes, several at a time."""
    variants = list({tuple(sorted(plan.macros.items())): plan for plan in map(plan_here, query_rows)}.values())
    with multiprocessing.get_context("spawn").Pool(min(len(variants), len(os.sched_getaffinity(0)))) as pool:
        pool.map(_compile, variants, chunksize=1)


def head_pairs(text: str) -> list[str]:
    """The converter of `--heads`."""
    pairs = text.split(",")
    for pair in pairs:
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", pair)
        if found is None or int(found[1]) % int(found[2]):
            raise argparse.ArgumentTypeError(f"{pair!r} given; query heads x KV heads such as 16x2 are needed")
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure verify attention on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for attention.csv and attention_device.json")
    heads = "query x KV heads of a rank, e.g. 16x2,24x4"
    parser.add_argument("--heads", type=head_pairs, default=list(HEADS), help=heads)
    for name, values in (("rows", ROWS), ("contexts", CONTEXTS), ("batches", BATCHES)):
        default = ",".join(map(str, values))
        parser.add_argument(f"--{name}", type=commandline.wholes, default=list(values), help=f"default {default}")
    seconds = commandline.seconds
    parser.add_argument("--timing-s", type=seconds, default=0.02, help="seconds for each timing (default 0.02)")
    parser.add_argument("--limit-s", type=seconds, default=3600, help="stop after so many seconds (default 3600)")
    options = parser.parse_args()
    start = time.perf_counter()
    cp = load_cupy()
    grid = list(points(options.heads, options.rows, options.contexts, options.batches))
    if not grid:
        raise UsageError(f"no layer of these sizes has at most {MAX_LAYER_BYTES:,} bytes; give smaller ones")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        check_writable(options.out / name)
    compile_all({point.rows * point.q_heads // point.kv_heads for point in grid})
    gate = attention_gate.gate_record(attention_gate.cases())
    print(f"gate: {gate} after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if gate["red"]:
        return 1
    before, bandwidth = clocks(), copy_bandwidth()
    gpu = "h200" if "H200" in (name := device_record()["name"]) else name
    pool = Pool(POOL_BYTES)
    done = 0
    with (options.out / FILES[0]).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for point in grid:
            if time.perf_counter() - start > options.limit_s:
                break
            writer.writerow(measure(point, pool, gpu, bandwidth, options.timing_s))
            done += 1
        cp.cuda.Device().synchronize()
    record = device_record() | {
        "kernel_hash": kernel_hash(), "block_rows": block_rows(), "copy_bandwidth_bytes_per_s": round(bandwidth),
        "copy_bandwidth_after_bytes_per_s": round(copy_bandwidth()),
        "read_bandwidth_bytes_per_s": round(read_bandwidth()),
        "clocks_before": before, "clocks_after": clocks(), "gate": gate, "points": done, "points_wanted": len(grid),
    }  # fmt: skip
    (options.out / FILES[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{done} of {len(grid)} points, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    commandline.run(main)
