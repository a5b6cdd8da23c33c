"""Float64 reference on the GPU, batched over requests with a tree each, and operands that try to break kernels.

`recurrence` is `lab.oracle.sequential` for a whole batch; the gate checks the two against each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lab.bf16 import from_bits, to_bits
from lab.methods.protocol import Operands


class Result(NamedTuple):
    """outputs `[B, N, HV, V]`, states of all rows `[B, N, HV, V, K]`, pseudo-values u `[B, N, HV, V]`."""

    outputs: Any
    states: Any
    u: Any


def recurrence(cp: Any, state: Any, operands: Operands, parents: Any, eps: float = 1e-6) -> Result:
    """Every row from its parent's state, float64; `state` `[B, HV, V, K]`, `parents` `[B, N]` on the host."""

    def floats(x: Any) -> Any:
        if x.dtype == np.uint16:
            return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return x.astype(np.float64)

    q, k, v, a, b = map(floats, (operands.q, operands.k, operands.v, operands.a, operands.b))
    group = v.shape[2] // q.shape[2]
    q, k = (cp.repeat(x / cp.sqrt((x * x).sum(-1, keepdims=True) + eps), group, axis=2) for x in (q, k))
    q *= q.shape[-1] ** -0.5
    x = a + floats(operands.dt_bias)
    g = -cp.exp(floats(operands.A_log)) * cp.where(x > 20, x, cp.log1p(cp.exp(cp.minimum(x, 20))))
    beta = 1 / (1 + cp.exp(-b))
    batch, rows = v.shape[:2]
    outputs, u = cp.empty_like(v), cp.empty_like(v)
    states = cp.empty((batch, rows, *state.shape[1:]), np.float64)
    requests = cp.arange(batch)
    above = cp.asarray(parents)
    for t in range(rows):
        old = state if t == 0 else states[requests, above[:, t]]
        S = old * cp.exp(g[:, t])[:, :, None, None]
        u[:, t] = beta[:, t][..., None] * (v[:, t] - cp.matmul(S, k[:, t][..., None])[..., 0])
        S += u[:, t][..., None] * k[:, t][:, :, None, :]
        states[:, t] = S
        outputs[:, t] = cp.matmul(S, q[:, t][..., None])[..., 0]
    return Result(outputs, states, u)


def random_parents(rng: np.random.Generator, batch: int, rows: int, longest: int) -> np.ndarray:
    """`[B, N]` parents: chains, stars, random, deep and wide trees in turn, no path longer than `longest` rows."""
    parents = np.full((batch, rows), -1, np.int32)
    first = int(rng.integers(5))
    for b in range(batch):
        depth = np.zeros(rows, int)
        kind = (first + b) % 5
        for t in range(1, rows):
            if kind == 0:  # chain
                above = t - 1
            elif kind == 1:  # star
                above = 0
            elif kind == 2:  # random parents
                above = int(rng.integers(t))
            elif kind == 3:  # deep: mostly the row before
                above = t - 1 if rng.random() < 0.8 else int(rng.integers(t))
            else:  # wide: mostly near the root
                above = int(rng.integers(min(t, 4)))
            while depth[above] + 2 > longest:
                above = int(rng.integers(t))
            parents[b, t] = above
            depth[t] = depth[above] + 1
    return parents


def random_operands(
    cp: Any, rng: np.random.Generator, batch: int, rows: int, heads: Any, parents: np.ndarray
) -> Operands:
    """bf16 operands on the GPU; gates, keys and norms differ in kind from request to request.

    Decays: ordinary, none (g = 0), -30 in every row, mixed. Write strengths: ordinary, near 0, near 1, mixed. Keys:
    random, one key repeated in all rows, near repeats, one zero key, norms from 1e-3 to 30.
    """
    HK, HV, K, V = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    q, k = rng.standard_normal((2, batch, rows, HK, K))
    v = rng.standard_normal((batch, rows, HV, V))
    a, b = rng.standard_normal((2, batch, rows, HV))
    request = rng.integers(80) + np.arange(batch)
    decay_kind, beta_kind, key_kind = request % 4, request // 4 % 4, request // 2 % 5
    a[decay_kind == 1] = -60.0
    a[decay_kind == 2] = 30.0
    mixed = decay_kind == 3
    a[mixed] = rng.choice([-60.0, -3.0, 0.0, 4.0, 30.0], size=a[mixed].shape, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    b[beta_kind == 1] = -12.0
    b[beta_kind == 2] = 12.0
    b[beta_kind == 3] = rng.choice([-12.0, 0.0, 12.0], size=b[beta_kind == 3].shape)
    k[key_kind == 1] = k[key_kind == 1][:, :1]
    k[key_kind == 2] = k[key_kind == 2][:, :1] + 0.05 * k[key_kind == 2]
    k[key_kind == 3] *= 10 ** rng.uniform(-3, 1.5, size=(*k[key_kind == 3].shape[:3], 1))
    if rows > 1:
        k[key_kind == 4, rows // 2] = 0
    A_log = np.log(rng.uniform(0.5, 2, HV)).astype(np.float32)
    dt_bias = rng.uniform(-0.5, 0.5, HV).astype(np.float32)
    q, k, v, a, b = (device_bits(cp, x) for x in (q, k, v, a, b))
    return Operands(q, k, v, a, b, cp.asarray(A_log), cp.asarray(dt_bias), cp.asarray(parents))


def device_bits(cp: Any, x: Any) -> Any:
    """bfloat16 bits on the GPU of host values."""
    return cp.asarray(to_bits(x))


def on_host(operands: Operands, cp: Any) -> Operands:
    """The same operands as float32 NumPy arrays, for the oracle."""
    q, k, v, a, b = (from_bits(cp.asnumpy(getattr(operands, name))) for name in "qkvab")
    return Operands(q, k, v, a, b, *(cp.asnumpy(x) for x in (operands.A_log, operands.dt_bias, operands.parent)))
