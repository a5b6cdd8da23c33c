"""What a state method promises: its memory law and the bytes its phases move.

A state method is one way to verify a draft tree on a Gated DeltaNet layer, keep what the verification found, and commit
the accepted rows. Laws are per request and layer on one tensor-parallel rank; sizes are bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from lab.errors import InfeasibleError
from lab.shapes import ModelShape
from lab.trees import DraftTree
from lab.units import DTYPE_BYTES

Topology = Literal["decode", "chain", "tree"]


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """Heads and widths of one recurrent layer on one rank, with the storage type of its state."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    state_dtype: str

    @classmethod
    def of(cls, shape: ModelShape, state_dtype: str, tp: int = 1) -> LayerHeads:
        shape.check_tensor_parallel(tp)
        return cls(
            shape.linear_num_key_heads // tp,
            shape.linear_num_value_heads // tp,
            shape.linear_key_head_dim,
            shape.linear_value_head_dim,
            state_dtype,
        )

    @property
    def state_bytes(self) -> int:
        """One recurrent state `[HV, V, K]`."""
        return int(self.value_heads * self.value_dim * self.key_dim * DTYPE_BYTES[self.state_dtype])

    @property
    def operand_bytes(self) -> int:
        """Inputs and output of one row: q, k, v and o in bf16, two gates in fp32."""
        keys = 2 * self.key_heads * self.key_dim
        values = 2 * self.value_heads * self.value_dim
        return 2 * (keys + values) + 8 * self.value_heads

    def record_bytes(self, value_width: int, key_width: int, *, key_per_value_head: bool = False) -> int:
        """One factor row: u (`value_width` bytes an element), k (`key_width`) and one fp32 decay per value head."""
        key_heads = self.value_heads if key_per_value_head else self.key_heads
        values = value_width * self.value_heads * self.value_dim
        return values + key_width * key_heads * self.key_dim + 4 * self.value_heads

    @property
    def raw_record_bytes(self) -> int:
        """One row of raw operands: k and v in bf16, two gates in fp32."""
        return 2 * (self.key_heads * self.key_dim + self.value_heads * self.value_dim) + 8 * self.value_heads


@dataclass(frozen=True, slots=True)
class Phase:
    """One kernel phase of a speculative step: bytes read and written per request and layer.

    `all_layers` marks a phase that is one launch for the whole model. `share` is the mean fraction of requests that run
    the phase in a step (a flush runs once in F steps).
    """

    name: str
    read_bytes: float
    write_bytes: float
    all_layers: bool = False
    share: float = 1.0

    @property
    def bytes(self) -> float:
        """Mean bytes moved per request, layer and step."""
        return self.share * (self.read_bytes + self.write_bytes)


class StateMethod(ABC):
    """One state method; children fill in the laws.

    `topology` says what it can verify: `decode` (one row), `chain` (no branching) or `tree` (both).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    topology: ClassVar[Topology]
    source: ClassVar[str]

    def check_tree(self, tree: DraftTree) -> None:
        """Raise `InfeasibleError` when the method cannot verify this tree."""
        if self.topology == "decode" and tree.num_rows > 1:
            raise InfeasibleError(
                f"state method '{self.name}' decodes one row per step; a tree of {tree.num_rows} rows needs one of "
                "storeall, treewy, bole, specla, lumotree, treelog"
            )
        if self.topology == "chain" and not tree.is_chain:
            raise InfeasibleError(
                f"state method '{self.name}' verifies chains only; give it a chain such as 1,1,1, or use one of "
                "storeall, treewy, bole, specla, lumotree, treelog for this tree"
            )

    def pool_states(self, tree: DraftTree) -> int:
        """Dense states that a running request keeps in the engine's block pool."""
        return 1

    def record_bytes(self, heads: LayerHeads) -> int:
        """One row of factors, where a method keeps any: u and the key in fp32 unless it says otherwise."""
        return heads.record_bytes(4, 4)

    @abstractmethod
    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        """Bytes that a running request keeps beside its pool states: records, logs, extra states."""

    def pool_scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        """Scratch beside the states in an engine whose block pool holds `pool_states` of them."""
        return self.scratch_bytes(heads, tree)

    def resident_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        """All bytes of state, records and logs of one running request in one layer (convolution rows excluded)."""
        return self.pool_states(tree) * heads.state_bytes + self.scratch_bytes(heads, tree)

    @abstractmethod
    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        """Phases of one steady-state step when `rows_committed` rows are committed per step on average."""


def verify_operands(heads: LayerHeads, tree: DraftTree) -> tuple[int, int]:
    """Bytes of operands that a verification reads (q, k, v, gates) and writes (o), all rows."""
    output = 2 * heads.value_heads * heads.value_dim
    return tree.num_rows * (heads.operand_bytes - output), tree.num_rows * output
