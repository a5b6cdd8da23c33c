"""`treelog`: tree verification over a log of committed rows; the dense state is written only when the log is full.

Log rows are ancestors of every tree row whose factors are already known, so a step reads the base state once, adds the
log's small products and appends the accepted rows to the log. Appending moves indices, not rows.
"""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.methods.logs import mean_log_rows, steps_per_flush
from lab.trees import DraftTree

#: Rows of the log: for short paths, and for small trees with paths of more than `SHORT_PATH` rows, which would fold a
#: log of 16 rows in every second step.
LOG_ROWS, LONGER_LOG_ROWS = 16, 24
SHORT_PATH, SMALL_TREE = 4, 8


def log_rows(rows: int, longest_path: int) -> int:
    """Capacity of the log for trees of `rows` rows: at least one path, so that a step always fits after a flush."""
    longer = rows <= SMALL_TREE and longest_path > SHORT_PATH
    return max(LONGER_LOG_ROWS if longer else LOG_ROWS, longest_path)


class TreeLog(StateMethod):
    name = "treelog"
    title = "tree-WY over a log, deferred write (this project)"
    topology = "tree"
    source = "this project"

    def record_bytes(self, heads: LayerHeads) -> int:
        """One row as the kernels keep it: u in fp32, the raw key in bf16, a gate in fp32 per value head."""
        return heads.record_bytes(4, 2)

    def log_rows(self, tree: DraftTree) -> int:
        """Capacity of the log."""
        return log_rows(tree.num_rows, tree.max_depth + 1)

    def scratch_bytes(self, heads: LayerHeads, tree: DraftTree) -> int:
        return (self.log_rows(tree) + tree.num_rows) * self.record_bytes(heads)

    def phases(self, heads: LayerHeads, tree: DraftTree, rows_committed: float) -> tuple[Phase, ...]:
        record = self.record_bytes(heads)
        flush_steps = steps_per_flush(self.log_rows(tree), tree.max_depth + 1, rows_committed)
        history = mean_log_rows(flush_steps, rows_committed) * record
        read, write = verify_operands(heads, tree)
        return (
            Phase("verify", heads.state_bytes + history + read, tree.num_rows * record + write),
            Phase("flush", 0, heads.state_bytes, share=1 / flush_steps),
        )
