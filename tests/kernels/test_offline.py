"""The CUDA sources compile without a GPU, do not spill registers, and agree with the Python that launches them."""

from __future__ import annotations

import csv
import itertools
import shutil

import pytest

from kernels_cupy import offline
from kernels_cupy.compiler import KERNELS, SOURCE_DIR, source_text
from kernels_cupy.lanes_plans import LanesPlan, lanes_plans
from kernels_cupy.offline import (
    LISTED,
    TABLE,
    Resources,
    Variant,
    architectures,
    compile_variant,
    listed_architecture,
    variants,
)
from kernels_cupy.plans import BlockPlan, Problem, stream_plans
from kernels_cupy.wide_plans import WidePlan, wide_plans
from lab.methods.base import LayerHeads

needs_compiler = pytest.mark.skipif(
    shutil.which("nvcc") is None and offline._nvrtc_path() is None,
    reason="no CUDA compiler (nvcc, or the wheel nvidia-cuda-nvrtc)",
)


def test_every_source_is_listed() -> None:
    assert sorted(KERNELS) == sorted(path.name for path in SOURCE_DIR.glob("*.cu"))


@pytest.mark.parametrize("file", KERNELS)
def test_source_text_stands_alone(file: str) -> None:
    assert '#include "' not in source_text(file)


@needs_compiler
@pytest.mark.parametrize(("file", "arch"), [(file, arch) for file in KERNELS for arch in architectures(file)])
def test_kernels_compile(file: str, arch: str) -> None:
    found = compile_variant(Variant(file), arch)
    assert sorted(resources.kernel for resources in found) == sorted(KERNELS[file])


@pytest.fixture(scope="module")
def hopper() -> list[Resources]:
    """What every shipped variant takes on sm_90 or sm_90a."""
    return [row for each in variants() for row in compile_variant(each, listed_architecture(each.file))]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in offline.ARCHITECTURES if arch != LISTED])
def test_every_variant_compiles(arch: str) -> None:
    for variant in variants():
        if arch in architectures(variant.file):
            assert compile_variant(variant, arch)


def test_products_of_warpgroups_are_for_one_architecture() -> None:
    assert architectures("wide.cu") == (listed_architecture("wide.cu"),) == ("sm_90a",)
    assert architectures("stream.cu") == offline.ARCHITECTURES
    assert listed_architecture("stream.cu") == LISTED


@needs_compiler
@pytest.mark.slow
def test_hot_kernels_do_not_spill(hopper: list[Resources]) -> None:
    """Logs of more than 32 rows serve chains of more than 32 rows only and may spill a few registers.

    So may cuts with 12, 16, 20 and 24 warps in a multiprocessor, which leave a thread 168, 128, 96 and 80 registers:
    some of them were the fastest in spite of it, one of `wide.cu` with 64 bytes among them.
    """

    def allowed(row: Resources) -> int:
        if "LOG_BLOCKS=4" in row.variant:
            return 1024
        return (128 if "WARPS=16" in row.variant else 64) if row.registers in (80, 96, 128, 168) else 0

    spilling = [row for row in hopper if row.spill_store_bytes > allowed(row)]
    assert spilling == []


@needs_compiler
@pytest.mark.slow
def test_resource_table_is_what_the_compiler_says(hopper: list[Resources]) -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        listed = {(row["kernel"], row["variant"]): row for row in csv.DictReader(file)}
    for row in hopper:
        kept = listed[row.kernel, row.variant]
        assert row.registers == pytest.approx(int(kept["registers"]), rel=0.1)  # compilers differ a little
        assert row.dynamic_shared_bytes == int(kept["dynamic_shared_bytes"])


def test_resource_table_lists_the_variants() -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        listed = {(row["kernel"], row["variant"]) for row in csv.DictReader(file)}
    shipped = {(name, variant.label) for variant in variants() for name in KERNELS[variant.file]}
    assert listed == shipped, "run: python -m kernels_cupy.offline"


