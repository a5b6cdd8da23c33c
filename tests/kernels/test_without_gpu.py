"""Without CuPy or a GPU the backend says so, and the parts that need neither still work."""

from __future__ import annotations

import subprocess
import sys

from kernels_cupy.compiler import source_hash


def test_missing_cupy_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from kernels_cupy.compiler import load_cupy\n"
        "from lab.errors import MissingError\n"
        "try:\n    load_cupy()\nexcept MissingError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "-e '.[gpu]'" in done.stdout


def test_sessions_import_without_cupy() -> None:
    code = "import sys; sys.modules['cupy'] = None\nfrom kernels_cupy.sessions import SESSIONS; print(len(SESSIONS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"


def test_source_hash_is_stable() -> None:
    assert source_hash() == source_hash()
    assert len(source_hash()) == 64
