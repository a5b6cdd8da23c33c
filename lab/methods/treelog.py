"""`treelog`: tree verification over a log of committed rows; the dense state is written only when the log is full.

Log rows are ancestors of every tree row whose factors are already known, so a step reads the base state once, adds the
log's small products and appends the accepted rows to the log. Appending moves indices, not rows.
"""

from __future__ import annotations

from lab.methods.base import LayerHeads, Phase, StateMethod, verify_operands
from lab.methods.logs import mean_log_rows, steps_per_flush
from lab.trees import DraftTree

#: Rows of the log, and of the longer one of small trees with long paths.
LOG_ROWS, LONG_LOG_ROWS = 16, 24
#: Longest paths and most rows of the trees that have the longer log. A path of 8 rows is half of a log of 16, which
#: would be folded nearly every second step; shorter paths fold rarely enough, longer ones and larger trees do not repay
#: what more rows of a log cost.
LONG_LOG_PATHS, LONG_LOG_TREE_ROWS = range(5, 9), 8


def log_capacity(rows: int, longest_path: int) -> int:
    """Rows of the log of trees of `rows` rows: at least one whole path, so that a step always fits after a flush."""
    usual = LONG_LOG_ROWS if longest_path in LONG_LOG_PATHS and rows <= LONG_LOG_TREE_ROWS else LOG_ROWS
    return max(usual, longest_path)


def rounds_records(heads: LayerHeads) -> bool:
    """Whether the log keeps u in bf16: as the state, which every flush rounds anyway."""
    return heads.state_dtype == "bfloat16"


class TreeLog(StateMethod):
    name = "treelog"
    title = "tree-WY over a log, deferred write (this project)"
    topology = "tree"
    source = "this project"

    def record_bytes(self, heads: LayerHeads) -> int:
        """One row as the kernels keep it: u in the state's type, the raw key in bf16, a gate in fp32 per value head."""
        return heads.record_bytes(2 if rounds_records(heads) else 4, 2)

    def log_rows(self, tree: DraftTree) -> int:
        """`log_capacity` of the tree."""
        return log_capacity(tree.num_rows, tree.max_depth + 1)

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