@needs_compiler
@pytest.mark.parametrize(("rows", "log_rows"), [(1, 0), (16, 16), (40, 16), (64, 64)])
def test_shared_memory_formula_is_that_of_the_source(rows: int, log_rows: int) -> None:
    one, two = (BlockPlan(problem(rows, log_rows), heads) for heads in (1, 2))
    per_head = two.shared_bytes - one.shared_bytes
    columns = 16 * ((one.tiles + 1) // 2)
    common = 12 * columns + 12 * (columns + 16 * one.problem.log_blocks)
    macros = {**one.macros, "EXPECTED_SMALL_BYTES": per_head + common}
    assert compile_variant(Variant("verify.cu", tuple(macros.items())), "sm_90")


@needs_compiler
@pytest.mark.parametrize(("rows", "log_rows"), [(1, 0), (4, 16), (4, 28), (8, 16), (8, 24), (16, 0), (16, 16)])
def test_shared_memory_formula_of_streams_is_that_of_the_source(rows: int, log_rows: int) -> None:
    plan = next(plan for plan in stream_plans(problem(rows, log_rows)) if plan.heads_per_cta == 1)
    small = plan.shared_bytes - plan.warps * plan.warp_bytes
    for expected, fits in ((small, True), (small + 16, False)):
        variant = Variant("stream.cu", tuple({**plan.macros, "EXPECTED_SMALL_BYTES": expected}.items()))
        if fits:
            assert compile_variant(variant, "sm_90")
        else:
            with pytest.raises(RuntimeError, match=r"StreamPlan\.shared_bytes"):
                compile_variant(variant, "sm_90")


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [9, 16, 20, 32, 40, 64])
def test_shared_memory_formula_of_warpgroups_is_that_of_the_source(
    rows: int, dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every log, type of its u, path, number of heads and of shares; a last assertion ends the compilation."""
    monkeypatch.setattr(offline, "source_text", lambda file: source_text(file) + 'static_assert(DIM == 0, "last");\n')
    plans = {
        tuple(sorted(plan.macros.items())): plan
        for value_heads, log_rows, log_bf16, path in itertools.product((12, 8), (0, 16), (False, True), (1, rows))
        for plan in wide_plans(Problem(LayerHeads(2, value_heads, dim, dim, dtype), rows, log_rows, log_bf16, path))
        if plan.resident == 2
    }
    assert {plan.heads_per_cta for plan in plans.values()} >= {1, 2}
    assert {plan.value_shares for plan in plans.values()} == {1, dim // 64}
    for macros, plan in plans.items():
        assert not complains(macros, plan.shared_bytes)
    assert complains(macros, plan.shared_bytes + 16)


def complains(macros: tuple[tuple[str, int], ...], shared_bytes: int) -> bool:
    """Whether `wide.cu` expects other shared memory."""
    with pytest.raises(RuntimeError, match='"last"') as error:
        compile_variant(Variant(WidePlan.file, (*macros, ("EXPECTED_SHARED_BYTES", shared_bytes))), "sm_90a")
    return "WidePlan.shared_bytes" in str(error.value)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "log_rows"), [(1, 0), (1, 16), (2, 16), (3, 0), (4, 16)])
def test_shared_memory_formula_of_lanes_is_that_of_the_source(rows: int, log_rows: int, dtype: str) -> None:
    for dim, log_bf16 in ((64, False), (128, True)):
        plans = lanes_plans(Problem(LayerHeads(2, 4, dim, dim, dtype), rows, log_rows, log_bf16))
        assert len({plan.shared_bytes for plan in plans}) > 1 or not log_rows
        for plan in plans:
            macros = {**plan.macros, "EXPECTED_SHARED_BYTES": plan.shared_bytes}
            assert compile_variant(Variant(LanesPlan.file, tuple(macros.items())), "sm_90")
        macros["EXPECTED_SHARED_BYTES"] += 16
        with pytest.raises(RuntimeError, match=r"LanesPlan\.shared_bytes"):
            compile_variant(Variant(LanesPlan.file, tuple(macros.items())), "sm_90")


def problem(rows: int, log_rows: int) -> Problem:
    return Problem(LayerHeads(2, 4, 128, 128, "float32"), rows, log_rows)
