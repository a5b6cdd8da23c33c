"""`storeall`: a full state for every verified row, as vLLM does on chains and SGLang on trees.

A chain writes each row's state into its own pool slot and commits by index. On a tree every row reloads its parent's
state, and the accepted state is scattered back for all layers in one launch.
"""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.trees import DraftTree


class StoreAll(StateMethod):
    name = "storeall"
    title = "a state per row (what engines ship)"
    topology = "tree"
    source = "vLLM 0.33 (chain), SGLang 0.5.23 (tree)"

    def pool_states(self, tree: DraftTree) -> int:
        return tree.num_rows

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        """A tree keeps the committed state beside one intermediate state per row; a chain's row 0 slot is both."""
        return 0 if tree.is_chain else heads.state_bytes

    def pool_scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        """Nothing: the committed state is one of the pool's slots, on trees too."""
        return 0

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        state, rows = heads.state_bytes, tree.num_rows
        read, write = verify_operands(heads, tree)
        if tree.is_chain:
            return (Phase("verify", state + read, rows * state + write),)
        return (
            Phase("verify", rows * state + read, rows * state + write),
            Phase("commit", state, state, all_layers=True),
        )
