"""The compiled-code cache notices every compiled source."""

from __future__ import annotations

from pathlib import Path

import simulator
from simulator import jit


def test_every_module_with_compiled_functions_is_in_the_caches_hash() -> None:
    folder = Path(simulator.__file__).parent
    modules = [path for path in folder.rglob("*.py") if "\n@njit(" in path.read_text(encoding="utf-8")]
    compiled = {path.relative_to(folder).as_posix() for path in modules}
    assert compiled == set(jit._COMPILED)
