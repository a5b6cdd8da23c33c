"""INV-1 on the GPU: outputs, factors and committed states of every method equal the float64 recurrence."""

from __future__ import annotations

import pytest

from kernels_cupy.gate import Case, cases, failures, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", list(cases(trees=7, quick=True)), ids=lambda case: case.name)
def test_inv_1_lossless(case: Case) -> None:
    worst = run(case)
    assert failures(case, worst) == [], worst
