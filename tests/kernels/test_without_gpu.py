"""Without CuPy or a GPU the backend says so, and the parts that need neither still work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels_cupy import compiler, cubin
from kernels_cupy.compiler import PTX_VARIABLE, has_warpgroups, kernel_hash, source_hash
from lab.bench.sources import source_files, staleness
from lab.bench.sources import source_hash as bench_hash
from lab.profiles import plans


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


def test_another_table_of_plans_makes_a_measurement_stale_but_no_record_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "SHIPPED", tmp_path)
    (tmp_path / "h200").mkdir()
    record = {"backend": "cuda", "source_hash": bench_hash("cuda"), "sources": source_files("cuda")}
    kernels = kernel_hash()
    assert staleness(record) is None
    (tmp_path / "h200" / "plans.csv").write_text("a table")
    assert staleness(record) == "the sources have changed: h200/plans.csv"
    assert kernel_hash() == kernels


class FakeCompiler:
    """NVRTC and a module loader that write down what they are asked for."""

    NVRTCError = RuntimeError

    def __init__(self) -> None:
        self.options: list[tuple[str, ...]] = []
        self.loaded: list[dict[str, object]] = []

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, text: str, name: str, headers: object, names: object) -> str:
        return name

    def compileProgram(self, program: str, options: tuple[str, ...]) -> None:
        self.options.append(options)

    def getPTX(self, program: str) -> str:
        return "ptx of " + program

    def getCUBIN(self, program: str) -> bytes:
        return b"cubin of " + program.encode()

    def destroyProgram(self, program: str) -> None: ...

    def RawModule(self, **arguments: object) -> object:
        self.loaded.append(arguments)
        return SimpleNamespace(get_function=lambda name: SimpleNamespace(max_dynamic_shared_size_bytes=0))


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompiler]:
    fake = FakeCompiler()
    cupy = SimpleNamespace(cuda=SimpleNamespace(nvrtc=fake), RawModule=fake.RawModule)
    for module in (compiler, cubin):
        monkeypatch.setattr(module, "load_cupy", lambda: cupy)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(PTX_VARIABLE, raising=False)
    caches = (compiler._module, compiler._kernel, cubin.module)
    for cached in caches:
        cached.cache_clear()
    yield fake
    for cached in caches:
        cached.cache_clear()


def test_kernels_are_compiled_for_the_gpu_that_is_there(fake_compiler: FakeCompiler) -> None:
    compiler.kernel("stream.cu", "verify_stream", GROUPS=2)
    (loaded,) = fake_compiler.loaded
    assert loaded["options"] == ("-std=c++17", "-DGROUPS=2")
    assert fake_compiler.options == []


def test_kernels_are_compiled_to_ptx_of_an_older_gpu_on_request(
    fake_compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PTX_VARIABLE, "80")
    compiler.kernel("stream.cu", "verify_stream", GROUPS=2)
    assert fake_compiler.options == [("-arch=compute_80", "-std=c++17", "-DGROUPS=2", "-ftz=true", "-default-device")]
    path = Path(str(fake_compiler.loaded[0]["path"]))
    assert path.suffix == ".ptx"
    assert path.read_text() == "ptx of stream.cu"


def test_one_gpu_family_gets_machine_code(fake_compiler: FakeCompiler) -> None:
    cubin.cubin_kernel("attention.cu", "verify_attention", "sm_90a", TILES=1)
    assert fake_compiler.options == [("-arch=sm_90a", "-std=c++17", "-DTILES=1")]
    assert Path(str(fake_compiler.loaded[0]["path"])).read_bytes() == b"cubin of attention.cu"


@pytest.mark.parametrize(
    ("capability", "ptx", "expected"), [("90", "", True), ("80", "", False), ("100", "", False), ("90", "80", False)]
)
def test_only_machine_code_for_hopper_has_products_of_warpgroups(
    monkeypatch: pytest.MonkeyPatch, capability: str, ptx: str, expected: bool
) -> None:
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(compiler, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    monkeypatch.setenv(PTX_VARIABLE, ptx)
    assert has_warpgroups.__wrapped__() is expected


def test_products_of_warpgroups_are_compiled_for_their_architecture(fake_compiler: FakeCompiler) -> None:
    compiler.kernel("wide.cu", "verify_wide", ROWS=16)
    assert fake_compiler.options == [("-arch=sm_90a", "-std=c++17", "-DROWS=16", "-ftz=true", "-default-device")]
