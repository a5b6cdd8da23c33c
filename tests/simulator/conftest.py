"""Tests of the simulator price recurrent states from the operator tables unless they bring a profile themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.profiles import folders


@pytest.fixture(scope="module", autouse=True)
def no_shipped_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder in place of the package's kernel profiles, before any other fixture of a module."""
    empty = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "SHIPPED", empty)
        yield empty
