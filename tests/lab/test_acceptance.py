"""Acceptance models: closed forms, laws of trees, and the published numbers that the presets must give."""

from __future__ import annotations

import csv
import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.acceptance import (
    DEFAULT_PRESET,
    PRESETS,
    RANK_FALLOFF,
    AcceptanceModel,
    acceptance_from,
    head_ladders,
)
from lab.data import data_path
from lab.errors import UsageError
from lab.trees import DraftTree

chances = st.floats(0.01, 0.99)
concentrations = st.floats(0.2, 500) | st.just(math.inf)


@st.composite
def models(draw: st.DrawFn) -> AcceptanceModel:
    share = draw(st.floats(0.05, 0.95))
    return AcceptanceModel(
        "drawn",
        mix=((share, draw(chances)), (1 - share, draw(chances))),
        concentration=draw(concentrations),
        decay=draw(st.floats(0.5, 1)),
        rank_rescue=tuple(draw(st.lists(chances, max_size=4))),
    )


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    rows = draw(st.integers(1, 20))
    return DraftTree((-1, *(draw(st.integers(0, row - 1)) for row in range(1, rows))))


def beta(a: float, b: float) -> AcceptanceModel:
    return AcceptanceModel("beta", mix=((1.0, a / (a + b)),), concentration=a + b)


# Survival of the first choice.


@pytest.mark.parametrize(
    ("a", "b", "expected", "observed", "rmse"),
    [
        # n-gram drafts on edits, https://github.com/vllm-project/vllm/pull/24344
        (0.67, 0.16, [0.807, 0.737, 0.695, 0.666, 0.644], [0.81, 0.74, 0.70, 0.68, 0.66], 0.012),
        # MTP with 8 drafts on gsm8k, https://github.com/vllm-project/vllm/pull/48892
        (
            3.16,
            0.99,
            [0.761, 0.615, 0.516, 0.445, 0.391, 0.348],
            [0.762, 0.616, 0.513, 0.424, 0.364, 0.309],
            0.025,
        ),
    ],
    ids=["ngram", "mtp-8"],
)
def test_beta_survival_of_published_runs(
    a: float, b: float, expected: list[float], observed: list[float], rmse: float
) -> None:
    survival = np.array(beta(a, b).survival(len(expected)))
    assert survival == pytest.approx(expected, abs=0.001)
    assert math.sqrt(np.mean((survival - observed) ** 2)) < rmse


@settings(deadline=None)
@given(chances, st.floats(0.2, 1e6), st.floats(0.5, 1))
def test_survival_is_the_product_of_beta_moments(mean: float, concentration: float, decay: float) -> None:
    a = mean * concentration
    wanted, survival = [], 1.0
    for depth in range(63):
        survival *= (a + depth) / (concentration + depth) * (decay if depth else 1.0)
        wanted.append(survival)
    model = AcceptanceModel("m", mix=((1.0, mean),), concentration=concentration, decay=decay)
    assert model.survival(63) == pytest.approx(wanted, rel=1e-6, abs=1e-12)


@settings(deadline=None)
@given(chances, chances, concentrations)
def test_classes_are_averaged(first: float, second: float, concentration: float) -> None:
    both = AcceptanceModel("m", mix=((0.25, first), (0.75, second)), concentration=concentration)
    parts = [
        np.array(AcceptanceModel("m", mix=((1.0, mean),), concentration=concentration).survival(5))
        for mean in (first, second)
    ]
    assert both.survival(5) == pytest.approx(0.25 * parts[0] + 0.75 * parts[1])
    assert both.mean == pytest.approx(both.first_choice(1))


@settings(deadline=None)
@given(chances, st.floats(0.2, 100))
def test_correlated_rounds_reach_deeper_than_independent_ones(mean: float, concentration: float) -> None:
    model = AcceptanceModel("m", mix=((1.0, mean),), concentration=concentration, rank_rescue=(0.3,))
    flat = model.independent()
    assert flat.survival(6) == pytest.approx([mean**k for k in range(1, 7)])
    assert (np.array(model.survival(6)) >= np.array(flat.survival(6)) - 1e-12).all()
    star = DraftTree((-1, 0, 0))
    assert model.acceptance_length(star) == pytest.approx(flat.acceptance_length(star))


