"""Operands of a layer drawn at random: the same rows for every backend, from tame to hostile.

All values are float32 numbers that bfloat16 holds exactly, so that a backend that reads bfloat16 sees the
same operands as the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lab.bf16 import round_bf16
from lab.methods.protocol import Operands, SessionSpec
from lab.trees import DraftTree

#: `mild` as in trained layers; `none` keeps everything (g = 0); `strong` is g = -30; `mixed` has all three.
Decay = Literal["mild", "none", "strong", "mixed"]


@dataclass(frozen=True, slots=True)
class Regime:
    """What kind of operands to draw.

    `repeated_keys` makes all rows share nearly one key per head, and `beta_logit` sets b (20: beta is 1, -20:
    beta is 0; None: drawn). Repeated keys with beta = 1 and no decay are the worst case of the triangular
    solve.
    """

    decay: Decay = "mild"
    repeated_keys: bool = False
    beta_logit: float | None = None


MILD = Regime()
HOSTILE = Regime(decay="mixed", repeated_keys=True)
WORST_SOLVE = Regime(decay="none", repeated_keys=True, beta_logit=20.0)


def random_operands(
    spec: SessionSpec, parent: NDArray[np.int32], rng: np.random.Generator, regime: Regime = MILD
) -> Operands:
    """Operands for `spec` over the given parents `[N]` or `[B, N]`."""
    heads = spec.heads
    gates = (spec.batch, spec.rows, heads.value_heads)
    keys = (spec.batch, spec.rows, heads.key_heads, heads.key_dim)
    k = rng.standard_normal(keys)
    if regime.repeated_keys:
        k = k[:, :1] + 0.01 * k
    a = _gate_inputs(rng, gates, regime.decay)
    b = rng.standard_normal(gates) * 2 if regime.beta_logit is None else np.full(gates, regime.beta_logit)
    return Operands(
        q=round_bf16(rng.standard_normal(keys)),
        k=round_bf16(k),
        v=round_bf16(rng.standard_normal((*gates, heads.value_dim))),
        a=round_bf16(a),
        b=round_bf16(b),
        A_log=round_bf16(rng.uniform(-0.5, 0.5, heads.value_heads)),
        dt_bias=round_bf16(rng.uniform(-0.5, 0.5, heads.value_heads)),
        parent=np.asarray(parent, dtype=np.int32),
    )


def _gate_inputs(rng: np.random.Generator, shape: tuple[int, ...], decay: Decay) -> NDArray[Any]:
    """Raw a: softplus(a) is about 0.05 (mild), 0 (none: a = -120) or 30 (strong)."""
    mild = rng.normal(-3.0, 0.7, shape)
    if decay == "mild":
        return mild
    if decay == "none":
        return np.full(shape, -120.0)
    strong = np.full(shape, 30.0)
    if decay == "strong":
        return strong
    kind = rng.integers(0, 3, shape)
    return np.select([kind == 0, kind == 1], [mild, strong], -120.0)


def random_states(spec: SessionSpec, slots: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Dense states `[slots, HV, V, K]` of the size that normalised keys and unit values build up;
    bfloat16-exact."""
    heads = spec.heads
    shape = (slots, heads.value_heads, heads.value_dim, heads.key_dim)
    return round_bf16(rng.standard_normal(shape))


def random_tree(rng: np.random.Generator, rows: int) -> DraftTree:
    """A tree of `rows` rows: a chain, a star, a deep one, a wide one, or random parents."""
    kind = rng.choice(["chain", "star", "deep", "wide", "random"])
    parent = [-1]
    for row in range(1, rows):
        nearest = row - 1
        lowest, highest = {
            "chain": (nearest, nearest),
            "star": (0, 0),
            "deep": (max(0, row - 3), nearest),
            "wide": (row // 4, min(nearest, row // 2)),
            "random": (0, nearest),
        }[str(kind)]
        parent.append(int(rng.integers(lowest, highest, endpoint=True)))
    return DraftTree(tuple(parent))
