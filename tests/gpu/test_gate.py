"""INV-1 on the GPU: outputs, factors and committed states of every method equal the float64 recurrence."""

from __future__ import annotations

import pytest

from kernels_cupy.compiler import load_cupy
from kernels_cupy.gate import Case, cases, failures, run
from lab.errors import MissingError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    try:
        load_cupy()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", list(cases(trees=7, quick=True)), ids=lambda case: case.name)
def test_inv_1_lossless(case: Case) -> None:
    worst = run(case)
    assert failures(case, worst) == [], worst
