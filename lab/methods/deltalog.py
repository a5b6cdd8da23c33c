"""`deltalog`: plain decoding with a base state and a log of factor rows, merged when the log is full."""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.methods.logs import mean_log_rows, steps_per_flush
from lab.trees import DraftTree

#: Rows of the log.
LOG_ROWS = 16


class DeltaLog(StateMethod):
    name = "deltalog"
    title = "plain decoding with a log, deferred write"
    topology = "decode"
    source = "arXiv 2608.15533"

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        return LOG_ROWS * self.record_bytes(heads)

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        record = self.record_bytes(heads)
        flush_steps = steps_per_flush(LOG_ROWS, 1, 1.0)
        history = mean_log_rows(flush_steps, 1.0) * record
        read, write = verify_operands(heads, tree)
        return (
            Phase("verify", heads.state_bytes + history + read, record + write),
            Phase("flush", 0, heads.state_bytes, share=1 / flush_steps),
        )
