"""The one protocol by which every backend runs a state method: operands in, outputs and committed states out.

A session is one layer of one batch under one method. A speculative step is `verify`, which computes the
outputs of all N rows of each request from its committed state, then `commit`, which makes the state of the
accepted row the committed one. A method may do either lazily: what counts is what the next `verify` and
`materialise` see. Rows that a `commit` did not accept are gone; a second `verify` or a `flush` before the
`commit` discards them all.

Conventions (those of vLLM, SGLang and flash-linear-attention)
    g = -exp(A_log) softplus(a + dt_bias), softplus(x) = x above 20; beta = sigmoid(b)
    q and k are divided by sqrt(sum(x^2) + eps); q is scaled by K^-0.5 after that
    S <- exp(g) S;  u = beta (v - S k);  S <- S + u k^T;  o = S q
    value head h reads key head h // (HV / HK); a state is `[HV, V, K]` with K contiguous
Decays between two rows of a path are exp(min(G_t - G_i, 0)). Sums G over a log and a tree reach thousands,
where the difference of two float32 sums loses 1e-4: keep G in float64, or sum the path between the two rows.

Arrays are NumPy arrays on the `oracle` and `cpu` backends (float32 or float64 values) and CuPy arrays on
`cuda`, where bfloat16 operands are `uint16` bits (see `lab.bf16`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lab.errors import UsageError
from lab.methods.base import LayerHeads
from lab.trees import MAX_ROWS, DraftTree

#: Storage types of the state that every backend runs.
STATE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """Sizes that stay fixed for the life of a session.

    `rows` is N, the rows of each tree with the root. `max_path` bounds the rows from the root to any leaf,
    both included (0: N, as a chain needs); it sets how much a step can append. `chain` promises that every
    tree is a chain; `storeall` and `replayssm` run differently then. `log_rows` overrides the capacity of a
    log or ring in rows (0: the method's own). `norm_eps` is the epsilon inside the root of the q and k norms.

    Raises `UsageError` for sizes that no kernel supports.
    """

    heads: LayerHeads
    batch: int
    rows: int
    max_path: int = 0
    chain: bool = False
    log_rows: int = 0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        heads = self.heads
        if heads.state_dtype not in STATE_DTYPES:
            raise UsageError(f"state_dtype is '{heads.state_dtype}'; allowed are {', '.join(STATE_DTYPES)}")
        for holder, names, lowest in (
            (heads, ("key_heads", "value_heads", "key_dim", "value_dim"), 1),
            (self, ("batch", "rows"), 1),
            (self, ("max_path", "log_rows"), 0),
        ):
            for name in names:
                value = getattr(holder, name)
                if not _is_whole(value) or value < lowest:
                    raise UsageError(f"{name} = {value!r}; a whole number from {lowest} is needed")
        if heads.value_heads % heads.key_heads:
            raise UsageError(
                f"value_heads = {heads.value_heads}; allowed are multiples of key_heads ({heads.key_heads})"
            )
        if not isinstance(self.chain, bool | np.bool_):
            raise UsageError(f"chain = {self.chain!r}; allowed are True and False")
        if isinstance(self.norm_eps, bool | str) or not 0 < self.norm_eps < np.inf:
            raise UsageError(
                f"norm_eps = {self.norm_eps!r}; a finite number above 0 is needed, for rows of zeros have no norm"
            )
        if self.rows > MAX_ROWS:
            raise UsageError(f"rows = {self.rows}; allowed are 1 to {MAX_ROWS} (root included)")
        if self.max_path > self.rows:
            raise UsageError(f"max_path = {self.max_path}; allowed are 1 to the {self.rows} rows of a tree")
        if self.max_path == 0:
            object.__setattr__(self, "max_path", self.rows)
        if self.rows == 1:
            object.__setattr__(self, "chain", True)
        if self.chain and self.max_path < self.rows:
            raise UsageError(f"max_path = {self.max_path}; a chain of {self.rows} rows is a path of as many: give 0")

    @classmethod
    def for_tree(cls, heads: LayerHeads, tree: DraftTree, batch: int, log_rows: int = 0) -> SessionSpec:
        """The spec of a session whose requests all verify `tree`."""
        return cls(heads, batch, tree.num_rows, tree.max_depth + 1, tree.is_chain, log_rows)

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.heads.value_heads // self.heads.key_heads


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Raw inputs of one layer and step.

    q, k `[B, N, HK, K]` before normalisation, v `[B, N, HV, V]`, a, b `[B, N, HV]` before the gates; A_log,
    dt_bias `[HV]` float32; parent `[N]` (one tree for all requests) or `[B, N]` int32, -1 for the root.
    """

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any
    parent: Any

    def parents(self, spec: SessionSpec) -> NDArray[np.int32]:
        """Host parents as `[B, N]` int32."""
        parent = whole_numbers("operand parent", self.parent)
        return np.ascontiguousarray(np.broadcast_to(parent, (spec.batch, spec.rows)))

    def check_shapes(self, spec: SessionSpec) -> None:
        """Raise `UsageError` when an array does not have the shape that `spec` asks for (any backend)."""
        heads, batch, rows = spec.heads, spec.batch, spec.rows
        keys = (batch, rows, heads.key_heads, heads.key_dim)
        gates = (batch, rows, heads.value_heads)
        wanted = {
            "q": keys,
            "k": keys,
            "v": (*gates, heads.value_dim),
            "a": gates,
            "b": gates,
            "A_log": (heads.value_heads,),
            "dt_bias": (heads.value_heads,),
        }
        for name, shape in wanted.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise UsageError(f"operand {name} has shape {list(found)}; {list(shape)} is needed")
        if tuple(self.parent.shape) not in ((rows,), (batch, rows)):
            raise UsageError(
                f"operand parent has shape {list(self.parent.shape)}; [{rows}] or [{batch}, {rows}] is needed"
            )

    def check_values(self, spec: SessionSpec, live: NDArray[np.bool_]) -> None:
        """Raise `UsageError` for numbers that are not finite or parents that are not trees (host arrays).

        Only requests with `live[b]` count; padding may hold anything.
        """
        for name in ("q", "k", "v", "a", "b"):
            if not np.isfinite(getattr(self, name)[live]).all():
                raise UsageError(f"operand {name} holds NaN or infinite numbers; finite ones are needed")
        for name in ("A_log", "dt_bias"):
            if not np.isfinite(getattr(self, name)).all():
                raise UsageError(f"operand {name} holds NaN or infinite numbers; finite ones are needed")
        parent = self.parents(spec)[live]
        row = np.arange(spec.rows)
        topological = (parent[:, 1:] >= 0) & (parent[:, 1:] < row[1:])
        if (parent[:, 0] != -1).any() or not topological.all():
            raise UsageError("operand parent must be -1 for row 0 and a smaller row for every other row")
        if spec.chain and (parent != row - 1).any():
            raise UsageError("operand parent is not a chain; this session was made for chains only")
        longest = int(path_lengths(parent).max(initial=0))
        if longest > spec.max_path:
            raise UsageError(f"a tree has a path of {longest} rows; this session's max_path is {spec.max_path}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole_numbers(name: str, values: Any) -> NDArray[np.int32]:
    """A host copy as int32; raises `UsageError` for anything that is not whole numbers of that range."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise UsageError(f"{name} holds {found.dtype}; whole numbers (int32) are needed")
    limits = np.iinfo(np.int32)
    if found.size and not limits.min <= found.min() <= found.max() <= limits.max:
        raise UsageError(f"{name} holds {found.min()} to {found.max()}; numbers of int32 are needed")
    return found.astype(np.int32)


def path_lengths(parent: NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows from the root to each row, both included: `[B, N]` from parents `[B, N]`."""
    length = np.ones_like(parent)
    request = np.arange(len(parent))
    for row in range(1, parent.shape[1]):
        length[:, row] = length[request, parent[:, row]] + 1
    return length


def check_state_indices(state_indices: Any, slots: int, batch: int) -> NDArray[np.int32]:
    """Host state indices `[B]` int32: a slot of its own for every request, negative for padding."""
    indices = whole_numbers("state_indices", state_indices)
    if indices.shape != (batch,):
        raise UsageError(f"state_indices has shape {list(indices.shape)}; [{batch}] is needed")
    used = indices[indices >= 0]
    if (used >= slots).any():
        raise UsageError(f"state_indices names slot {used.max()}; the pool has {slots} slots")
    if len(np.unique(used)) != len(used):
        raise UsageError("state_indices names one slot twice; every request needs a slot of its own")
    return indices


class Session(Protocol):
    """One layer of one batch under one state method, on one backend.

    A backend's session class is called with `(spec, states, state_indices)`: `states` `[slots, HV, V, K]` are
    the dense states to start from (copied, and rounded to the state's storage type), `state_indices` `[B]`
    the slot of each request; a negative index marks padding, whose outputs are not written and whose states
    do not exist. Logs and scratch belong to a request's place in the batch. Nothing may be read from memory
    that was not written before: scratch may be filled with NaN at the start.
    """

    spec: SessionSpec

    def verify(self, operands: Operands) -> Any:
        """Outputs `[B, N, HV, V]` of all rows from the committed states (the buffer is reused by the next
        call)."""

    def commit(self, accepted: Any) -> None:
        """Make the accepted rows' states the committed ones.

        `accepted` `[B]` int32 holds the row of the last accepted node of each request: row 0 commits the root
        alone, -1 commits nothing. Entries of padding are ignored. `recurrent` updates its state in `verify`
        and therefore commits row 0 whatever this says.
        """

    def flush(self) -> None:
        """Fold everything that waits in logs into the dense states (EOS, preemption, export)."""

    def materialise(self, request: int) -> NDArray[np.float32]:
        """The committed state `[HV, V, K]` of the request at that place in the batch, on the host.

        Reads only: what waits in a log stays there. Not rounded to the state's storage type.
        """
