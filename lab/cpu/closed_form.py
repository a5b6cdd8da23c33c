"""Closed-form kernels: tree-WY verification over a dense state and a log of committed factor rows.

One kernel serves every write-back policy, because a policy is only a rule for the log that the next step
sees:

    method      log at the start of a step                       dense state written
    bole        empty: the commit has folded the path            by the commit, every step
    treewy      the accepted path, by index in the last stash    by verify, every step
    specla      the accepted path, gathered in a pending buffer  by verify, every step
    replayssm   a ring of bfloat16 records, chains               by verify, when the ring is nearly full
    deltalog    a log of one row per step                        by verify, when the log is full
    treelog     accepted paths gathered in a log, its u in the   by verify, when a path might not fit
                type of the state

Per key head: normalised keys and queries, their Grams (shared by the value heads of the group). Per value
head, with G the log decay summed from the dense state S and dec[t, i] = exp(min(G_t - G_i, 0)):

    seen(x)_t = exp(G_t) S x_t + sum over the log of dec[t, j] (k_j . x_t) u_j
    u_t = beta_t (v_t - seen(k)_t - sum over ancestors i of dec[t, i] (k_i . k_t) u_i)
    o_t = seen(q)_t + sum over ancestors i and t itself of dec[t, i] (k_i . q_t) u_i

The state is read once, row by row. When a request flushes, each row is folded with the log, used and written
in the same pass. Sums G are float64, everything else float32. Records of a request are rows of u `[B, R, HV,
V]`, k `[B, R, HK, K]` and g `[B, R, HV]`; `log_index` `[B, C]` and `log_count` `[B]` say which of them are
the log.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from lab.cpu.primitives import FASTMATH, axpy, copy, dot, gate, load_row, round_to_bf16, store_row, unit_rows


class Log(NamedTuple):
    """Factor records of every request, and which of them are its log.

    u `[B, R, HV, V]`, k `[B, R, HK, K]`, g `[B, R, HV]` float32 (g is a row's own log decay); `index` `[B, C]` int32
    lists records, oldest first, of which the first `count` `[B]` int32 are the log.
    """

    u: Any
    k: Any
    g: Any
    index: Any
    count: Any


class Policy(NamedTuple):
    """The write-back rule: a request flushes in `verify` when h > 0 and h + reserve > capacity (rows).

    The factors of tree row t go to record `node_row + t`, or behind the log when `node_row` is negative; u and the
    normalised k are rounded to bfloat16 there when `bf16_u` and `bf16_k` are set.
    """

    capacity: int
    reserve: int
    node_row: int
    bf16_u: bool = False
    bf16_k: bool = False


class _KeyHead(NamedTuple):
    """What the value heads of one key head share: rows `[N, K]`, Grams `[N, N]`, log keys `[h, K]`."""

    keys: Any
    queries: Any
    key_gram: Any
    query_gram: Any
    log_k: Any


@njit(cache=True)
def _flushes(count: Any, policy: Any) -> Any:
    return count > 0 and count + policy.reserve > policy.capacity


@njit(fastmath=FASTMATH, cache=True)
def _log_decays(log: Any, request: Any, head: Any) -> Any:
    """Cumulative log decay `[h]` float64 of the log rows of one request and value head."""
    G = np.empty(log.count[request], np.float64)
    total = 0.0
    for j in range(len(G)):
        total += log.g[request, log.index[request, j], head]
        G[j] = total
    return G


@njit(fastmath=FASTMATH, cache=True)
def _gather(records: Any, index: Any, count: Any, head: Any) -> Any:
    """Log rows `[h, X]` of one head from the records `[R, heads, X]` of one request."""
    rows = np.empty((count, records.shape[2]), np.float32)
    for j in range(count):
        copy(records[index[j], head], rows[j])
    return rows


@njit(fastmath=FASTMATH, cache=True)
def _key_head(inputs: Any, log: Any, request: Any, head: Any, eps: Any) -> Any:
    rows, dk = inputs.q.shape[1], inputs.q.shape[3]
    keys, queries = np.empty((rows, dk), np.float32), np.empty((rows, dk), np.float32)
    unit_rows(inputs.k[request, :, head], eps, np.float32(1), keys)
    unit_rows(inputs.q[request, :, head], eps, np.float32(1 / np.sqrt(dk)), queries)
    key_gram, query_gram = np.empty((rows, rows), np.float32), np.empty((rows, rows), np.float32)
    for t in range(rows):
        for i in range(t + 1):
            key_gram[t, i] = dot(keys[t], keys[i])
            query_gram[t, i] = dot(queries[t], keys[i])
    log_k = _gather(log.k[request], log.index[request], log.count[request], head)
    return _KeyHead(keys, queries, key_gram, query_gram, log_k)


@njit(fastmath=FASTMATH, cache=True)
def _fold_weights(log_G: Any) -> Any:
    """Decay of the dense state and of each log row up to the end of the log: exp(G_h), dec[h, j]."""
    count = len(log_G)
    weights = np.empty(count, np.float32)
    for j in range(count):
        weights[j] = np.exp(min(log_G[count - 1] - log_G[j], 0.0))
    return np.float32(np.exp(log_G[count - 1])), weights


@njit(fastmath=FASTMATH, cache=True)
def _fold_row(row: Any, i: Any, state_decay: Any, weights: Any, log_u: Any, log_k: Any) -> None:
    """Row i of exp(G_h) S + sum of dec[h, j] u_j k_j^T, in place."""
    for c in range(len(row)):
        row[c] *= state_decay
    for j in range(len(weights)):
        axpy(weights[j] * log_u[j, i], log_k[j], row)


@njit(fastmath=FASTMATH, cache=True)
def _fold_state(state: Any, log_G: Any, log_u: Any, log_k: Any) -> None:
    """exp(G_h) S + sum of dec[h, j] u_j k_j^T, in place."""
    state_decay, weights = _fold_weights(log_G)
    row = np.empty(state.shape[1], np.float32)
    for i in range(state.shape[0]):
        load_row(state[i], row)
        _fold_row(row, i, state_decay, weights, log_u, log_k)
        store_row(row, state[i])


@njit(fastmath=FASTMATH, cache=True)
def _read_state(
    state: Any, flush: Any, log_G: Any, log_u: Any, shared: Any, state_k: Any, state_q: Any
) -> None:  # fmt: skip
    """S k_t and S q_t of all rows: `[N, V]` each. With `flush`, S is folded first and written in the same pass."""
    state_decay, weights = np.float32(1), np.empty(0, np.float32)
    if flush:
        state_decay, weights = _fold_weights(log_G)
    row = np.empty(state.shape[1], np.float32)
    for i in range(state.shape[0]):
        load_row(state[i], row)
        if flush:
            _fold_row(row, i, state_decay, weights, log_u, shared.log_k)
            store_row(row, state[i])
        for t in range(len(state_k)):
            state_k[t, i] = dot(row, shared.keys[t])
            state_q[t, i] = dot(row, shared.queries[t])


@njit(fastmath=FASTMATH, cache=True)
def _solve(
    v: Any, beta: Any, G: Any, log_G: Any, log_u: Any, masks: Any, shared: Any, state_k: Any, state_q: Any, u: Any,
    out: Any,
) -> None:  # fmt: skip
    """Pseudo-values u and outputs `[N, V]` of one value head by row substitution, the most stable form of M^-1."""
    for t in range(len(u)):
        reach = np.float32(np.exp(min(G[t], 0.0)))
        for i in range(u.shape[1]):
            u[t, i] = beta[t] * (v[t, i] - reach * state_k[t, i])
            out[t, i] = reach * state_q[t, i]
        for j in range(len(log_G)):
            decay = np.float32(np.exp(min(G[t] - log_G[j], 0.0)))
            axpy(-beta[t] * decay * dot(shared.log_k[j], shared.keys[t]), log_u[j], u[t])
            axpy(decay * dot(shared.log_k[j], shared.queries[t]), log_u[j], out[t])
        for i in range(t):
            if (masks[t] >> np.uint64(i)) & np.uint64(1):
                decay = np.float32(np.exp(min(G[t] - G[i], 0.0)))
                axpy(-beta[t] * decay * shared.key_gram[t, i], u[i], u[t])
                axpy(decay * shared.query_gram[t, i], u[i], out[t])
        axpy(shared.query_gram[t, t], u[t], out[t])


@njit(fastmath=FASTMATH, cache=True)
def _verify_key_head(
    pool: Any, slot: Any, request: Any, key_head: Any, inputs: Any, parents: Any, masks: Any, log: Any, policy: Any,
    eps: Any, out: Any,
) -> None:  # fmt: skip
    """One request and key head, all its value heads; nothing is shared with other programs."""
    rows, dv = inputs.v.shape[1], inputs.v.shape[3]
    group = inputs.v.shape[2] // inputs.q.shape[2]
    flush = _flushes(log.count[request], policy)
    kept = 0 if flush else log.count[request]
    first = policy.node_row if policy.node_row >= 0 else kept
    shared = _key_head(inputs, log, request, key_head, eps)
    G, beta = np.empty(rows, np.float64), np.empty(rows, np.float32)
    state_k, state_q = np.empty((rows, dv), np.float32), np.empty((rows, dv), np.float32)
    u = np.empty((rows, dv), np.float32)
    for head in range(key_head * group, (key_head + 1) * group):
        log_G = _log_decays(log, request, head)
        log_u = _gather(log.u[request], log.index[request], log.count[request], head)
        _read_state(pool[slot, head], flush, log_G, log_u, shared, state_k, state_q)
        start = log_G[kept - 1] if kept > 0 else 0.0
        for t in range(rows):
            a, b = inputs.a[request, t, head], inputs.b[request, t, head]
            g, beta[t] = gate(a, b, inputs.A_log[head], inputs.dt_bias[head])
            above = parents[request, t]
            G[t] = g + (start if above < 0 else G[above])
            log.g[request, first + t, head] = g
        v, o = inputs.v[request, :, head], out[request, :, head]
        _solve(v, beta, G, log_G[:kept], log_u, masks[request], shared, state_k, state_q, u, o)
        if policy.bf16_u:
            round_to_bf16(u)
        for t in range(rows):
            copy(u[t], log.u[request, first + t, head])
    if policy.bf16_k:
        round_to_bf16(shared.keys)
    for t in range(rows):
        copy(shared.keys[t], log.k[request, first + t, key_head])


@njit(parallel=True, cache=True)
def verify(
    pool: Any, slots: Any, inputs: Any, parents: Any, masks: Any, log: Any, policy: Any, eps: Any, out: Any
) -> None:  # fmt: skip
    """Outputs `[B, N, HV, V]` of all rows; flushes where the policy says so; leaves the rows' factors in the records.

    `pool` `[slots, HV, V, K]` float32 or bfloat16 bits, `slots` `[B]` (negative: padding), `parents` `[B, N]` int32,
    `masks` `[B, N]` uint64 ancestor masks. `log.count` is 0 afterwards for requests that flushed.
    """
    batch, key_heads = len(slots), inputs.q.shape[2]
    for task in prange(batch * key_heads):
        request, key_head = task // key_heads, task % key_heads
        slot = slots[request]
        if slot >= 0:
            _verify_key_head(pool, slot, request, key_head, inputs, parents, masks, log, policy, eps, out)
    for request in range(batch):
        if _flushes(log.count[request], policy):
            log.count[request] = 0


@njit(fastmath=FASTMATH, cache=True)
def _fold_head(pool: Any, slot: Any, log: Any, request: Any, head: Any) -> None:
    index, count = log.index[request], log.count[request]
    group = log.u.shape[2] // log.k.shape[2]
    log_u = _gather(log.u[request], index, count, head)
    log_k = _gather(log.k[request], index, count, head // group)
    _fold_state(pool[slot, head], _log_decays(log, request, head), log_u, log_k)


@njit(parallel=True, cache=True)
def fold(pool: Any, slots: Any, log: Any) -> None:
    """Fold every request's log into its dense state and empty it."""
    count, heads = log.count, pool.shape[1]
    for task in prange(len(slots) * heads):
        request, head = task // heads, task % heads
        if slots[request] >= 0 and count[request] > 0:
            _fold_head(pool, slots[request], log, request, head)
    for request in range(len(count)):
        count[request] = 0


@njit(cache=True)
def _path_length(parents: Any, row: Any) -> Any:
    """Rows from the root to `row`, both included; 0 for row -1."""
    length = 0
    while row >= 0:
        length += 1
        row = parents[row]
    return length


@njit(cache=True)
def append(parents: Any, accepted: Any, slots: Any, log: Any, node_row: Any) -> None:
    """Copy the accepted path's records behind the log, root first."""
    for request in range(len(slots)):
        if slots[request] >= 0:
            row, count = accepted[request], log.count[request]
            length = _path_length(parents[request], row)
            for place in range(count + length - 1, count - 1, -1):
                source = node_row + row
                for head in range(log.u.shape[2]):
                    copy(log.u[request, source, head], log.u[request, place, head])
                for head in range(log.k.shape[2]):
                    copy(log.k[request, source, head], log.k[request, place, head])
                copy(log.g[request, source], log.g[request, place])
                row = parents[request, row]
            log.count[request] += length


@njit(cache=True)
def index_path(parents: Any, accepted: Any, slots: Any, log: Any) -> None:
    """Make the accepted path's records the log, root first, without a copy."""
    for request in range(len(slots)):
        if slots[request] >= 0:
            row = accepted[request]
            length = _path_length(parents[request], row)
            for place in range(length - 1, -1, -1):
                log.index[request, place] = row
                row = parents[request, row]
            log.count[request] = length
