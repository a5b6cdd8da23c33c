"""The correctness gate of verify attention: random trees, lengths and pages against float64.

What a kernel must not read (tokens past a sequence, pages of nobody) and what it must write (outputs, scratch)
holds NaN before. Errors are relative, the norm of the difference over the norm of the reference; the worst row counts.

`python -m kernels_cupy.attention_gate [--quick]` prints the worst error and every case above the limit.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_cupy import commandline
from kernels_cupy.arrays import NAN_BITS, host_floats
from kernels_cupy.attention import HEAD_DIM, VerifyAttention
from kernels_cupy.compiler import load_cupy
from kernels_cupy.reference import random_parents
from lab.bf16 import from_bits, to_bits
from lab.trees import DraftTree

#: Largest relative error of a row: weights and outputs are rounded to bfloat16 once (2^-9 each at most).
LIMIT = 4e-3


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of requests with `contexts` cached tokens each (None: padding) and trees of `rows` rows."""

    q_heads: int
    kv_heads: int
    rows: int
    contexts: tuple[int | None, ...]
    page_tokens: int
    shared_tree: bool = False

    @property
    def name(self) -> str:
        return (
            f"H{self.q_heads}x{self.kv_heads}-N{self.rows}-B{len(self.contexts)}-C{max(filter(None, self.contexts))}"
            f"-P{self.page_tokens}"
        )


def cases(quick: bool = False) -> Iterator[Case]:
    """Head groupings x rows x page sizes, ragged contexts, odd batches, a padded request."""
    heads = ((16, 2), (24, 4), (32, 2), (16, 4), (4, 1), (8, 1))
    rows = (1, 2, 3, 7, 8, 16, 17, 32, 64)
    ragged: tuple[tuple[int | None, ...], ...] = ((1000, 0, 47, None, 64), (1, 129, 700))
    for (q_heads, kv_heads), number in itertools.product(heads[:2] if quick else heads, rows):
        if (q_heads, kv_heads) in heads[2:] and number not in (1, 7, 16, 64):
            continue
        for place, contexts in enumerate(ragged):
            pages = (16, 48, 1056)[(number + place + q_heads) % 3]
            yield Case(q_heads, kv_heads, number, contexts, pages, shared_tree=place == 1)
    yield Case(16, 2, 16, (20_000,), 1056)
    yield Case(16, 2, 1, (70_001,), 1072)
    yield Case(8, 1, 5, tuple(range(3, 403, 7)), 16)
    yield Case(16, 4, 8, tuple(500 + 13 * (b % 5) for b in range(67)), 32)


def reference(q: Any, k: Any, v: Any, visible: Any, scale: float, xp: Any = np) -> Any:
    """Attention in float64: q `[N, H, D]`, k and v `[S, HKV, D]`, visible `[N, S]` bool; returns `[N, H, D]`."""
    q, k, v = (xp.asarray(x, dtype=xp.float64) for x in (q, k, v))
    rows, heads, width = q.shape
    grouped = q.reshape(rows, k.shape[1], heads // k.shape[1], width)
    scores = scale * xp.einsum("nkgd,skd->nkgs", grouped, k)
    scores = xp.where(visible[:, None, None, :], scores, -xp.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return xp.einsum("nkgs,skd->nkgd", weights, v).reshape(rows, heads, width)


def visibility(masks: Any, context: int) -> Any:
    """`[N, context + N]` bool of ancestor masks `[N]`: the whole context, and the ancestors among the rows."""
    rows = len(masks)
    bits = np.arange(rows, dtype=np.uint64)
    tree = (np.asarray(masks, np.uint64)[:, None] >> bits & np.uint64(1)).astype(np.bool_)
    return np.concatenate([np.ones((rows, context), np.bool_), tree], axis=1)


def run(case: Case, seed: int = 0) -> float:
    """The worst row's error; infinite where an output is no number, or a padded request's was touched."""
    cp = load_cupy()
    rng = np.random.default_rng([seed, case.rows, case.q_heads, len(case.contexts)])
    batch, rows = len(case.contexts), case.rows
    lengths = np.array([0 if context is None else context + rows for context in case.contexts], np.int32)
    parents = random_parents(rng, batch, rows, rows)
    if case.shared_tree:
        parents[:] = parents[rng.integers(batch)]
    masks = np.stack([DraftTree(tuple(map(int, row))).mask_array() for row in parents])
    pages_of = -(-lengths // case.page_tokens)
    table = np.full((batch, int(pages_of.max()) + 1), 2**30, np.int32)  # an entry of nobody must not be read
    order = rng.permutation(int(pages_of.sum()) + 3).astype(np.int32)
    k, v = (np.full((len(order), case.page_tokens, case.kv_heads, HEAD_DIM), NAN_BITS, np.uint16) for _ in range(2))
    tokens: list[tuple[Any, Any]] = []
    taken = 0
    for b, length in enumerate(lengths):
        own = order[taken : taken + pages_of[b]]
        taken += pages_of[b]
        table[b, : len(own)] = own
        pair = []
        for pool, spread in ((k, 1.0), (v, 0.5)):
            bits = to_bits(rng.standard_normal((length, case.kv_heads, HEAD_DIM), np.float32) * spread)
            for page, start in zip(own, range(0, length, case.page_tokens), strict=True):
                pool[page, : min(case.page_tokens, length - start)] = bits[start : start + case.page_tokens]
            pair.append(from_bits(bits))
        tokens.append((pair[0], pair[1]))
    q = to_bits(rng.standard_normal((batch, rows, case.q_heads, HEAD_DIM), np.float32) * 2)
    output = cp.full(q.shape, NAN_BITS, np.uint16)
    operands: list[Any] = [cp.asarray(x) for x in (q, k, v, table, lengths, masks[:1] if case.shared_tree else masks)]
    VerifyAttention(*operands, output)()  # type: ignore[call-arg]  # six arrays
    found = host_floats(output)
    worst = 0.0
    for b, context in enumerate(case.contexts):
        if context is None:
            worst = max(worst, 0.0 if np.isnan(found[b]).all() else np.inf)
            continue
        visible = cp.asarray(visibility(masks[b], context))
        operand_k, operand_v = (cp.asarray(x) for x in tokens[b])
        expected = cp.asnumpy(reference(cp.asarray(from_bits(q[b])), operand_k, operand_v, visible, HEAD_DIM**-0.5, cp))
        error = np.linalg.norm(found[b] - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        worst = max(worst, float(np.nan_to_num(error.max(), nan=np.inf)))
    return worst


def gate_record(wanted: Iterable[Case]) -> dict[str, Any]:
    """Cases, limit, worst error and the errors above the limit by case."""
    errors = {case.name: run(case) for case in wanted}
    red = {name: error for name, error in errors.items() if not error <= LIMIT}
    return {"cases": len(errors), "limit": LIMIT, "worst": max(errors.values()), "red": red}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare verify attention on this GPU with float64.")
    parser.add_argument("--quick", action="store_true", help="two head groupings in place of six")
    options = parser.parse_args()
    load_cupy()
    record = gate_record(cases(options.quick))
    for name, error in record["red"].items():
        print(f"{name}: {error:.2e}")
    print(f"{record['cases']} cases, {len(record['red'])} red, worst {record['worst']:.2e} of {LIMIT:.0e} allowed")
    return int(bool(record["red"]))


if __name__ == "__main__":
    commandline.run(main)