# Tables by depth.


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=8), concentrations)
def test_a_table_by_depth_is_met_at_any_concentration(table: list[float], concentration: float) -> None:
    model = acceptance_from(per_depth=table, concentration=None if math.isinf(concentration) else concentration)
    assert model.survival(len(table)) == pytest.approx(np.cumprod(table), rel=1e-9)
    assert [model.first_choice(k + 1) for k in range(len(table))] == pytest.approx(table, rel=1e-9)


def test_a_table_of_zeros_accepts_nothing() -> None:
    for concentration in (None, 5.0):
        model = acceptance_from(per_depth=[0.0, 0.0], concentration=concentration)
        assert model.survival(2) == (0.0, 0.0)
        assert model.first_choice(2) == 0.0


def test_independent_keeps_a_table_and_drops_its_correlation() -> None:
    table = (0.8, 0.7, 0.6)
    model = acceptance_from(per_depth=table, concentration=4, rank_rescue=(0.3,))
    tree = DraftTree.from_widths((2, 2, 2))
    assert model.independent().survival(3) == pytest.approx(np.cumprod(table))
    assert model.independent().acceptance_length(tree) > model.acceptance_length(tree)


def test_a_tree_deeper_than_the_table_is_refused() -> None:
    model = acceptance_from(per_depth=[0.8, 0.7])
    message = "the tree is 3 drafts deep, but acceptance 'per_depth' gives 2 depths"
    with pytest.raises(UsageError, match=message):
        model.acceptance_length(DraftTree.chain(3))
    with pytest.raises(UsageError, match="the tree is 6 drafts deep, but acceptance 'medusa' gives 5 depths"):
        PRESETS["medusa"].acceptance_length(DraftTree.chain(6))


# Ranks.


def test_ranks_of_one_node_follow_the_ladder() -> None:
    """SpecInfer table 1 (arXiv 2305.09781), Alpaca, greedy: top 1 to 5 within .68 .77 .81 .84 .85."""
    model = AcceptanceModel("alpaca", mix=((1.0, 0.68),), rank_rescue=(0.28, 0.17, 0.16, 0.06))
    star = DraftTree((-1, 0, 0, 0, 0, 0))
    cumulative = np.cumsum(model.node_probabilities(star)[1:])
    assert cumulative == pytest.approx([0.68, 0.77, 0.81, 0.84, 0.85], abs=0.005)


def test_marginals_of_a_sampled_vector() -> None:
    """Infini-AI-Lab/Sequoia, acceptance-rate-vector.pt: .6342 .1079 .0570 .0225 .0195."""
    model = AcceptanceModel("sequoia", mix=((1.0, 0.6342),), rank_rescue=(0.295, 0.221, 0.112, 0.109))
    marginals = model.node_probabilities(DraftTree((-1, 0, 0, 0, 0, 0)))[1:]
    assert marginals == pytest.approx([0.6342, 0.1079, 0.0570, 0.0225, 0.0195], abs=5e-4)


def test_ranks_beyond_the_ladder_fall_by_a_constant_factor() -> None:
    short = AcceptanceModel("m", mix=((1.0, 0.5),), rank_rescue=(0.4, 0.2))
    spelled = AcceptanceModel("m", mix=((1.0, 0.5),), rank_rescue=(0.4, 0.2, 0.2 * RANK_FALLOFF, 0.2 * 0.49))
    assert [short.rescue_share(1, rank) for rank in range(1, 5)] == pytest.approx(
        [spelled.rescue_share(1, rank) for rank in range(1, 5)]
    )


def test_without_a_ladder_only_first_choices_count() -> None:
    model = acceptance_from(per_depth=[0.8, 0.7, 0.6])
    wide, chain = DraftTree.from_widths((2, 2, 2)), DraftTree.chain(3)
    assert model.acceptance_length(wide) == pytest.approx(model.acceptance_length(chain))


