"""Layers, operands and launches of one state method, laid out for measurement and ready for graph capture.

A `Step` holds several layers with memory of their own, so that a pass over them finds nothing in the L2 cache, and the
cursors that a model keeps once per request. Its phases are functions that only launch kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_cupy.closed_form import Fold, Layer, Log, Verification, tree_masks
from kernels_cupy.compiler import load_cupy
from kernels_cupy.fill import layer_operands, layer_outputs, layer_states
from kernels_cupy.plans import Problem, VerifyPlan
from kernels_cupy.problems import LOG_METHODS, log_in_bf16, log_limits, verification_problem
from kernels_cupy.serial import Recurrence, Scatter, commit_index
from lab.errors import UsageError
from lab.methods import SERIAL_METHODS
from lab.methods.base import LayerHeads
from lab.methods.protocol import Operands
from lab.trees import DraftTree

CUDA_METHODS = (*SERIAL_METHODS, "bole", *LOG_METHODS)
#: Most steps of one sample.
LONGEST_CYCLE = 48


@dataclass(frozen=True, slots=True)
class Shape:
    """One point of the grid: a method on a layer shape, batch and tree."""

    method: str
    heads: LayerHeads
    batch: int
    tree: DraftTree

    @property
    def rows_committed(self) -> float:
        """Rows that a step commits on average: 60 % of a chain's rows, a path of 3 on trees."""
        rows = self.tree.num_rows
        return max(0.6 * rows, 1.0) if self.tree.is_chain else float(min(3, self.tree.max_depth + 1))

    @property
    def problem(self) -> Problem:
        """What decides how the verification is cut; the method is not a serial one."""
        return verification_problem(self.method, self.heads, self.tree.num_rows, self.tree.max_depth + 1)

    @property
    def log_limits(self) -> tuple[int, int]:
        """Capacity of the log and rows that a step reserves."""
        return log_limits(self.method, self.tree.num_rows, self.tree.max_depth + 1)

    def committed(self) -> NDArray[np.int32]:
        """Rows that each request commits in every step: whole numbers, `rows_committed` on average."""
        done = np.rint(self.rows_committed * np.arange(self.batch + 1))
        return np.asarray(np.maximum(np.diff(done), 1), np.int32)

    def cycles(self) -> NDArray[np.int32]:
        """Steps between two flushes of each request: its log has grown past what leaves room for a whole path."""
        capacity, reserve = self.log_limits
        return np.asarray((capacity - reserve) // self.committed() + 1, np.int32)

    def turns(self) -> NDArray[np.int32]:
        """Steps since each request's last flush at the start, so that as many flush in one step as in another."""
        committed, cycles = self.committed(), self.cycles()
        turns = np.zeros(self.batch, np.int32)
        for rows in set(committed.tolist()):
            alike = np.flatnonzero(committed == rows)
            turns[alike] = np.arange(len(alike)) % cycles[alike]
        return turns

    @property
    def cycle_steps(self) -> int:
        """Steps after which the logs of all requests are where they were, at most `LONGEST_CYCLE`."""
        return int(min(math.lcm(*set(self.cycles().tolist())), LONGEST_CYCLE))

    @property
    def mean_log_rows(self) -> float:
        """Rows in a request's log when a step starts: it climbs by what a step commits, and that step folds it."""
        return float(np.mean(self.committed() * (self.cycles() + 1) / 2))

    def record_bytes(self, rows: float) -> float:
        """Bytes of `rows` factor records: u, raw k in bf16, g."""
        width = 2 if log_in_bf16(self.method, self.heads) else 4
        heads = self.heads
        per_value_head = width * heads.value_dim + 4
        return rows * (heads.value_heads * per_value_head + 2 * heads.key_heads * heads.key_dim)

    def bytes_moved(self, phase: str) -> float:
        """Fewest bytes that these kernels can move in the phase, per layer: every state, operand and record once.

        Records are in this package's own formats, which are smaller than those that the published methods state.
        """
        heads, rows, committed = self.heads, self.tree.num_rows, float(np.mean(self.committed()))
        state = heads.state_bytes
        operands = rows * (heads.operand_bytes - 4 * heads.value_heads)  # gates are bf16 here
        fold = 2 * state + self.record_bytes(committed)
        if self.method in SERIAL_METHODS:
            verify, commit = float((1 + rows) * state + operands), 0.0  # a tree's parents come from the L2 cache
            if self.method == "storeall" and not self.tree.is_chain:
                commit = 2.0 * state
        elif self.method == "bole":
            verify, commit = state + operands + self.record_bytes(rows), fold
        else:
            verify = state + operands + self.record_bytes(rows + self.mean_log_rows)
            if self.method == "treewy":
                verify += state
            commit = 0.0
        flush = 2 * state + self.record_bytes(self.log_limits[0]) if phase == "flush" else 0.0
        amortised = 0.0
        if self.method in LOG_METHODS and self.method != "treewy":
            amortised = state * float(np.mean(1 / self.cycles()))
        per_request = {"verify": verify, "commit": commit, "flush": flush, "step": verify + commit + amortised}
        return self.batch * per_request[phase]

    def layer_bytes(self) -> float:
        """Device memory of one layer."""
        rows, states = self.tree.num_rows, 1
        if self.method == "storeall":
            states = rows + 1
        operands = rows * self.heads.operand_bytes
        records = 0.0
        if self.method in LOG_METHODS or self.method == "bole":
            records = self.record_bytes(rows + (self.log_limits[0] if self.method in LOG_METHODS else 0))
        return self.batch * (states * self.heads.state_bytes + operands + records)


class Step:
    """`layers` layers of one `Shape`; `phases` names what can be timed alone and, as `step`, together.

    `chained_step` is the phase `step` as a model can run it: each layer but the first is chained to the layer before,
    and may start while that one ends. With one layer it is `step` itself. `cut` puts another plan, or the chosen one,
    in the place of the verification's; serial methods have none. `fed`: all operands of a layer are what the layer
    before puts out, in one of two buffers that take turns, so that a launch which reads or writes them too early gives
    something else; and of more than two requests the middle one is padding.
    """

    def __init__(
        self, shape: Shape, layers: int, seed: int = 0, plan: VerifyPlan | None = None, fed: bool = False
    ) -> None:
        cp, heads, batch, tree = load_cupy(), shape.heads, shape.batch, shape.tree
        self.shape, self.num_layers = shape, layers
        rng = np.random.default_rng(seed)
        rows = tree.num_rows
        self.slots = cp.asarray(rng.permutation(batch).astype(np.int32))
        self.masks = tree_masks(cp.asarray(tree.parent_array()))
        self.accepted = cp.asarray(accepted_rows(shape))
        operands = layer_operands(cp, seed, layers, batch, rows, heads)
        outputs = layer_outputs(cp, layers, batch, rows, heads)
        pools = layer_states(cp, seed, layers, batch, heads)
        if fed:
            outputs[:] = [outputs[layer % 2] for layer in range(layers)]
            operands[1:] = [fed_by(x, before, heads) for x, before in zip(operands[1:], outputs, strict=False)]
            if batch > 2 and shape.method != "storeall":  # whose committed states have slots of their own
                self.slots[batch // 2] = -1
        self._keep: list[Any] = [operands, outputs, pools]
        self._written: dict[str, list[Any]] = {"output": outputs, "state": pools}
        self.phases: dict[str, Callable[[], None]] = {}
        self.chained_step: Callable[[], None] = _nothing
        self.cut: Callable[[VerifyPlan | None], None] = _one_way
        if shape.method in SERIAL_METHODS:
            self._serial(operands, outputs, pools)
        else:
            self._closed_form(operands, outputs, pools, plan)

    def arrays(self) -> dict[str, Any]:
        """All that a step writes, by name: outputs, states and records of every layer, and what layers share."""
        return {
            f"{name} of layer {i}" if len(arrays) == self.num_layers else name: array
            for name, arrays in self._written.items()
            for i, array in enumerate(arrays)
        }

    def release(self) -> None:
        """Let go of what refers to the step: its memory would stay until the next collection."""
        self.phases.clear()
        self.chained_step = _nothing
        self.cut = _one_way

    def _step_of(self, layers: Sequence[Verification | Recurrence], finish: Callable[[], None]) -> None:
        """Both ways to run a step: one launch per layer, then `finish`, once for all layers."""

        def step(chained: bool) -> None:
            launch_all(layers, chained)
            finish()

        self.phases["step"], self.chained_step = partial(step, False), partial(step, True)

    def _serial(self, operands: list[Operands], outputs: list[Any], pools: list[Any]) -> None:
        cp, shape = load_cupy(), self.shape
        batch, rows, heads = shape.batch, shape.tree.num_rows, shape.heads
        if shape.method == "recurrent":
            slots = self.slots
            verify = [
                Recurrence(heads, x, o, pool, slots, pool, slots[:, None])
                for x, o, pool in zip(operands, outputs, pools, strict=True)
            ]
            self.phases["verify"] = lambda: launch_all(verify)
            self._step_of(verify, _nothing)
            return
        chain = shape.tree.is_chain
        table = np.arange(batch * rows, dtype=np.int32).reshape(batch, rows)
        if chain:  # one pool: slots of the rows, then of the committed states
            nodes = [cp.zeros((batch * (rows + 1), *pool.shape[1:]), pool.dtype) for pool in pools]
            for node, pool in zip(nodes, pools, strict=True):
                node[batch * rows :] = pool
            pools[:] = nodes
        else:
            nodes = [cp.zeros((batch, rows, *pool.shape[1:]), pool.dtype) for pool in pools]
        committed = cp.asnumpy(self.slots)[:, None] + (batch * rows if chain else 0)
        slot_table = cp.asarray(np.concatenate([table, committed], axis=1).astype(np.int32))
        self._written |= {"slots": [slot_table]} if chain else {"row's states": nodes, "slots": [slot_table]}
        parent = None if chain else cp.asarray(shape.tree.parent_array())
        verify = [
            Recurrence(heads, x, o, pool, slot_table[:, -1], node, slot_table, parent)
            for x, o, pool, node in zip(operands, outputs, pools, nodes, strict=True)
        ]
        self.phases["verify"] = lambda: launch_all(verify)
        if chain:

            def commit() -> None:
                commit_index(self.accepted, slot_table)
        else:
            scatter = Scatter(nodes, pools, self.slots)

            def commit() -> None:
                scatter(self.accepted)

            self.phases["commit"] = commit
        self._step_of(verify, commit)

    def _closed_form(
        self, operands: list[Operands], outputs: list[Any], pools: list[Any], plan: VerifyPlan | None
    ) -> None:
        cp, shape = load_cupy(), self.shape
        batch, rows, heads = shape.batch, shape.tree.num_rows, shape.heads
        log = Log(batch, rows, *shape.log_limits) if shape.method in LOG_METHODS else None
        idle = Log(batch, rows, *shape.log_limits) if log else None  # never flushes: for the verification alone
        record_rows = log.record_rows if log else rows
        log_bf16 = log_in_bf16(shape.method, heads)
        layers = [Layer(pool, heads, batch, record_rows, log_bf16) for pool in pools]
        for layer in layers:  # unwritten records are NaN; logs start with some of them
            for x in (layer.u, layer.k, layer.g):
                x.fill(0)
        fold = Fold(layers, self.slots, rows)
        if log and idle:
            if shape.method == "treewy":  # every step folds the path of the one before
                idle.length[:] = cp.asarray(shape.committed())
            else:
                idle.length[:] = round(shape.mean_log_rows)
                idle.reserve = 0
                full = Log(batch, rows, *shape.log_limits)
                full.length[:] = log.capacity
                self._keep.append(full)
                self.phases["flush"] = lambda: fold.log(full)
        else:
            self.phases["commit"] = lambda: fold.path(self.accepted, self.masks)
        self._keep += [layers, log, idle]
        self._written |= {name: [getattr(layer, name) for layer in layers] for name in ("u", "k", "g")}
        if log:
            self._written |= {"log rows": [log.row_list], "log length": [log.length]}

        def verifications(log: Log | None, plan: VerifyPlan | None) -> list[Verification]:
            return [
                Verification(layer, self.slots, x, self.masks, o, log, plan=plan, longest_path=shape.tree.max_depth + 1)
                for layer, x, o in zip(layers, operands, outputs, strict=True)
            ]

        def cut(plan: VerifyPlan | None) -> None:
            verify = verifications(log, plan)
            alone: list[Verification] = []  # made when first wanted: most cuts are timed as a step only
            if log:
                log.length[:] = cp.asarray(shape.committed() * (shape.turns() + 1))

            def verify_alone() -> None:
                if not alone:
                    alone.extend(verifications(idle, plan))
                launch_all(alone)

            def commit() -> None:
                if log:
                    log.advance(self.accepted, self.masks)
                else:
                    fold.path(self.accepted, self.masks)

            self.phases["verify"] = verify_alone
            self._step_of(verify, commit)

        self.cut = cut
        cut(plan)


def _one_way(plan: VerifyPlan | None) -> None:
    raise UsageError("a serial method has one way to run; no plan fits it")


def _nothing() -> None:
    """What is once for all layers of a method that has no such launch."""


def launch_all(layers: Sequence[Verification | Recurrence], chained: bool = False) -> None:
    """A pass over the layers; `chained`, each launch but the first is chained to that of the layer before.

    The layer before writes none of this one's states and records, and the cursors of all layers change after the last
    only, so a chained launch may read them early.
    """
    for layer, launch in enumerate(layers):
        launch(chained and layer > 0)


def fed_by(operands: Operands, output: Any, heads: LayerHeads) -> Operands:
    """Operands out of another layer's output `[B, N, HV, V]`: v is all of it, the others parts."""
    batch, rows, values, _ = output.shape
    gates = output.reshape(-1)[: 2 * batch * rows * values].reshape(2, batch, rows, values)
    return replace(
        operands, q=output[..., : heads.key_heads, :], k=output[..., -heads.key_heads :, :], v=output,
        a=gates[0], b=gates[1],
    )  # fmt: skip


def accepted_rows(shape: Shape) -> NDArray[np.int32]:
    """Accepted row of each request, as deep as the rows that it commits."""
    row_of = {depth + 1: row for row, depth in reversed(list(enumerate(shape.tree.depth)))}
    return np.array([row_of[int(rows)] for rows in shape.committed()], np.int32)
