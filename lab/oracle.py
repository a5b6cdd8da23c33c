"""The oracle: the gated delta rule in float64 NumPy, node by node and in closed form.

Everything that runs fast is tested against `sequential`. `tree_wy`, `tree_wy_with_log` and `commit` are the
readable specification of the closed-form kernels. Functions here work on one request; `OracleSession` runs a
batch behind the protocol of all backends. N rows, HK key heads, HV value heads, K = dk, V = dv.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.errors import UsageError
from lab.methods.protocol import Operands, SessionSpec, check_state_indices

Array = NDArray[np.float64]


class Rows(NamedTuple):
    """Rows of one request after norm and gates: q, k `[N, HK, K]` (q scaled), v `[N, HV, V]`, g, beta `[N,
    HV]`."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


class Log(NamedTuple):
    """Committed rows whose factors are known, oldest first: u `[h, HV, V]`, k `[h, HK, K]`, g `[h, HV]`."""

    u: Array
    k: Array
    g: Array


def gates(a: Any, b: Any, A_log: Any, dt_bias: Any) -> tuple[Array, Array]:
    """Log decay g <= 0 and write strength beta in (0, 1) from raw a, b `[..., HV]`.

    g = -exp(A_log) softplus(a + dt_bias), where softplus(x) is x above 20; beta = sigmoid(b).
    """
    x = np.asarray(a, np.float64) + np.asarray(dt_bias, np.float64)
    softplus = np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))
    beta = 1 / (1 + np.exp(-np.asarray(b, np.float64)))
    return -np.exp(np.asarray(A_log, np.float64)) * softplus, beta


