"""Verify attention without a GPU: plans, resources, and the float64 reference that the gate compares with."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_cupy import offline
from kernels_cupy.attention import (
    HOPPER,
    LAYOUTS,
    SOURCE,
    WARPGROUP_ARCH,
    AttentionPlan,
    Layout,
    SharedMemory,
    bytes_moved,
    kernel_hash,
)
from kernels_cupy.attention_gate import cases, reference, visibility
from kernels_cupy.offline import Variant, compile_variant
from lab.profiles.attention import DEVICE_FILE
from lab.profiles.folders import SHIPPED
from lab.trees import DraftTree

AMPERE = SharedMemory(167_936, 166_912)

needs_compiler = pytest.mark.skipif(
    shutil.which("nvcc") is None and offline._nvrtc_path() is None,
    reason="no CUDA compiler (nvcc, or the wheel nvidia-cuda-nvrtc)",
)


@needs_compiler
@pytest.mark.parametrize(
    ("arch", "shared"),
    [
        pytest.param("sm_80", AMPERE, marks=pytest.mark.slow),
        pytest.param("sm_90", HOPPER, marks=pytest.mark.slow),
        (WARPGROUP_ARCH, HOPPER),
        pytest.param("sm_100", HOPPER, marks=pytest.mark.slow),
    ],
)
def test_no_layout_spills(arch: str, shared: SharedMemory) -> None:
    """The kernel's own static_assert compares the shared memory of the plan with what it lays out."""
    for layout in LAYOUTS[arch == WARPGROUP_ARCH]:
        plan = AttentionPlan.of(layout, layout.rows, shared)
        assert plan is not None
        variant = Variant(SOURCE, tuple(sorted(plan.macros.items())), plan.shared_bytes)
        for found in compile_variant(variant, arch):
            assert found.spill_store_bytes == found.spill_load_bytes == 0, found
            assert found.registers <= 255


@given(st.integers(1, 64 * 16), st.booleans(), st.sampled_from([AMPERE, HOPPER]))
def test_a_plan_covers_its_rows_and_fits(query_rows: int, warpgroups: bool, shared: SharedMemory) -> None:
    plan = AttentionPlan.choose(query_rows, shared, warpgroups)
    assert (plan.row_blocks - 1) * plan.layout.rows < query_rows <= plan.row_blocks * plan.layout.rows
    assert plan.slots >= 2
    assert plan.shared_bytes <= shared.per_cta
    assert plan.ctas * (plan.shared_bytes + 1024) <= shared.per_multiprocessor
    assert plan.ctas * plan.layout.threads <= 256  # 255 registers each


def test_the_cache_is_read_once_where_rows_allow() -> None:
    """Up to 128 query rows per KV head are one block: 16 rows of 8 query heads."""
    assert {AttentionPlan.choose(rows, HOPPER, True).row_blocks for rows in range(1, 129)} == {1}
    assert AttentionPlan.choose(8).layout == Layout(1, 1, 4, 16)


def test_bytes_are_keys_and_values_once_queries_and_outputs() -> None:
    assert bytes_moved(16, 2, 1, [100]) == 2 * 100 * 2 * 256 * 2 + 2 * 16 * 256 * 2
    assert bytes_moved(16, 2, 4, [100, 50]) == bytes_moved(16, 2, 4, [100]) + bytes_moved(16, 2, 4, [50])


# ---- the reference ----


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """One query head of one row on the keys that it sees."""
    weights = np.exp(scale * (k @ q - (k @ q).max()))
    return weights @ v / weights.sum()


@given(st.integers(0, 5), st.sampled_from([(1,), (2, 2), (3, 1), (1, 1, 1)]), st.integers(0, 2**32 - 1))
def test_a_row_sees_the_context_and_its_path(context: int, widths: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = DraftTree.from_widths(widths)
    rows, scale = tree.num_rows, 0.3
    q = rng.standard_normal((rows, 4, 8))
    k, v = rng.standard_normal((2, context + rows, 2, 8))
    found = reference(q, k, v, visibility(tree.mask_array(), context), scale)
    for row in range(rows):
        seen = [*range(context), *(context + above for above in tree.path(row))]
        for head in range(4):
            expected = softmax_attention(q[row, head], k[seen, head // 2], v[seen, head // 2], scale)
            np.testing.assert_allclose(found[row, head], expected, rtol=1e-9, atol=1e-12)


def test_a_chain_is_causal() -> None:
    visible = visibility(DraftTree.chain(3).mask_array(), 2)
    assert visible.tolist() == [[column <= 2 + row for column in range(6)] for row in range(4)]


def test_siblings_do_not_see_each_other() -> None:
    visible = visibility(DraftTree.from_widths([2]).mask_array(), 0)
    assert visible.tolist() == [[True, False, False], [True, True, False], [True, False, True]]


def test_the_gate_covers_what_it_says() -> None:
    listed = list(cases())
    assert len({case.name for case in listed}) == len(listed)
    assert any(None in case.contexts for case in listed)
    assert {case.rows for case in listed} >= {1, 2, 4 - 1, 16, 17, 64}
    assert any(len(case.contexts) % 2 for case in listed)
    assert any(context and context % case.page_tokens for case in listed for context in case.contexts)


def test_the_shipped_measurements_are_of_this_kernel() -> None:
    for folder in SHIPPED.iterdir():
        if (record := folder / DEVICE_FILE).is_file():
            device = json.loads(record.read_text(encoding="utf-8"))
            assert device["kernel_hash"] == kernel_hash() or device.get("stale_reason")


@needs_compiler
def test_warpgroup_products_are_not_serialized() -> None:
    """The compiler says so (C7510 to C7519) when it cannot keep them asynchronous."""
    for layout in LAYOUTS[True]:
        plan = AttentionPlan.of(layout, layout.rows)
        assert plan is not None
        if layout.warpgroups and (library := offline._nvrtc_path()):
            variant = Variant(SOURCE, tuple(sorted(plan.macros.items())), plan.shared_bytes)
            assert "serialized" not in offline._nvrtc(variant, WARPGROUP_ARCH, library)
