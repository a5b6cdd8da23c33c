"""`bole`: read-only tree verification, then one batched commit of all layers."""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.trees import DraftTree


class Bole(StateMethod):
    name = "bole"
    title = "tree-WY, batched commit every step"
    topology = "tree"
    source = "arXiv 2608.01651"

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        return tree.num_rows * self.record_bytes(heads)

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        record = self.record_bytes(heads)
        read, write = verify_operands(heads, tree)
        return (
            Phase("verify", heads.state_bytes + read, tree.num_rows * record + write),
            Phase("commit", heads.state_bytes + rows_committed * record, heads.state_bytes, all_layers=True),
        )
