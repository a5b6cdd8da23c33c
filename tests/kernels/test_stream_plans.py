"""How `stream.cu` cuts a verification: every tile of every request once, halves of CTAs included."""

from __future__ import annotations

from collections import Counter

import pytest

from kernels_cupy.plans import STREAM_RECORD_ROWS, Problem, StreamPlan, stream_plans
from lab.methods.base import LayerHeads
from lab.methods.treelog import log_capacity


def problem(rows: int, logged: int, key_heads: int = 2, value_heads: int = 4, dim: int = 128) -> Problem:
    return Problem(LayerHeads(key_heads, value_heads, dim, dim, "bfloat16"), rows, logged)


@pytest.mark.parametrize("batch", [1, 2, 3, 64, 200])
@pytest.mark.parametrize(("key_heads", "value_heads", "dim"), [(2, 4, 128), (2, 8, 128), (1, 8, 64), (16, 48, 128)])
def test_the_ctas_take_every_tile_once(key_heads: int, value_heads: int, dim: int, batch: int) -> None:
    """A CTA of the last requests has half the tiles of the others, as the kernel's first lines say."""
    plans = stream_plans(problem(4, 16, key_heads, value_heads, dim))
    assert plans
    tiles_of_head = value_heads // key_heads * dim // 16
    for plan in plans:
        shares, heads, depth = plan.grid(batch)
        group, tiles, *halved = plan.arguments
        assert (heads, group) == (key_heads, value_heads // key_heads)
        whole = depth - 2 * min(halved[0], depth // 2)
        taken: Counter[tuple[int, int]] = Counter()
        for z in range(depth):
            for x in range(shares):
                half = z - whole
                request, share, size = (z, x, tiles) if half < 0 else (whole + half // 2, 2 * x + half % 2, tiles // 2)
                first = share * plan.warps * size
                taken.update((request, tile) for tile in range(first, first + plan.warps * size))
        assert set(taken.values()) == {1}
        assert set(taken) == {(request, tile) for request in range(batch) for tile in range(tiles_of_head)}


def test_a_half_of_a_cta_is_no_part_of_two_heads() -> None:
    assert StreamPlan(problem(4, 16, 16, 48), 3, 8).divides
    assert not StreamPlan(problem(4, 16, 16, 48), 3, 8, halved=512).divides
    assert not StreamPlan(problem(4, 16), 4, 1, halved=512).divides


def test_logs_of_more_than_16_rows_leave_a_lane_for_every_record_row() -> None:
    assert all(stream_plans(problem(rows, logged)) for rows, logged in ((8, 24), (4, 28), (16, 16)))
    assert not any(stream_plans(problem(rows, logged)) for rows, logged in ((9, 24), (4, 29), (16, 17)))


@pytest.mark.parametrize("rows", range(1, 17))
def test_the_log_of_treelog_has_streams_for_every_small_tree(rows: int) -> None:
    for path in range(1, rows + 1):
        logged = log_capacity(rows, path)
        assert logged >= path
        assert logged <= 16 or rows + logged <= STREAM_RECORD_ROWS
        assert any(plan.warps == 4 for plan in stream_plans(problem(rows, logged)))
