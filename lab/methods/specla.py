"""`specla`: accepted factors wait in a pending buffer and are applied by the next verification."""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.trees import DraftTree


class SpecLA(StateMethod):
    name = "specla"
    title = "delayed commit, fused in the next verification"
    topology = "tree"
    source = "arXiv 2607.16673"

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        """Records of all rows and a pending buffer as long as the longest path."""
        return (tree.num_rows + tree.max_depth + 1) * self.record_bytes(heads)

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        record = self.record_bytes(heads)
        read, write = verify_operands(heads, tree)
        pending = rows_committed * record
        return (
            Phase(
                "verify",
                heads.state_bytes + pending + read,
                heads.state_bytes + tree.num_rows * record + write,
            ),
            Phase("gather", pending, pending, all_layers=True),
        )
