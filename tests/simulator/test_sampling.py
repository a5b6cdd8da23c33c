"""Draws of acceptance: the right distribution, no memory, no correlation, the same luck for every method.

Seeds are fixed; statistical bounds are 5 standard errors or p > 0.001.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray
from scipy import stats

from lab.acceptance import PRESETS, AcceptanceModel, acceptance_from
from lab.trees import DraftTree
from simulator.sampling import (
    CLASS_STREAM,
    ROUND_STREAM,
    AcceptanceTables,
    build_tables,
    request_class,
    sample_accepted,
    uniform,
)

TREES = {
    "chain3": DraftTree.chain(3),
    "widths222": DraftTree.from_widths((2, 2, 2)),
    "ragged": DraftTree((-1, 0, 0, 0, 1, 1, 2, 4, 7)),
}
MODELS = {
    "constant": PRESETS["mtp-hybrid"],
    "beta": PRESETS["mtp-hybrid-prose"],
    "wide-beta": AcceptanceModel("m", mix=((1.0, 0.6),), concentration=0.5, decay=0.9, rank_rescue=(0.4, 0.3)),
    "table": acceptance_from(per_depth=[0.8, 0.75, 0.7, 0.6], rank_rescue=[0.3]),
}


@njit
def draw(tables: AcceptanceTables, seed: int, requests: int, rounds: int) -> NDArray[np.int64]:
    out = np.empty((requests, rounds), np.int64)
    for request in range(requests):
        for round_index in range(rounds):
            out[request, round_index] = sample_accepted(tables, seed, request, round_index)
    return out


@njit
def numbers(seed: int, stream: int, requests: int, counters: int) -> NDArray[np.float64]:
    out = np.empty((requests, counters))
    for request in range(requests):
        for counter in range(counters):
            out[request, counter] = uniform(seed, stream, request, counter)
    return out


def walk(model: AcceptanceModel, tree: DraftTree, rounds: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The specification: per round one difficulty, then from node to node along the accepted path."""
    (_, mean), n = model.mix[0], model.concentration
    difficulty = np.full(rounds, mean) if math.isinf(n) else rng.beta(mean * n, (1 - mean) * n, rounds)
    accepted = np.zeros(rounds, np.int64)
    for index, p in enumerate(difficulty):
        row = 0
        while True:
            depth = tree.depth[row] + 1
            p_k = p * (model.decay if depth > 1 else 1.0)
            if model.per_depth is not None and depth <= len(model.per_depth):
                p_k = model.per_depth[depth - 1]
            number, reached, found = rng.random(), 0.0, -1
            for child in tree.children(row):
                rank = tree.rank[child]
                reached += (1 - p_k) * model.rescue_share(depth, rank) if rank else p_k
                if number < reached:
                    found = child
                    break
            if found < 0:
                break
            row = found
        accepted[index] = tree.depth[row]
    return accepted


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("name", MODELS, ids=str)
def test_draws_follow_the_walk_from_node_to_node(name: str, tree: str) -> None:
    model, shape = MODELS[name], TREES[tree]
    walked = np.bincount(walk(model, shape, 20_000, np.random.default_rng(7)), minlength=shape.max_depth + 1)
    drawn = np.bincount(draw(build_tables(model, shape), 3, 200, 500).ravel(), minlength=shape.max_depth + 1)
    assert stats.chi2_contingency([walked, drawn]).pvalue > 0.001


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("name", [*MODELS, "mtp-hybrid-mixed"], ids=str)
def test_mean_and_survival_match_the_model(name: str, tree: str) -> None:
    model, shape = MODELS.get(name) or PRESETS[name], TREES[tree]
    drawn = draw(build_tables(model, shape), 11, 100_000, 5)
    # Rounds of one request share its class, so that requests are the independent units.
    means = drawn.mean(axis=1)
    error = means.std() / math.sqrt(len(means))
    assert abs(1 + means.mean() - model.acceptance_length(shape)) < 5 * error
    survival = model.class_weights @ model.survival_by_class(shape)
    for depth in range(1, shape.max_depth + 1):
        share = (drawn >= depth).mean(axis=1)
        error = share.std() / math.sqrt(len(share))
        assert abs(share.mean() - survival[depth - 1]) < 5 * error


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_accepted_counts_pass_a_chi_square_test(name: str) -> None:
    tree = DraftTree.chain(4)
    tables = build_tables(PRESETS[name], tree)
    drawn = draw(tables, 5, 50_000, 1).ravel()
    alive = np.concatenate(([1.0], PRESETS[name].class_weights @ tables.survival, [0.0]))
    expected = -np.diff(alive) * len(drawn)
    assert stats.chisquare(np.bincount(drawn, minlength=5), expected).pvalue > 0.001


def test_a_tree_without_drafts_accepts_nothing() -> None:
    tables = build_tables(PRESETS["mtp-hybrid"], DraftTree.chain(0))
    assert draw(tables, 1, 10, 10).max() == 0


def test_certain_and_impossible_drafts() -> None:
    tree = DraftTree.chain(3)
    assert draw(build_tables(acceptance_from(per_depth=[1, 1, 1]), tree), 1, 100, 100).min() == 3
    assert draw(build_tables(acceptance_from(per_depth=[0, 0, 0]), tree), 1, 100, 100).max() == 0


