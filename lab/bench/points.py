"""The axes of a bench and the points that they span: method x heads x state type x batch x tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.errors import InfeasibleError, UsageError
from lab.methods import METHODS, get_method
from lab.methods.base import LayerHeads
from lab.methods.protocol import STATE_DTYPES
from lab.profiles.rows import KernelRow
from lab.shapes import load_shape
from lab.trees import DraftTree, parse_tree

#: Share of rows that a step commits on chains, and the rows of the accepted path on trees.
CHAIN_ACCEPTANCE = 0.6
TREE_PATH_ROWS = 3

#: Trees of the grids: chains of 1 to 16 rows, trees of 15 to 64.
CHAINS = ("chain:0", "chain:1", "chain:3", "chain:7", "chain:15")
TREES = ("2,2,2", "binary:15", "binary:31", "3,3,3", "binary:63")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Model and tensor-parallel size of the head shapes in a shipped profile.
PROFILE_MODELS = (
    ("Qwen3.5-35B-A3B", 1),
    ("Qwen3.5-27B", 1),
    ("Qwen3.5-397B-A17B", 1),
    ("Qwen3.5-397B-A17B", 8),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One place of the grid; `tree_text` names the tree in `kernels.csv`."""

    method: str
    heads: LayerHeads
    batch: int
    tree: DraftTree
    tree_text: str

    @property
    def rows_committed(self) -> float:
        """Rows that a step commits on average: 60 % of a chain's rows, at least 1; a path of 3 rows on trees."""
        if self.tree.is_chain:
            return max(CHAIN_ACCEPTANCE * self.tree.num_rows, 1.0)
        return float(min(TREE_PATH_ROWS, self.tree.max_depth + 1))

    def key(self, phase: str, timer: str) -> tuple[object, ...]:
        """The key that a row of this point has (`KernelRow.key`)."""
        heads = self.heads
        return (
            self.method, phase, heads.key_heads, heads.value_heads, heads.key_dim, heads.state_dtype, self.batch,
            self.tree.num_rows, self.tree_text, timer,
        )  # fmt: skip

    def row(self, phase: str, timer: str, bytes_moved: float, errors: tuple[float, float]) -> KernelRow:
        """The row of this point without a time; `errors` are those of output and state."""
        heads = self.heads
        return KernelRow(
            self.method, phase, heads.key_heads, heads.value_heads, heads.key_dim, heads.state_dtype, self.batch,
            self.tree.num_rows, self.tree_text, timer, None, None, None, 0, round(bytes_moved), None, *errors,
        )  # fmt: skip

    def __str__(self) -> str:
        heads = self.heads
        return (
            f"{self.method}, heads {heads.key_heads}/{heads.value_heads}, {heads.state_dtype}, batch {self.batch}, "
            f"tree {self.tree_text} ({self.tree.num_rows} rows)"
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """What a bench runs over. `models` pairs a shape with a tensor-parallel size; equal heads count once."""

    methods: tuple[str, ...]
    models: tuple[tuple[str, int], ...]
    state_dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    trees: tuple[str, ...]

    def __post_init__(self) -> None:
        for dtype in self.state_dtypes:
            if dtype not in STATE_DTYPES:
                raise UsageError(f"--state-dtype is '{dtype}'; allowed are {', '.join(STATE_DTYPES)}")
        if any(batch < 1 for batch in self.batches):
            raise UsageError(f"--batch is {min(self.batches)}; at least one request is needed")
        for method in self.methods:
            get_method(method)

    def points(self) -> list[Point]:
        """All points that make sense, trees of one shape together; raises `UsageError` when there is none."""
        return list(self._points()) or self._nothing()

    def _points(self) -> Iterator[Point]:
        trees = unique_trees(self.trees)
        seen: set[LayerHeads] = set()
        for model, tp in self.models:
            shape = load_shape(model)
            shape.check_tensor_parallel(tp)
            if shape.vector_gate:
                raise UsageError(f"model {shape.name} has a gate per key channel; the kernels have one per head")
            heads = [LayerHeads.of(shape, dtype, tp) for dtype in self.state_dtypes]
            fresh = [each for each in heads if each not in seen]
            seen.update(fresh)
            for text, tree in trees.items():
                for each in fresh:
                    for method in self.methods:
                        if _can_verify(method, tree):
                            yield from (Point(method, each, batch, tree, text) for batch in self.batches)

    def impossible(self) -> dict[str, list[str]]:
        """Trees that a method cannot verify, by method, where there are any."""
        trees = unique_trees(self.trees)
        pairs = {
            method: [text for text, tree in trees.items() if not _can_verify(method, tree)] for method in self.methods
        }
        return {method: texts for method, texts in pairs.items() if texts}

    def _nothing(self) -> list[Point]:
        raise UsageError(
            f"no method of {', '.join(self.methods)} verifies a tree of {', '.join(self.trees)}; "
            "decoding methods need chain:0, chain methods a chain such as 1,1,1"
        )


def unique_trees(texts: Sequence[str]) -> dict[str, DraftTree]:
    """Trees by the name they have in `kernels.csv`: `chain:K` for a chain, the text as given for others."""
    trees: dict[str, DraftTree] = {}
    for text in texts:
        tree = parse_tree(text)
        name = f"chain:{tree.num_drafts}" if tree.is_chain else str(text).strip().strip("[]()").replace(" ", "")
        trees.setdefault(name, tree)
    return trees


def spread_out(points: Sequence[Point]) -> list[Point]:
    """The points in an order in which every method comes early, and every tree, for a run that may be cut short."""
    methods, trees = Counter[str](), Counter[str]()
    left, ordered = list(points), list[Point]()
    while left:
        chosen = min(left, key=lambda point: (methods[point.method], trees[point.tree_text]))
        left.remove(chosen)
        ordered.append(chosen)
        methods[chosen.method] += 1
        trees[chosen.tree_text] += 1
    return ordered


def default_axes(backend: str, quick: bool, methods: Sequence[str]) -> Axes:
    """The axes where no flag says otherwise: a short run, or the grid of a profile (smaller on a CPU)."""
    known = tuple(method for method in METHODS if method in methods)
    models = PROFILE_MODELS[:1]
    if backend == "cpu":
        if quick:
            return Axes(known, models, ("float32",), (4,), ("chain:0", "chain:3", "2,2,2"))
        return Axes(known, models, STATE_DTYPES, (1, 4, 16), ("chain:0", "chain:3", "1,2,2", "3,2,1"))
    if quick:
        return Axes(known, models, ("float32",), (1, 32, 256), ("chain:0", "chain:3", "3,2,1"))
    return Axes(known, PROFILE_MODELS, STATE_DTYPES, BATCHES, (*CHAINS, *TREES))


def _can_verify(method: str, tree: DraftTree) -> bool:
    try:
        get_method(method).check_tree(tree)
    except InfeasibleError:
        return False
    return True
