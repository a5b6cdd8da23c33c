"""`recurrent`: plain decoding, one row per step, the state read and written."""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.trees import DraftTree


class Recurrent(StateMethod):
    name = "recurrent"
    title = "plain decoding, no speculation"
    topology = "decode"
    source = "the gated delta rule, one token at a time"

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        return 0

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        read, write = verify_operands(heads, tree)
        return (Phase("decode", heads.state_bytes + read, heads.state_bytes + write),)
