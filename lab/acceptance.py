"""How many drafts a verification step accepts: difficulty of a round, decay with depth, rescue by rank.

A request belongs to a content class, which sets a mean. Every round of it draws one difficulty p, Beta
distributed about that mean, and keeps it along the whole path: the first choice at depth k is right with
p_k, a child of rank r with a fixed share of 1 - p_k, and below any accepted child the same p holds. All
results are exact expectations over p, taken at the nodes of a Gauss rule; nothing is sampled here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.errors import UsageError
from lab.trees import MAX_ROWS, DraftTree

Floats = NDArray[np.float64]

#: A rank beyond the ladder is rescued with this factor times the chance of the rank before it.
RANK_FALLOFF = 0.7
#: A Gauss rule of n nodes is exact to degree 2n - 1; a path in a tree of 64 rows has at most 63 factors.
GAUSS_NODES = MAX_ROWS // 2
DEFAULT_PRESET = "mtp-hybrid"


@dataclass(frozen=True, slots=True)
class AcceptanceModel:
    """Acceptance of drafts by depth and rank, correlated within a round.

    `mix`: content classes as (share of requests, mean acceptance of the first choice at depth 1).
    `concentration`: a + b of the Beta distribution of p; infinite means a constant p.
    `decay`: factor on p at depths 2, 3, …
    `rank_rescue`: chance that the child of rank 1, 2, … is right when all better ranks were wrong, for
    every depth; further ranks fall by `RANK_FALLOFF`; empty means that only first choices are ever right.
    `per_depth`: conditional acceptance of the first choice at depth 1, 2, … of a chain, instead of one mean
    and `decay`. A finite concentration then correlates depths and leaves this table as it is.
    `rescue_by_depth`: one ladder per depth instead of `rank_rescue` (drafters with one head per depth).
    """

    name: str
    mix: tuple[tuple[float, float], ...] = ()
    concentration: float = math.inf
    decay: float = 1.0
    rank_rescue: tuple[float, ...] = ()
    per_depth: tuple[float, ...] | None = None
    rescue_by_depth: tuple[tuple[float, ...], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if self.per_depth is not None:
            if not self.per_depth:
                raise UsageError(f"acceptance '{self.name}': per_depth is empty; give one value per depth")
            if self.mix not in ((), ((1.0, self.per_depth[0]),)):
                raise UsageError(f"acceptance '{self.name}': give either a mix or per_depth, not both")
            object.__setattr__(self, "mix", ((1.0, self.per_depth[0]),))
        weights = [weight for weight, _ in self.mix]
        if not weights or min(weights) <= 0 or not math.isclose(sum(weights), 1.0, abs_tol=1e-9):
            raise UsageError(f"acceptance '{self.name}': mix weights {weights} must be above 0 and sum to 1")
        self._check_chances("mix", [mean for _, mean in self.mix])
        self._check_chances("decay", [self.decay])
        self._check_chances("per_depth", self.per_depth or ())
        self._check_chances("rank_rescue", self.rank_rescue)
        for ladder in self.rescue_by_depth:
            self._check_chances("rescue_by_depth", ladder)
        if not self.concentration > 0:
            raise UsageError(f"acceptance '{self.name}': concentration = {self.concentration}; it must be above 0")

    def _check_chances(self, field: str, values: Sequence[float]) -> None:
        for value in values:
            if not 0 <= value <= 1:
                raise UsageError(f"acceptance '{self.name}': {field} holds {value}; allowed is 0 to 1")

    @property
    def mean(self) -> float:
        """Mean acceptance of the first choice at depth 1."""
        return sum(weight * mean for weight, mean in self.mix)

    @property
    def class_weights(self) -> Floats:
        """`[classes]` share of the requests in each content class."""
        return np.array([weight for weight, _ in self.mix])

    def first_choice(self, depth: int) -> float:
        """Chance that the first choice at `depth` (1, 2, …) of a chain is right if all before it were."""
        if depth == 1:
            return self.survival(1)[0]
        shallower, here = self.survival(depth)[-2:]
        return here / shallower if shallower else 0.0

    def rescue_share(self, depth: int, rank: int) -> float:
        """Share of 1 - p_k that the child of `rank` (1, 2, …) at `depth` (1, 2, …) takes."""
        ladder = self.rank_rescue
        if self.rescue_by_depth:
            self._check_depth(depth, len(self.rescue_by_depth))
            ladder = self.rescue_by_depth[depth - 1]
        if not ladder:
            return 0.0
        share, missed = 0.0, 1.0
        for place in range(rank):
            beyond = max(0, place - len(ladder) + 1)
            rescue = ladder[min(place, len(ladder) - 1)] * RANK_FALLOFF**beyond
            share, missed = missed * rescue, missed * (1 - rescue)
        return share

    def node_probabilities(self, tree: DraftTree) -> Floats:
        """`[N]` chance that the whole path to a row is accepted; 1 for the root."""
        total = np.zeros(len(tree))
        for (share, _), (weights, values) in zip(self.mix, self._path_values(tree), strict=True):
            total += share * (weights @ values)
        return total

    def acceptance_length(self, tree: DraftTree) -> float:
        """Mean tokens per verification step, the target's own token included.

        Every content class counts by its share of requests.
        """
        return float(self.node_probabilities(tree).sum())

    def served_acceptance_length(self, tree: DraftTree) -> float:
        """Mean tokens per step of a server whose requests have equal lengths: harmonic over the classes.

        A hard class needs more steps for its tokens, so it counts more often. Equals `acceptance_length`
        with one class.
        """
        by_class = 1 + self.survival_by_class(tree).sum(axis=1)
        return float(1 / (self.class_weights @ (1 / by_class)))

    def survival(self, depths: int) -> tuple[float, ...]:
        """S_1, …, S_depths: chance that the first k drafts of a chain are all accepted."""
        return tuple(float(value) for value in self.node_probabilities(DraftTree.chain(depths))[1:])

    def survival_by_class(self, tree: DraftTree) -> Floats:
        """`[classes, max_depth]` chance that at least 1, 2, … drafts are accepted, by content class."""
        result = np.zeros((len(self.mix), tree.max_depth))
        depth = np.array(tree.depth)
        for row, (weights, values) in enumerate(self._path_values(tree)):
            nodes = weights @ values
            result[row] = [nodes[depth == level].sum() for level in range(1, tree.max_depth + 1)]
        return np.minimum(result, 1.0)

    def independent(self) -> AcceptanceModel:
        """The baseline without correlation: every node is accepted by its mean, whatever happened above it.

        It undervalues depth and overvalues width when rounds differ in difficulty.
        """
        mix = () if self.per_depth is not None else ((1.0, self.mean),)
        return replace(self, name=f"{self.name}, independent", mix=mix, concentration=math.inf)

    def describe(self, tree: DraftTree) -> dict[str, Any]:
        """Parameters and expectations for one tree as JSON values; an infinite concentration is None."""
        return {
            "name": self.name,
            "mix": [list(part) for part in self.mix],
            "concentration": None if math.isinf(self.concentration) else self.concentration,
            "decay": self.decay,
            "rank_rescue": list(self.rank_rescue),
            "per_depth": None if self.per_depth is None else list(self.per_depth),
            "rescue_by_depth": [list(ladder) for ladder in self.rescue_by_depth],
            "acceptance_length": self.acceptance_length(tree),
            "served_acceptance_length": self.served_acceptance_length(tree),
            "survival": [float(value) for value in self.class_weights @ self.survival_by_class(tree)],
            "source": self.source,
        }

    def _path_values(self, tree: DraftTree) -> Iterator[tuple[Floats, Floats]]:
        """Per content class, weights `[J]` of the difficulties and path probabilities `[J, N]` given each."""
        for _, mean in self.mix:
            weights, chances = self._rounds(mean, tree.max_depth)
            values = np.ones((len(weights), len(tree)))
            for row, above in enumerate(tree.parent[1:], start=1):
                chance = chances[:, tree.depth[row] - 1]
                if tree.rank[row]:
                    chance = (1 - chance) * self.rescue_share(tree.depth[row], tree.rank[row])
                values[:, row] = values[:, above] * chance
            yield weights, values

    def _rounds(self, mean: float, depths: int) -> tuple[Floats, Floats]:
        """Weights `[J]` of the difficulties and the chance of the first choice `[J, depths]` at each."""
        if self.per_depth is not None:
            self._check_depth(depths, len(self.per_depth))
        constant = math.isinf(self.concentration) or mean in (0.0, 1.0)
        weights, p = (np.ones(1), np.array([mean])) if constant else _beta_rule(mean, self.concentration)
        if self.per_depth is None:
            scale = np.where(np.arange(depths) > 0, self.decay, 1.0)
            return weights, p[:, None] * scale
        if constant:
            return weights, np.array([self.per_depth[:depths]])
        return weights, _matched(weights, p, self.per_depth[:depths])

    def _check_depth(self, depth: int, known: int) -> None:
        if depth > known:
            raise UsageError(
                f"the tree is {depth} drafts deep, but acceptance '{self.name}' gives {known} depths; "
                f"use a tree of depth {known} at most or give more values"
            )


@cache
def _beta_rule(mean: float, concentration: float) -> tuple[Floats, Floats]:
    """Weights and nodes of the Gauss rule for Beta(mean * concentration, (1 - mean) * concentration).

    Eigenvalues of the Jacobi matrix (Golub and Welsch, 1969). Weights are normalised, so that a large
    concentration does not overflow as the unnormalised rules of the libraries do.
    """
    from scipy.linalg import eigh_tridiagonal

    alpha, beta = (1 - mean) * concentration - 1, mean * concentration - 1
    n = np.arange(1.0, GAUSS_NODES)
    total = 2 * n + alpha + beta
    diagonal = np.empty(GAUSS_NODES)
    diagonal[0] = (beta - alpha) / (alpha + beta + 2)
    diagonal[1:] = (beta - alpha) * (beta + alpha) / (total * (total + 2))
    squares = np.empty(GAUSS_NODES - 1)
    squares[0] = 4 * (1 + alpha) * (1 + beta) / ((2 + alpha + beta) ** 2 * (3 + alpha + beta))
    n, total = n[1:], total[1:]
    squares[1:] = 4 * n * (n + alpha) * (n + beta) * (n + alpha + beta) / (total**2 * (total**2 - 1))
    off = np.sqrt(squares)
    nodes, vectors = eigh_tridiagonal(diagonal, off)
    return vectors[0] ** 2, np.clip((1 + nodes) / 2, 0.0, 1.0)


def _matched(weights: Floats, p: Floats, per_depth: Sequence[float]) -> Floats:
    """`[J, depths]` chances min(1, s_k p), with s_k bisected so that a chain shows `per_depth`."""
    chances = np.empty((len(p), len(per_depth)))
    reached = weights.copy()
    for level, wanted in enumerate(per_depth):
        low, high = 0.0, 1.0 / max(p.min(), 1e-300)
        for _ in range(2000):
            scale = (low + high) / 2
            if scale in (low, high):
                break
            if reached @ np.minimum(1.0, scale * p) < wanted * reached.sum():
                low = scale
            else:
                high = scale
        chances[:, level] = np.minimum(1.0, high * p)
        reached = reached * chances[:, level]
    return chances


def head_ladders(cumulative: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Rescue ladders from the top-1, top-2, … accuracies of one head per depth."""
    return tuple(tuple((here - better) / (1 - better) for better, here in pairwise(row)) for row in cumulative)


