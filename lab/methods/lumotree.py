"""`lumotree`: the tree cut into paths; states kept where paths branch; the accepted path replayed from raw operands."""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.trees import DraftTree


def cut_rows(tree: DraftTree) -> tuple[int, ...]:
    """Rows whose state is exported: those of the spine, the first deepest path, from which other paths leave.

    A second launch scans every path that leaves the spine from its cut state. Rows that several such paths share are
    scanned more than once; that costs arithmetic, not state traffic, and needs no further cut.
    """
    spine = set(tree.path(max(range(tree.num_rows), key=lambda row: tree.depth[row])))
    return tuple(
        sorted({tree.parent[row] for row in range(1, tree.num_rows) if row not in spine and tree.parent[row] in spine})
    )


class LumoTree(StateMethod):
    name = "lumotree"
    title = "path scans with cut states, replay commit"
    topology = "tree"
    source = "arXiv 2609.23900"

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        return len(cut_rows(tree)) * heads.state_bytes + tree.num_rows * heads.raw_record_bytes

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        cuts = len(cut_rows(tree)) * heads.state_bytes
        record = heads.raw_record_bytes
        read, write = verify_operands(heads, tree)
        return (
            Phase("verify", heads.state_bytes + cuts + read, cuts + tree.num_rows * record + write),
            Phase("commit", heads.state_bytes + rows_committed * record, heads.state_bytes, all_layers=True),
        )
