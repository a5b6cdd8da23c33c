"""Draft trees: the rows that one speculative step verifies.

Row 0 is the root, the last committed token, fed again. Rows 1 to N - 1 are drafts. A row's parent has a smaller index,
so every prefix of the rows is a tree of its own. A chain is a tree of width 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.data import data_path
from lab.errors import UsageError

#: Rows that fit one 64-bit ancestor mask.
MAX_ROWS = 64


@dataclass(frozen=True)
class DraftTree:
    """An immutable draft tree of N rows.

    `parent[i] < i` and `parent[0] == -1`; `rank[i]` is the place of row i among its siblings (0 = the drafter's first
    choice; 0 for the root). Raises `UsageError` when the rows are not one tree in topological order or exceed
    `MAX_ROWS`.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parent = self.parent
        if not parent or parent[0] != -1:
            raise UsageError("a draft tree starts with its root: parent[0] must be -1")
        if len(parent) > MAX_ROWS:
            raise UsageError(f"draft tree has {len(parent)} rows (root included); at most {MAX_ROWS} are supported")
        for row, above in enumerate(parent[1:], start=1):
            if not 0 <= above < row:
                raise UsageError(f"parent[{row}] = {above}; a parent is a row from 0 to {row - 1} (one root, no cycle)")
        if not self.rank:
            seen: dict[int, int] = {}
            ranks = [0]
            for above in parent[1:]:
                ranks.append(seen.get(above, 0))
                seen[above] = ranks[-1] + 1
            object.__setattr__(self, "rank", tuple(ranks))
        elif len(self.rank) != len(parent) or len(set(zip(parent[1:], self.rank[1:], strict=True))) < len(parent) - 1:
            raise UsageError("draft tree ranks must be one per row and distinct among siblings")

    @classmethod
    def chain(cls, drafts: int) -> DraftTree:
        """The chain of `drafts` drafts; 0 gives the root alone."""
        return cls(tuple(range(-1, drafts)))

    @classmethod
    def binary(cls, drafts: int) -> DraftTree:
        """Row r hangs under row (r - 1) // 2: two children each, breadth first, until the drafts are used up."""
        return cls((-1, *((row - 1) // 2 for row in range(1, drafts + 1))))

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> DraftTree:
        """Every row of depth i gets `widths[i]` children; rows in depth-first order.

        `(1, 1, 1)` is a chain of three drafts, `(2, 2, 2)` has 14 drafts, `(3, 3, 3)` has 39.
        """
        if any(width < 1 for width in widths):
            raise UsageError(f"tree widths {list(widths)}: every width must be at least 1")
        drafts = 0
        for width in reversed(widths):
            drafts = width * (1 + drafts)
            if drafts >= MAX_ROWS:
                raise UsageError(f"tree widths {list(widths)} need more than {MAX_ROWS} rows (root included)")
        parent = [-1]

        def grow(row: int, depth: int) -> None:
            for _ in range(widths[depth] if depth < len(widths) else 0):
                parent.append(row)
                grow(len(parent) - 1, depth + 1)

        grow(0, 0)
        return cls(tuple(parent))

    @classmethod
    def from_rank_paths(cls, paths: Iterable[Sequence[int]]) -> DraftTree:
        """Tree whose nodes are the given paths of ranks, e.g. `[0], [1], [0, 0]`; missing prefixes are an error."""
        unique = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        row_of: dict[tuple[int, ...], int] = {(): 0}
        parent, rank = [-1], [0]
        for path in unique:
            if not path or min(path) < 0 or max(path) >= MAX_ROWS:
                raise UsageError(
                    f"rank path {list(path)}: a path is a non-empty list of ranks from 0 to {MAX_ROWS - 1}"
                )
            if path[:-1] not in row_of:
                raise UsageError(f"rank path {list(path)} has no parent; add the path {list(path[:-1])} first")
            row_of[path] = len(parent)
            parent.append(row_of[path[:-1]])
            rank.append(path[-1])
        return cls(tuple(parent), tuple(rank))

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def num_rows(self) -> int:
        """Rows the target model verifies, the root included."""
        return len(self.parent)

    @property
    def num_drafts(self) -> int:
        """Drafted tokens, the root excluded."""
        return len(self.parent) - 1

    @cached_property
    def depth(self) -> tuple[int, ...]:
        depths = [0]
        for above in self.parent[1:]:
            depths.append(depths[above] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        return max(self.depth)

    @property
    def is_chain(self) -> bool:
        return all(above == row for row, above in enumerate(self.parent[1:]))

    @cached_property
    def width_by_depth(self) -> tuple[int, ...]:
        """Drafts at depth 1, 2, …"""
        counts = [0] * (self.max_depth + 1)
        for depth in self.depth:
            counts[depth] += 1
        return tuple(counts[1:])

    @cached_property
    def ancestor_masks(self) -> tuple[int, ...]:
        """Bit j of entry i is set when row j lies on the path from the root to row i, row i included."""
        masks = [1]
        for row, above in enumerate(self.parent[1:], start=1):
            masks.append(masks[above] | 1 << row)
        return tuple(masks)

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from the root to `row`, both included."""
        rows = [row]
        while self.parent[rows[-1]] >= 0:
            rows.append(self.parent[rows[-1]])
        return tuple(reversed(rows))

    def paths(self) -> list[tuple[int, ...]]:
        """The path to every leaf."""
        inner = set(self.parent)
        return [self.path(row) for row in range(len(self)) if row not in inner]

    def children(self, row: int) -> tuple[int, ...]:
        """Children of a row in the order of their ranks."""
        found = [child for child in range(row + 1, len(self)) if self.parent[child] == row]
        return tuple(sorted(found, key=lambda child: self.rank[child]))

    def parent_array(self) -> NDArray[np.int32]:
        """`[N]` int32, -1 for the root: the operand of the kernels."""
        return np.asarray(self.parent, dtype=np.int32)

    def mask_array(self) -> NDArray[np.uint64]:
        """`[N]` uint64 ancestor masks: the operand of the kernels."""
        return np.asarray(self.ancestor_masks, dtype=np.uint64)


def parse_tree(text: str) -> DraftTree:
    """Tree from its text: widths (`2,2,2`), `chain:K`, `binary:K`, a shipped name, or a JSON file of rank paths.

    Widths are children per row, depth by depth. K counts the drafts; in `binary:K` every row has two children, breadth
    first.

    Shipped are the published trees of `lab/data/draft_trees.json`. The JSON file holds a list of rank paths, or an
    object with the key `paths`. Raises `UsageError` otherwise.
    """
    text = str(text).strip()
    if text.startswith(("medusa:", "eagle:")):
        shipped = json.loads(data_path("draft_trees.json").read_text(encoding="utf-8"))
        if text not in shipped:
            raise UsageError(f"tree '{text}' is not shipped; shipped are {', '.join(shipped)}")
        return DraftTree.from_rank_paths(shipped[text]["paths"])
    if re.fullmatch(r"(chain|binary):[0-9]{1,9}", text):
        kind, _, number = text.partition(":")
        drafts = int(number)
        if drafts >= MAX_ROWS:
            raise UsageError(f"tree '{text}' has {drafts + 1} rows (root included); at most {MAX_ROWS} are supported")
        return DraftTree.chain(drafts) if kind == "chain" else DraftTree.binary(drafts)
    if re.fullmatch(r"(\[.*\]|\(.*\)|[^\[(]*)", text):
        parts = [part.strip() for part in text.strip("[]()").split(",")]
        if all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
            return DraftTree.from_widths([int(part) for part in parts])
    path = Path(text)
    if path.suffix != ".json":
        raise UsageError(
            f"tree '{text}' is not understood; give widths like 2,2,2, chain:3, binary:15, a shipped name such as "
            "medusa:mc_sim_7b_63, or a JSON file of rank paths"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"tree file '{text}' cannot be read as JSON: {error}") from error
    paths = raw.get("paths") if isinstance(raw, dict) else raw
    rank_lists = isinstance(paths, list) and all(
        isinstance(path, list) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in path)
        for path in paths
    )
    if not isinstance(paths, list) or not rank_lists:
        raise UsageError(f"tree file '{text}' must hold a list of rank paths such as [[0], [1], [0, 0]]")
    return DraftTree.from_rank_paths(paths)
