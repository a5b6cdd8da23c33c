"""Memory laws and traffic of the state methods, against published figures."""

from __future__ import annotations

import pytest

from lab.errors import InfeasibleError, UsageError
from lab.methods import METHODS, LayerHeads, get_method
from lab.methods.lumotree import cut_rows
from lab.methods.treelog import TreeLog
from lab.shapes import load_shape
from lab.trees import DraftTree
from lab.units import GIB, MIB

CHAIN = DraftTree.from_widths((1, 1, 1))
TREE = DraftTree.from_widths((2, 2, 2))


def heads(model: str, dtype: str = "float32") -> LayerHeads:
    return LayerHeads.of(load_shape(model), dtype)


def test_snapshot_of_the_397b_is_90_mib_in_bf16_and_180_in_fp32() -> None:
    # vLLM issue 54080
    for dtype, mib in (("bfloat16", 90), ("float32", 180)):
        assert 45 * heads("Qwen3.5-397B-A17B", dtype).state_bytes == mib * MIB


def test_storeall_of_the_397b_needs_360_mib_on_a_chain_and_1_3_gib_on_a_tree() -> None:
    # vLLM issue 54080: four bf16 states for a chain of depth 3; about 1.2 GiB for 14 drafts (1.32 with the root)
    layer = heads("Qwen3.5-397B-A17B", "bfloat16")
    storeall = get_method("storeall")
    assert 45 * storeall.resident_bytes(layer, CHAIN) == 360 * MIB
    assert 45 * storeall.pool_states(TREE) * layer.state_bytes == pytest.approx(1.32 * GIB, rel=0.003)


@pytest.mark.parametrize(("widths", "states"), [((1, 1, 1), 4), ((2, 2, 2), 15), ((3, 3, 3), 40)])
def test_state_blocks_per_layer(widths: tuple[int, ...], states: int) -> None:
    tree = DraftTree.from_widths(widths)
    assert get_method("storeall").pool_states(tree) == states
    others = [method for method in METHODS.values() if method.topology == "tree" and method.name != "storeall"]
    assert {method.pool_states(tree) for method in others} == {1}


@pytest.mark.parametrize(
    ("model", "treewy", "bole", "ring"),
    [
        ("Qwen3.5-35B-A3B", 32_896, 24_704, 12_416),
        ("Qwen3.5-27B", 49_344, 32_960, 16_576),
        ("Qwen3.5-397B-A17B", 65_792, 41_216, 20_736),
    ],
)
def test_record_bytes(model: str, treewy: int, bole: int, ring: int) -> None:
    layer = heads(model)
    assert get_method("treewy").scratch_bytes(layer, TREE) == 15 * treewy
    assert get_method("bole").scratch_bytes(layer, TREE) == 15 * bole
    assert get_method("replayssm").scratch_bytes(layer, CHAIN) == 32 * ring


def test_transient_memory_is_82_to_99_times_smaller_with_factors() -> None:
    # arXiv 2608.01651 gives 82 to 99; state over record spans 84.9 to 101.8 for two to four value heads per key head
    ratios = []
    for model in ("Qwen3.5-35B-A3B", "Qwen3.5-27B", "Qwen3.5-397B-A17B"):
        layer = heads(model)
        ratios.append(layer.state_bytes / layer.record_bytes(4, 4))
    assert ratios == pytest.approx([84.9, 95.4, 101.8], abs=0.06)


def test_ring_of_the_35b_is_11_4_mib_per_request() -> None:
    ring = get_method("replayssm").scratch_bytes(heads("Qwen3.5-35B-A3B"), CHAIN)
    assert 30 * ring / MIB == pytest.approx(11.4, abs=0.05)


def traffic_in_states(name: str, tree: DraftTree, committed: float) -> float:
    """State and record bytes of a step in units of one state; operands of the rows are left out."""
    layer = heads("Qwen3.5-35B-A3B")
    phases = get_method(name).phases(layer, tree, committed)
    return (sum(phase.bytes for phase in phases) - tree.num_rows * layer.operand_bytes) / layer.state_bytes


@pytest.mark.parametrize(
    ("name", "states", "tolerance"),
    [("storeall", 32.0, 0), ("treewy", 2.47, 0.005), ("bole", 3.22, 0.005), ("specla", 2.30, 0.006)],
)
def test_traffic_of_a_tree_step(name: str, states: float, tolerance: float) -> None:
    assert traffic_in_states(name, TREE, 3.4) == pytest.approx(states, abs=tolerance)


