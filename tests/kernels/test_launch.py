"""Launches, alone and chained, on a driver that only writes down what it is given."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels_cupy import launch
from kernels_cupy.compiler import LAUNCHED, PTX_VARIABLE
from kernels_cupy.launch import Launch, chains_here, driver_value, load_driver
from lab.errors import LaunchError, MissingError, exit_code

ARRAY = SimpleNamespace(data=SimpleNamespace(ptr=0x7F00_0000_1000))
SERIALIZATION = "programmatic stream serialization"


class FakeDriver:
    """`cuda.bindings.driver`: keeps configuration and arguments of every launch, read as a driver reads them."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=SERIALIZATION)
    CUlaunchConfig = SimpleNamespace

    def __init__(self) -> None:
        self.status = self.CUresult.CUDA_SUCCESS
        self.types: list[Any] = []
        self.launches: list[tuple[SimpleNamespace, int, list[Any]]] = []

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    def cuLaunchKernelEx(self, config: SimpleNamespace, function: int, pointers: int, extra: int) -> tuple[Any]:
        places = (ctypes.c_void_p * len(self.types)).from_address(pointers)
        values = [kind.from_address(place).value for kind, place in zip(self.types, places, strict=True)]
        self.launches.append((SimpleNamespace(**vars(config)), function, values))
        return (self.status,)


class FakeKernel:
    """A kernel of CuPy that writes down its own calls."""

    name = "verify_stream"
    kernel = SimpleNamespace(ptr=77)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        self.calls.append((grid, block, arguments, shared_mem))


@pytest.fixture
def capability() -> str:
    return "90"


@pytest.fixture
def streams(capability: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The current stream is the last of the list."""
    found = [5]
    cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=found[-1]),
        Device=lambda: SimpleNamespace(compute_capability=capability, use=lambda: None),
    )
    monkeypatch.setattr(launch, "load_cupy", lambda: SimpleNamespace(cuda=cuda))
    for cached in (load_driver, chains_here):
        cached.cache_clear()
    yield found
    for cached in (load_driver, chains_here):
        cached.cache_clear()


@pytest.fixture
def driver(streams: list[int], monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake, bindings = FakeDriver(), ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return fake


def test_a_launch_of_its_own_is_the_kernels_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_driver", lambda: pytest.fail("it needs no driver"))
    kernel = FakeKernel()
    Launch(kernel, (4, 2), 128, (ARRAY, np.int32(3)), 2048)()
    assert kernel.calls == [((4, 2), (128,), (ARRAY, np.int32(3)), 2048)]


def test_a_kernel_that_has_early_ctas_hears_how_many_in_both_kinds_of_launch(driver: FakeDriver) -> None:
    kernel, driver.types = FakeKernel(), [ctypes.c_float, ctypes.c_int32]
    both = Launch(kernel, (4,), 128, (np.float32(0.5),), early_ctas=(3, 264))
    both()
    both(chained=True)
    ((_, _, arguments, _),) = kernel.calls
    assert arguments == (0.5, 3)
    assert [type(x) for x in arguments] == [np.float32, np.int32]
    assert driver.launches[0][2] == [0.5, 264]


def test_a_chained_launch_packs_its_arguments_and_says_that_it_may_start_early(driver: FakeDriver) -> None:
    driver.types = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64]
    kernel = FakeKernel()
    Launch(kernel, (4, 2), 96, (ARRAY, np.int32(-3), np.float32(1e-6), np.uint64(0)), 70_000)(chained=True)
    ((config, function, values),) = driver.launches
    assert kernel.calls == []
    assert function == 77
    assert values == [ARRAY.data.ptr, -3, pytest.approx(1e-6), 0]
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (4, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
    assert (config.sharedMemBytes, config.numAttrs) == (70_000, 1)
    (attribute,) = config.attrs
    assert attribute.id == SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_every_call_goes_to_the_stream_that_is_current_then(driver: FakeDriver, streams: list[int]) -> None:
    run = Launch(FakeKernel(), (1,), 32, ())
    for stream in (5, 9, 5):
        streams.append(stream)
        run(chained=True)
    assert [config.hStream for config, _, _ in driver.launches] == [5, 9, 5]


@pytest.mark.parametrize(("capability", "ptx"), [("80", None), ("89", None), ("90", "80")])
def test_without_early_launches_a_chained_one_is_like_any_other(
    driver: FakeDriver, ptx: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ptx:
        monkeypatch.setenv(PTX_VARIABLE, ptx)
    kernel = FakeKernel()
    Launch(kernel, (1,), 32, (), early_ctas=(0, 264))(chained=True)
    assert kernel.calls == [((1,), (32,), (0,), 0)]
    assert driver.launches == []


@pytest.mark.parametrize("capability", ["90", "100", "120"])
def test_hopper_and_later_gpus_chain(driver: FakeDriver) -> None:
    kernel = FakeKernel()
    Launch(kernel, (1,), 32, ())(chained=True)
    assert (len(kernel.calls), len(driver.launches)) == (0, 1)


@pytest.mark.parametrize(
    ("argument", "kind"),
    [(np.int32(7), ctypes.c_int32), (np.float32(7), ctypes.c_float), (np.int64(7), ctypes.c_int64)],
)
def test_numbers_keep_their_width(argument: Any, kind: Any) -> None:
    value = driver_value(argument)
    assert isinstance(value, kind)
    assert value.value == 7


def test_a_refusal_of_the_driver_is_one_sentence(driver: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    driver.status = SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED")
    run = Launch(FakeKernel(), (1,), 32, ())
    with pytest.raises(LaunchError, match=r"verify_stream \(CUDA_ERROR_NOT_SUPPORTED\); a driver of CUDA 13 is needed"):
        run(chained=True)
    assert exit_code(lambda: run(chained=True)) == 3
    assert capsys.readouterr().err.startswith("error: the driver refused a chained launch of verify_stream")


def test_without_cuda_bindings_a_chained_launch_says_how_to_get_it(
    streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    kernel = FakeKernel()
    run = Launch(kernel, (1,), 32, ())
    run()
    with pytest.raises(MissingError, match=r"need cuda-bindings; .* pip install -e '\.\[gpu\]'"):
        run(chained=True)
    assert len(kernel.calls) == 1


def test_a_change_of_launches_makes_records_stale() -> None:
    assert "launch.py" in LAUNCHED
