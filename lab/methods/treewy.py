"""`treewy`: tree-WY verification whose previous accepted state is rebuilt, written and used in the same launch."""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.trees import DraftTree


class TreeWY(StateMethod):
    name = "treewy"
    title = "tree-WY, state rebuilt and written every step"
    topology = "tree"
    source = "arXiv 2608.20961"

    def record_bytes(self, heads: LayerHeads) -> int:
        """The stash keeps u and k per value head and the cumulative decay, all fp32."""
        return heads.record_bytes(4, 4, key_per_value_head=True)

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        return tree.num_rows * self.record_bytes(heads)

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        stash = tree.num_rows * self.record_bytes(heads)
        read, write = verify_operands(heads, tree)
        return (Phase("verify", heads.state_bytes + stash + read, heads.state_bytes + stash + write),)