def test_requests_and_rounds_are_uncorrelated() -> None:
    drawn = draw(build_tables(PRESETS["mtp-hybrid-prose"], TREES["widths222"]), 9, 400, 400).astype(float)
    centred = (drawn - drawn.mean()) / drawn.std()
    bound = 5 / math.sqrt(drawn.size)
    for lag in (1, 2, 3, 7, 64):
        assert abs((centred[lag:] * centred[:-lag]).mean()) < bound
        assert abs((centred[:, lag:] * centred[:, :-lag]).mean()) < bound
        assert abs((centred[lag:, lag:] * centred[:-lag, :-lag]).mean()) < bound


def test_content_class_makes_rounds_of_one_request_alike() -> None:
    model = PRESETS["mtp-hybrid-mixed"]
    tables = build_tables(model, DraftTree.chain(1))
    drawn = draw(tables, 2, 40_000, 2)
    between = np.array([mean for _, mean in model.mix])
    covariance = float(model.class_weights @ between**2 - model.mean**2)
    assert np.cov(drawn.T)[0, 1] == pytest.approx(covariance, abs=5 * 0.25 / math.sqrt(len(drawn)))


def test_requests_served_to_their_end_show_the_harmonic_mean_of_the_classes() -> None:
    model, tree = PRESETS["mtp-hybrid-mixed"], DraftTree.chain(3)
    emitted = 1 + draw(build_tables(model, tree), 12, 20_000, 500)
    steps = (np.cumsum(emitted, axis=1) < 500).sum(axis=1) + 1
    served = 500 * len(steps) / steps.sum()
    assert served == pytest.approx(model.served_acceptance_length(tree), rel=0.01)
    assert served < 0.95 * model.acceptance_length(tree)


def test_classes_are_drawn_by_their_share_and_kept() -> None:
    model = PRESETS["mtp-hybrid-mixed"]
    tables = build_tables(model, DraftTree.chain(2))
    classes = np.array([request_class(tables, 4, request) for request in range(20_000)])
    counts = np.bincount(classes, minlength=4)
    assert stats.chisquare(counts, model.class_weights * len(classes)).pvalue > 0.001
    assert request_class(build_tables(PRESETS["eagle3"], DraftTree.chain(2)), 4, 17) == 0
    assert [request_class(tables, 4, request) for request in range(50)] == classes[:50].tolist()


def test_a_draw_depends_on_nothing_but_seed_request_and_round() -> None:
    tables = build_tables(PRESETS["mtp-hybrid-mixed"], TREES["chain3"])
    in_order = draw(tables, 6, 30, 30)
    rng = np.random.default_rng(0)
    for request, round_index in rng.integers(0, 30, (200, 2)):
        assert sample_accepted(tables, 6, request, round_index) == in_order[request, round_index]
    assert (draw(tables, 7, 30, 30) != in_order).any()


def test_a_wider_or_deeper_tree_never_accepts_less_under_the_same_luck() -> None:
    for name in ("mtp-hybrid", "mtp-hybrid-prose", "mtp-hybrid-mixed"):
        drawn = [
            draw(build_tables(PRESETS[name], tree), 8, 200, 200)
            for tree in (
                DraftTree.chain(2),
                DraftTree.chain(3),
                DraftTree.from_widths((2, 2, 2)),
                DraftTree.from_widths((3, 3, 3)),
            )
        ]
        for smaller, larger in pairwise(drawn):
            assert (smaller <= larger).all()


# The numbers beneath.

MASK = 2**64 - 1


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize(
    ("seed", "stream", "request_id", "counter"),
    [(0, 0, 0, 0), (1, 0, 2, 3), (2**63 + 5, 1, 10**9, 10**6), (2**64 - 1, 7, 0, 2**40)],
)
def test_uniform_is_splitmix64_of_its_arguments(seed: int, stream: int, request_id: int, counter: int) -> None:
    key = seed * 0xD1342543DE82EF95 + stream * 0xA24BAED4963EE407 + request_id * 0x9FB21C651E98DF25
    state = (mixed(key & MASK) + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    expected = (mixed(state) >> 11) * 2.0**-53
    assert uniform(np.uint64(seed), stream, request_id, counter) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_uniform_numbers_are_uniform(seed: int) -> None:
    drawn = numbers(np.uint64(seed), ROUND_STREAM, 300, 300).ravel()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 0.001
    bits = (drawn * 2**53).astype(np.uint64)
    for bit in range(53):
        ones = int(((bits >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - drawn.size / 2) < 5 * math.sqrt(drawn.size) / 2


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, ROUND_STREAM), (1, ROUND_STREAM)), ((0, ROUND_STREAM), (0, CLASS_STREAM))],
    ids=["seeds", "streams"],
)
def test_seeds_and_streams_share_no_numbers(first: tuple[int, int], second: tuple[int, int]) -> None:
    a, b = numbers(*first, 300, 300).ravel(), numbers(*second, 300, 300).ravel()
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(a.size)
    assert np.intersect1d(a, b).size == 0
