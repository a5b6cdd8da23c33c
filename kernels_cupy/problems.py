"""What each state method asks of a verification: the rows of its log, and the problem that a plan cuts."""

from __future__ import annotations

from kernels_cupy.plans import Problem
from lab.methods import deltalog, replayssm, treelog
from lab.methods.base import LayerHeads

#: Methods that keep a log of accepted rows.
LOG_METHODS = ("treewy", "treelog", "deltalog", "replayssm")


def log_limits(method: str, rows: int, longest_path: int) -> tuple[int, int]:
    """Capacity of the log of one of the `LOG_METHODS`, and the rows that a step reserves in it."""
    return {
        "treewy": (longest_path, longest_path),
        "treelog": (treelog.log_rows(rows, longest_path), longest_path),
        "deltalog": (deltalog.LOG_ROWS, 1),
        "replayssm": (max(replayssm.HISTORY_ROWS, rows), rows),
    }[method]


def verification_problem(method: str, heads: LayerHeads, rows: int, longest_path: int) -> Problem:
    """What decides how a verification of trees of `rows` rows is cut; the method is not a serial one."""
    log_rows = log_limits(method, rows, longest_path)[0] if method in LOG_METHODS else 0
    return Problem(heads, rows, log_rows, method == "replayssm", longest_path)
