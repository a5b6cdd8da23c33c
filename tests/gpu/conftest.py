"""Tests of this folder are skipped where what they need is not there."""

from __future__ import annotations

from typing import Any

import pytest

from kernels_cupy.compiler import load_cupy
from kernels_cupy.device import check_gpu
from lab.errors import MissingError


@pytest.fixture(autouse=True)
def cp() -> Any:
    """CuPy, with a GPU."""
    try:
        return load_cupy()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def chains() -> None:
    """All that chained launches need as well."""
    try:
        check_gpu()
    except MissingError as error:
        pytest.skip(str(error))
