"""Chained launches on the GPU: bit for bit what launches one after another give."""

from __future__ import annotations

import pytest

from kernels_cupy.chained import Case, run, written

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("chains")]

CASES = [
    Case("treelog", 32, "float32", 5, "chain:3"),
    Case("treelog", 48, "bfloat16", 5, "binary:15"),
    Case("storeall", 32, "float32", 5, "chain:3"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_chained_step_writes_what_a_step_writes(case: Case) -> None:
    assert run(case) == []


def test_layers_feed_each_other() -> None:
    """Otherwise a launch that reads its operands too early would leave no trace."""
    found = written(CASES[0], chained=True)
    outputs = [found[f"output of layer {layer}"] for layer in range(3)]
    assert all(outputs[layer].any() for layer in range(3))
    assert not (outputs[1] == outputs[2]).all()