#: Top-1 to top-5 accuracy of the heads for Vicuna-7B, FasterDecoding/Medusa, assets/medusa_acc.csv.
_MEDUSA_7B = (
    (0.5604, 0.6717, 0.7271, 0.7599, 0.7799),
    (0.3164, 0.4236, 0.4851, 0.5282, 0.5625),
    (0.2010, 0.2879, 0.3475, 0.3834, 0.4169),
    (0.1474, 0.2250, 0.2737, 0.3109, 0.3397),
    (0.1175, 0.1866, 0.2346, 0.2721, 0.2998),
)
_PROBE_LADDER = (0.4165, 0.2655, 0.1908)
_PROBE = "ladder: probe of 16,524 ranked drafts on ShareGPT prompts"
_SPECINFER = "top-k acceptance on Alpaca, SpecInfer table 1, arXiv 2305.09781"
_TREEWY = "ladder: widths 1, 2, 3 of TreeWY, https://github.com/vllm-project/vllm/issues/54080"
_CONTENT = "https://github.com/tenstorrent/vllm/issues/442"

_ALL = (
    AcceptanceModel(
        "mtp-hybrid",
        mix=((1.0, 0.858),),
        rank_rescue=(0.28, 0.20),
        source="constant that gives TreeWY's acceptance length 3.23 for a chain of 3; " + _TREEWY,
    ),
    AcceptanceModel(
        "mtp-hybrid-code",
        mix=((1.0, 0.88),),
        concentration=20,
        decay=0.96,
        rank_rescue=(0.28, 0.20, 0.15),
        source="native MTP on hybrids, code and mathematics, fitted to several public runs; " + _TREEWY,
    ),
    AcceptanceModel(
        "mtp-hybrid-prose",
        mix=((1.0, 0.50),),
        concentration=8,
        decay=0.96,
        rank_rescue=(0.28, 0.20, 0.15),
        source=f"native MTP on hybrids, prose and technical text, {_CONTENT}; {_TREEWY}",
    ),
    # Acceptance at position 1 by content; code weighs as much as makes the mean the published pooled 0.647.
    AcceptanceModel(
        "mtp-hybrid-mixed",
        mix=((0.317, 0.908), (0.228, 0.606), (0.227, 0.492), (0.228, 0.480)),
        concentration=8,
        decay=0.96,
        rank_rescue=(0.28, 0.20, 0.15),
        source=f"Qwen3.8-27B MTP on code, factual, prose and technical text, {_CONTENT}; {_TREEWY}",
    ),
    AcceptanceModel(
        "eagle3",
        mix=((1.0, 0.75),),
        decay=0.99,
        rank_rescue=_PROBE_LADDER,
        source="EAGLE-3 on dense targets, https://github.com/vllm-project/vllm/issues/26191; " + _PROBE,
    ),
    AcceptanceModel(
        "eagle1",
        mix=((1.0, 0.69),),
        decay=0.80,
        rank_rescue=(0.30, 0.19, 0.14),
        source="EAGLE-1 statistics of https://github.com/vllm-project/vllm/pull/32374",
    ),
    AcceptanceModel(
        "medusa",
        per_depth=tuple(row[0] for row in _MEDUSA_7B),
        rescue_by_depth=head_ladders(_MEDUSA_7B),
        source="head accuracies for Vicuna-7B, FasterDecoding/Medusa, assets/medusa_acc.csv",
    ),
    AcceptanceModel(
        "draft-model",
        mix=((1.0, 0.68),),
        concentration=30,
        rank_rescue=(0.28, 0.17, 0.16, 0.06),
        source=f"separate small draft model, greedy: {_SPECINFER}",
    ),
    AcceptanceModel(
        "draft-model-sampled",
        mix=((1.0, 0.54),),
        concentration=30,
        rank_rescue=(0.59, 0.53, 0.44, 0.40),
        source=f"separate small draft model, temperature 1: {_SPECINFER}",
    ),
    AcceptanceModel(
        "dflash",
        per_depth=(0.82, *(0.75 + 0.17 * step / 13 for step in range(14))),
        rank_rescue=_PROBE_LADDER,
        source="block diffusion drafter with a block of 16, acceptance by depth on MT-bench; " + _PROBE,
    ),
    AcceptanceModel(
        "ngram",
        mix=((1.0, 0.81),),
        concentration=0.7,
        source="n-gram drafts on edits, single path, https://github.com/vllm-project/vllm/pull/24344",
    ),
)
PRESETS: dict[str, AcceptanceModel] = {model.name: model for model in _ALL}


def acceptance_from(
    preset: str | None = None,
    per_depth: Sequence[float] | None = None,
    rank_rescue: Sequence[float] = (),
    concentration: float | None = None,
) -> AcceptanceModel:
    """The model of a scenario: a preset, whose ladder and concentration may be replaced, or a table.

    Raises `UsageError` for an unknown preset and for values outside their range.
    """
    if (preset is None) == (per_depth is None):
        raise UsageError("acceptance: give either 'preset' or 'per_depth', not both and not neither")
    if per_depth is not None:
        return AcceptanceModel(
            "per_depth",
            per_depth=tuple(per_depth),
            rank_rescue=tuple(rank_rescue),
            concentration=math.inf if concentration is None else concentration,
            source="values of the scenario",
        )
    if preset not in PRESETS:
        raise UsageError(f"acceptance preset = '{preset}': allowed are {', '.join(sorted(PRESETS))}")
    model = PRESETS[preset]
    if rank_rescue:
        model = replace(model, rank_rescue=tuple(rank_rescue), rescue_by_depth=(), name=f"{model.name}, own ladder")
    if concentration is not None:
        model = replace(model, concentration=concentration, name=f"{model.name}, own concentration")
    return model