def test_traffic_of_a_storeall_chain_is_one_read_and_n_writes() -> None:
    assert traffic_in_states("storeall", DraftTree.chain(14), 3.4) == pytest.approx(16.0)


def test_treelog_writes_the_state_once_per_flush() -> None:
    # Log of 16, longest append 4, 3.4 rows a step: F = 12 / 3.4 + 1
    phases = {phase.name: phase for phase in get_method("treelog").phases(heads("Qwen3.5-35B-A3B"), TREE, 3.4)}
    assert phases["flush"].share == pytest.approx(1 / (12 / 3.4 + 1))
    assert traffic_in_states("treelog", TREE, 3.4) < 1.65
    assert traffic_in_states("treelog", TREE, 3.4) < traffic_in_states("treewy", TREE, 3.4)


def test_chain_only_and_decode_only_methods_refuse_trees() -> None:
    with pytest.raises(InfeasibleError, match="verifies chains only"):
        get_method("replayssm").check_tree(TREE)
    with pytest.raises(InfeasibleError, match="one row per step"):
        get_method("deltalog").check_tree(CHAIN)
    get_method("replayssm").check_tree(CHAIN)


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="state_method is 'magic'; allowed are recurrent, storeall"):
        get_method("magic")


@pytest.mark.parametrize("method", ["treewy", "bole", "specla", "deltalog", "replayssm"])
def test_bf16_state_halves_the_state_and_not_published_records(method: str) -> None:
    full, half = heads("Qwen3.5-27B"), heads("Qwen3.5-27B", "bfloat16")
    assert half.state_bytes * 2 == full.state_bytes
    assert get_method(method).scratch_bytes(half, CHAIN) == get_method(method).scratch_bytes(full, CHAIN)


def test_treelogs_records_follow_the_type_of_the_state() -> None:
    """16 log rows and 15 of the tree: u of 48 heads in 4 or 2 bytes, 16 raw keys in bf16, 48 fp32 decays."""
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        layer = heads("Qwen3.5-27B", dtype)
        record = width * 48 * 128 + 2 * 16 * 128 + 4 * 48
        assert get_method("treelog").scratch_bytes(layer, TREE) == (16 + 15) * record
        verify, flush = get_method("treelog").phases(layer, TREE, 3.0)
        operands = 15 * 2 * 48 * 128  # the outputs
        assert verify.write_bytes == 15 * record + operands
        assert flush.write_bytes == layer.state_bytes


@pytest.mark.parametrize(
    ("tree", "capacity"),
    [
        (DraftTree.chain(0), 16), (DraftTree.chain(3), 16), (DraftTree.chain(4), 24), (DraftTree.chain(7), 24),
        (DraftTree.chain(8), 16), (DraftTree.chain(15), 16), (DraftTree.chain(31), 32), (TREE, 16),
        (DraftTree.from_widths((1, 1, 1, 3)), 24), (DraftTree.from_widths((2, 1, 1, 2, 2)), 16),
    ],
)  # fmt: skip
def test_treelogs_log_is_longer_where_a_path_of_5_to_8_rows_would_fill_it(tree: DraftTree, capacity: int) -> None:
    """Capacity by tree; the last tree has paths of 6 rows and 19 rows, too many for the longer log."""
    method, layer = METHODS["treelog"], heads("Qwen3.5-27B")
    assert isinstance(method, TreeLog)
    assert method.log_rows(tree) == capacity
    assert method.scratch_bytes(layer, tree) == (capacity + tree.num_rows) * method.record_bytes(layer)
    flush = method.phases(layer, tree, 2.0)[1]
    assert flush.share == 1 / ((capacity - tree.max_depth - 1) / 2 + 1)


@pytest.mark.parametrize(("widths", "cuts"), [((1, 1, 1), 0), ((2, 2, 2), 3), ((3, 3, 3), 3), ((1, 2), 1)])
def test_lumotree_keeps_a_state_where_paths_leave_the_spine(widths: tuple[int, ...], cuts: int) -> None:
    layer, tree = heads("Qwen3.5-35B-A3B"), DraftTree.from_widths(widths)
    assert len(cut_rows(tree)) == cuts
    scratch = get_method("lumotree").scratch_bytes(layer, tree)
    assert scratch == cuts * layer.state_bytes + tree.num_rows * layer.raw_record_bytes
    expected = 3 + 2 * cuts + (tree.num_rows + 2) * layer.raw_record_bytes / layer.state_bytes
    assert traffic_in_states("lumotree", tree, 2.0) == pytest.approx(expected)
