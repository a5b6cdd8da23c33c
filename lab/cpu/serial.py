"""Serial kernels: the gated delta rule row after row, a state per verified row where the method keeps one.

One kernel serves `recurrent` (one row, the state updated in place), `storeall` on chains (the state stays in
a buffer from row to row and every row's state is written to a slot of its own) and `storeall` on trees (every
row loads its parent's state from the parent's slot, rounded as stored).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from lab.cpu.primitives import FASTMATH, axpy, copy, dot, gate, load_row, store_row, unit_rows


@njit(fastmath=FASTMATH, cache=True)
def _verify_head(
    pool: Any, read: Any, write: Any, request: Any, head: Any, inputs: Any, parents: Any, chain: Any, eps: Any,
    out: Any,
) -> None:  # fmt: skip
    """One request and value head; rows of a state are independent, so each passes through all tree rows in cache."""
    rows, key_heads, dk = inputs.q.shape[1:]
    key_head = head // (inputs.v.shape[2] // key_heads)
    keys, queries = np.empty((rows, dk), np.float32), np.empty((rows, dk), np.float32)
    unit_rows(inputs.k[request, :, key_head], eps, np.float32(1), keys)
    unit_rows(inputs.q[request, :, key_head], eps, np.float32(1 / np.sqrt(dk)), queries)
    decay, beta = np.empty(rows, np.float32), np.empty(rows, np.float32)
    for t in range(rows):
        a, b = inputs.a[request, t, head], inputs.b[request, t, head]
        g, beta[t] = gate(a, b, inputs.A_log[head], inputs.dt_bias[head])
        decay[t] = np.exp(g)
    row = np.empty(dk, np.float32)
    for i in range(inputs.v.shape[3]):
        for t in range(rows):
            above = parents[t]
            if above < 0:
                load_row(pool[read, head, i], row)
            elif not chain:
                load_row(pool[write[above], head, i], row)
            for c in range(dk):
                row[c] *= decay[t]
            axpy(beta[t] * (inputs.v[request, t, head, i] - dot(row, keys[t])), keys[t], row)
            out[request, t, head, i] = dot(row, queries[t])
            store_row(row, pool[write[t], head, i])


@njit(parallel=True, cache=True)
def verify(
    pool: Any, read_slot: Any, write_slot: Any, inputs: Any, parents: Any, chain: Any, eps: Any, out: Any
) -> None:  # fmt: skip
    """Outputs of all rows, and the state of row t in slot `write_slot[b, t]`.

    `pool` `[slots, HV, V, K]` float32 or bfloat16 bits; a request starts from `read_slot[b]` (negative: padding). Per
    row: S <- exp(g) S; u = beta (v - S k); S <- S + u k^T; o = S q. On a `chain` the state stays in a buffer from row
    to row, on a tree it is loaded from the parent's slot.
    """
    heads = pool.shape[1]
    for task in prange(len(read_slot) * heads):
        request, head = task // heads, task % heads
        read = read_slot[request]
        if read >= 0:
            write, tree = write_slot[request], parents[request]
            _verify_head(pool, read, write, request, head, inputs, tree, chain, eps, out)


@njit(parallel=True, cache=True)
def scatter(pool: Any, source: Any, target: Any) -> None:
    """Copy the state in slot `source[b]` to slot `target[b]`; nothing where the source is negative."""
    heads = pool.shape[1]
    for task in prange(len(source) * heads):
        request, head = task // heads, task % heads
        if source[request] >= 0:
            for i in range(pool.shape[2]):
                copy(pool[source[request], head, i], pool[target[request], head, i])
