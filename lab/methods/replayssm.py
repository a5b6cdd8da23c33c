"""`replayssm`: a ring of factor rows; the dense state is written when the ring is nearly full. Chains only."""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.methods.logs import mean_log_rows, steps_per_flush
from lab.trees import DraftTree

#: History rows kept beside the verification window.
HISTORY_ROWS = 16


class ReplaySSM(StateMethod):
    name = "replayssm"
    title = "ring of factors, deferred write (chains)"
    topology = "chain"
    source = "vLLM issue 47572; ring of 16 + T rows, u and k in bf16"

    def _ring_rows(self, tree: DraftTree) -> int:
        return 1 << (HISTORY_ROWS + tree.num_rows - 1).bit_length()

    def record_bytes(self, heads: LayerHeads) -> int:
        """One row of the ring: u and the key in bf16."""
        return heads.record_bytes(2, 2)

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        return self._ring_rows(tree) * self.record_bytes(heads)

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        record, rows = self.record_bytes(heads), tree.num_rows
        flush_steps = steps_per_flush(HISTORY_ROWS + rows, 2 * rows, rows_committed)
        history = mean_log_rows(flush_steps, rows_committed) * record
        read, write = verify_operands(heads, tree)
        return (
            Phase("verify", heads.state_bytes + history + read, rows * record + write),
            Phase("flush", 0, heads.state_bytes, share=1 / flush_steps),
        )