def test_a_missing_rank_leaves_its_share_unused() -> None:
    model = AcceptanceModel("m", mix=((1.0, 0.6),), rank_rescue=(0.5,))
    second_only = DraftTree((-1, 0), (0, 1))
    assert model.acceptance_length(second_only) == pytest.approx(1 + 0.4 * 0.5)


# Laws of trees.


@settings(deadline=None)
@given(models(), trees())
def test_no_row_is_more_likely_than_its_parent_and_siblings_exclude_each_other(
    model: AcceptanceModel, tree: DraftTree
) -> None:
    chance = model.node_probabilities(tree)
    assert chance[0] == pytest.approx(1.0)
    for row in range(len(tree)):
        below = sum(chance[child] for child in tree.children(row))
        assert below <= chance[row] + 1e-12


@settings(deadline=None)
@given(models(), trees())
def test_more_rows_never_accept_less(model: AcceptanceModel, tree: DraftTree) -> None:
    lengths = [
        model.acceptance_length(DraftTree(tree.parent[:rows], tree.rank[:rows])) for rows in range(1, len(tree) + 1)
    ]
    assert lengths[0] == pytest.approx(1.0)
    assert all(fewer <= more + 1e-12 for fewer, more in pairwise(lengths))


@settings(deadline=None)
@given(models(), trees())
def test_survival_by_class_sums_to_the_acceptance_length(model: AcceptanceModel, tree: DraftTree) -> None:
    survival = model.survival_by_class(tree)
    assert survival.shape == (2, tree.max_depth)
    assert (np.diff(survival, axis=1) <= 1e-12).all()
    assert 1 + (model.class_weights @ survival).sum() == pytest.approx(model.acceptance_length(tree))


# Presets and their public sources.


def test_mtp_hybrid_gives_the_acceptance_lengths_of_treewy() -> None:
    """TreeWY (arXiv 2608.20961, https://github.com/vllm-project/vllm/issues/54080): 3.23, 3.38, 3.58."""
    model = PRESETS["mtp-hybrid"]
    lengths = [model.acceptance_length(DraftTree.from_widths((width,) * 3)) for width in (1, 2, 3)]
    assert lengths == pytest.approx([3.23, 3.43, 3.54], abs=0.005)
    assert lengths == pytest.approx([3.23, 3.38, 3.58], abs=0.06)


@pytest.mark.parametrize(
    ("preset", "observed", "tolerance"),
    [
        # EAGLE-3, Llama-3.1-8B, MT-bench, https://github.com/vllm-project/vllm/issues/26191
        ("eagle3", [0.74, 0.54, 0.41, 0.31, 0.23, 0.17, 0.13], 0.02),
        # EAGLE-1 statistics of https://github.com/vllm-project/vllm/pull/32374
        ("eagle1", [0.68, 0.39, 0.20, 0.10, 0.06, 0.03, 0.02], 0.02),
        # n-gram drafts on edits, https://github.com/vllm-project/vllm/pull/24344
        ("ngram", [0.81, 0.74, 0.70, 0.68, 0.66], 0.02),
        # Qwen3.5-122B-A10B MTP, better of two runs, https://github.com/vllm-project/vllm-ascend/issues/9871
        ("mtp-hybrid-code", [0.867, 0.743, 0.615], 0.05),
    ],
)
def test_preset_survival_is_near_a_published_run(preset: str, observed: list[float], tolerance: float) -> None:
    assert PRESETS[preset].survival(len(observed)) == pytest.approx(observed, abs=tolerance)


def test_mixed_content_has_the_published_pooled_mean() -> None:
    """Position 1 of Qwen3.8-27B MTP: code .908, factual .606, prose .492, technical .480, pooled .647
    (https://github.com/tenstorrent/vllm/issues/442)."""
    model = PRESETS["mtp-hybrid-mixed"]
    assert [mean for _, mean in model.mix] == [0.908, 0.606, 0.492, 0.480]
    assert model.mean == pytest.approx(0.647, abs=0.001)