def normalise(x: Any, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps) over the last axis: eps is added to the sum, inside the root."""
    x = np.asarray(x, np.float64)
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) + eps))


def prepare(operands: Operands, request: int, eps: float = 1e-6) -> Rows:
    """Norm, q scale K^-0.5 and gates of the rows of one request."""
    g, beta = gates(operands.a[request], operands.b[request], operands.A_log, operands.dt_bias)
    q, k = normalise(operands.q[request], eps), normalise(operands.k[request], eps)
    return Rows(q * q.shape[-1] ** -0.5, k, np.asarray(operands.v[request], np.float64), g, beta)


def sequential(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, parent: NDArray[Any]
) -> tuple[Array, Array, Array]:
    """The recurrence node by node, each from its parent's state.

    Returns outputs `[N, HV, V]`, states `[N, HV, V, K]` and pseudo-values u `[N, HV, V]`.
    """
    q, k = _per_value_head(q, v), _per_value_head(k, v)
    outputs, u = np.empty_like(v), np.empty_like(v)
    states = np.empty((len(v), *state.shape))
    for t, above in enumerate(parent):
        S = np.exp(g[t])[:, None, None] * (state if above < 0 else states[above])
        u[t] = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", S, k[t]))
        states[t] = S + np.einsum("hv,hk->hvk", u[t], k[t])
        outputs[t] = np.einsum("hvk,hk->hv", states[t], q[t])
    return outputs, states, u


def tree_wy(
    state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, masks: NDArray[np.uint64]
) -> tuple[Array, Array, Array]:
    """All nodes at once (TreeWY, arXiv 2608.20961): solve M U = R, then outputs; one read of the state.

    `masks` `[N]` are the ancestor masks of the tree. Returns outputs `[N, HV, V]`, u `[N, HV, V]` and the log
    decay G `[N, HV]` summed from the committed state along each path.
    """
    empty = Log(v[:0], k[:0], g[:0])
    return tree_wy_with_log(state, empty, q, k, v, g, beta, masks)


def tree_wy_with_log(
    base: Array, log: Log, q: Array, k: Array, v: Array, g: Array, beta: Array, masks: NDArray[np.uint64]
) -> tuple[Array, Array, Array]:
    """`tree_wy` over a dense base state and a log of h committed rows that are ancestors of every node.

    The log's u are known, so it only adds to what the nodes see of the past; G counts from the base. With an
    empty log this is equation M U = R itself, M[t, i] = beta_t dec[t, i] (k_t . k_i) for ancestors i of t.
    """
    q, k = _per_value_head(q, v), _per_value_head(k, v)
    log_k = _per_value_head(log.k, v)
    on_path = ancestor_matrix(masks)  # [N, N], the diagonal included
    log_G = log.g.cumsum(0)  # [h, HV]
    G = on_path @ g + log.g.sum(0)  # [N, HV]
    decay = np.where(on_path[..., None], np.exp(np.minimum(G[:, None] - G, 0)), 0)  # dec[t, i]
    log_decay = np.exp(np.minimum(G[:, None] - log_G, 0))  # dec[t, j]

    def seen(x: Array) -> Array:
        """What rows x `[N, HV, K]` read of the past before the tree: `[N, HV, V]`."""
        of_base = np.exp(G)[..., None] * np.einsum("hvk,thk->thv", base, x)
        return np.asarray(of_base + np.einsum("tjh,jhk,thk,jhv->thv", log_decay, log_k, x, log.u, optimize=True))

    M = beta[:, None] * decay * np.einsum("thk,ihk->tih", k, k)
    u = beta[..., None] * (v - seen(k))  # R, turned into U row by row
    for t in range(1, len(v)):
        u[t] -= np.einsum("ih,ihv->hv", M[t, :t], u[:t])
    C = decay * np.einsum("thk,ihk->tih", q, k)
    return seen(q) + np.einsum("tih,ihv->thv", C, u), u, G


def commit(state: Array, u: Array, k: Array, G: Array, path: tuple[int, ...] | list[int]) -> Array:
    """State of the last row x of `path`: exp(G_x) S_0 + sum of dec[x, i] u_i k_i^T; `state` if it is empty.

    u, k and G are those of `tree_wy` (k `[N, HK, K]`); with a log, `path` runs over the rows of log and tree
    together.
    """
    if not len(path):
        return state
    rows, last = list(path), path[-1]
    decay = np.exp(np.minimum(G[last] - G[rows], 0))
    keys = _per_value_head(k[rows], u)
    added = np.einsum("ih,ihv,ihk->hvk", decay, u[rows], keys)
    return np.asarray(np.exp(G[last])[:, None, None] * state + added)


def ancestor_matrix(masks: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """`[N, N]`: entry (t, i) says that row i lies on the path from the root to row t, t included."""
    bits = np.arange(len(masks), dtype=np.uint64)
    return (np.asarray(masks, np.uint64)[:, None] >> bits & np.uint64(1)).astype(np.bool_)


def path_to(parent: NDArray[Any], row: int) -> list[int]:
    """Rows from the root to `row`, both included; empty for row -1."""
    path: list[int] = []
    while row >= 0:
        path.append(row)
        row = int(parent[row])
    return path[::-1]


def _per_value_head(x: Array, v: Array) -> Array:
    """Key-head rows `[N, HK, K]` repeated to the value heads of v: `[N, HV, K]`."""
    return np.repeat(x, v.shape[1] // x.shape[1], axis=1)


class OracleSession:
    """The protocol's reference: float64 states, every step by `sequential`, whatever the method and state
    type."""

    def __init__(self, spec: SessionSpec, states: Any, state_indices: Any) -> None:
        self.spec = spec
        self.pool = np.array(states, dtype=np.float64)
        self.state_indices = check_state_indices(state_indices, len(self.pool), spec.batch)
        self._rows: dict[int, tuple[Rows, NDArray[np.int32]]] = {}

    def verify(self, operands: Operands) -> Array:
        """Outputs `[B, N, HV, V]` float64; NaN for padding."""
        operands.check_shapes(self.spec)
        operands.check_values(self.spec, self.state_indices >= 0)
        parents = operands.parents(self.spec)
        outputs = np.full(operands.v.shape, np.nan)
        self._rows = {}
        for request in np.flatnonzero(self.state_indices >= 0).tolist():
            rows = prepare(operands, request, self.spec.norm_eps)
            outputs[request] = sequential(self.materialise_exact(request), *rows, parents[request])[0]
            self._rows[request] = rows, parents[request]
        return outputs

    def commit(self, accepted: Any) -> None:
        for request, (rows, parent) in self._rows.items():
            path = path_to(parent, int(accepted[request]))
            if path:
                chain = np.arange(-1, len(path) - 1)
                taken = Rows(*(field[path] for field in rows))
                states = sequential(self.materialise_exact(request), *taken, chain)[1]
                self.pool[self.state_indices[request]] = states[-1]
        self._rows = {}

    def flush(self) -> None:
        """Nothing waits: every commit is dense."""

    def materialise_exact(self, request: int) -> Array:
        """The committed state `[HV, V, K]` in float64."""
        slot = self.state_indices[request]
        if slot < 0:
            raise UsageError(f"request {request} is padding; it has no state")
        return np.asarray(self.pool[slot])

    def materialise(self, request: int) -> NDArray[np.float32]:
        return self.materialise_exact(request).astype(np.float32)