def test_medusa_preset_holds_the_shipped_head_accuracies() -> None:
    with data_path("acceptance", "medusa_head_accuracy.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "vicuna-7b"]
    table = [[float(row[f"top{rank}"]) for rank in range(1, 6)] for row in rows]
    assert PRESETS["medusa"].per_depth == tuple(row[0] for row in table)
    assert PRESETS["medusa"].rescue_by_depth == head_ladders(table)
    for depth, row in enumerate(table, start=1):
        shares = [PRESETS["medusa"].rescue_share(depth, rank) for rank in range(1, 5)]
        assert row[0] + (1 - row[0]) * np.cumsum(shares) == pytest.approx(row[1:])


def test_medusa_preset_on_the_shipped_tree() -> None:
    """Product of head accuracies over Medusa's 7B tree: about 2.49; Spec-Bench measured 2.31.

    The tree reaches rank 10 and the public accuracies end at rank 5: those ranks alone give 2.34, a flat
    ladder behind them 2.56. Ours falls by 0.7 per rank.
    """
    paths = json.loads(data_path("draft_trees.json").read_text(encoding="utf-8"))["medusa:mc_sim_7b_63"]["paths"]
    medusa = PRESETS["medusa"]
    length = medusa.acceptance_length(DraftTree.from_rank_paths(paths))
    assert length == pytest.approx(2.437, abs=0.001)
    assert length == pytest.approx(2.49, abs=0.06)
    known = [path for path in paths if max(path) < 5]
    assert medusa.acceptance_length(DraftTree.from_rank_paths(known)) == pytest.approx(2.340, abs=0.001)


def test_constant_of_the_rank_probe_chain() -> None:
    """A chain of 7 with acceptance length 3.844 has the constant .773; its first position gives 3.39."""
    chain = DraftTree.chain(7)
    assert AcceptanceModel("m", mix=((1.0, 0.773),)).acceptance_length(chain) == pytest.approx(3.844, abs=0.001)
    assert AcceptanceModel("m", mix=((1.0, 0.729),)).acceptance_length(chain) == pytest.approx(3.39, abs=0.01)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_names_its_source_and_describes_itself_in_json(name: str) -> None:
    model = PRESETS[name]
    assert model.name == name
    assert model.source
    described = json.loads(json.dumps(model.describe(DraftTree.chain(3)), allow_nan=False))
    assert described["acceptance_length"] == pytest.approx(1 + sum(described["survival"]))


# From a scenario.


def test_default_preset_exists() -> None:
    assert acceptance_from(preset=DEFAULT_PRESET) is PRESETS["mtp-hybrid"]


def test_ladder_and_concentration_replace_those_of_a_preset() -> None:
    model = acceptance_from(preset="medusa", rank_rescue=[0.5], concentration=10)
    assert model.name == "medusa, own ladder, own concentration"
    assert (model.rank_rescue, model.rescue_by_depth, model.concentration) == ((0.5,), (), 10)
    assert model.per_depth == PRESETS["medusa"].per_depth


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"acceptance preset = 'eagle9': allowed are dflash, .*, ngram"):
        acceptance_from(preset="eagle9")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either 'preset' or 'per_depth'"),
        ({"preset": "ngram", "per_depth": [0.5]}, "give either 'preset' or 'per_depth'"),
        ({"per_depth": []}, "per_depth is empty"),
        ({"per_depth": [0.5, 1.5]}, r"per_depth holds 1.5; allowed is 0 to 1"),
        ({"per_depth": [math.nan]}, r"holds nan; allowed is 0 to 1"),
        ({"preset": "eagle3", "rank_rescue": [-0.1]}, r"rank_rescue holds -0.1; allowed is 0 to 1"),
        ({"preset": "eagle3", "concentration": 0.0}, r"concentration = 0.0; it must be above 0"),
    ],
)
def test_bad_acceptance_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        acceptance_from(**fields)


def test_mix_weights_must_sum_to_one() -> None:
    with pytest.raises(UsageError, match=r"mix weights \[0.5, 0.4\] must be above 0 and sum to 1"):
        AcceptanceModel("m", mix=((0.5, 0.9), (0.4, 0.5)))
    with pytest.raises(UsageError, match="either a mix or per_depth"):
        AcceptanceModel("m", mix=((1.0, 0.9),), per_depth=(0.8,))
