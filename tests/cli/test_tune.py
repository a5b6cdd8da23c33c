"""`treewy bench --tune`: what it writes and prints with a GPU that is faked, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kernels_cupy.choice import candidates, modelled_plan
from kernels_cupy.plans import Problem, VerifyPlan
from lab.bench import cuda_backend
from lab.bench.points import Point
from lab.cli import tuning
from lab.profiles.plans import read_plans

HAS_CUPY = importlib.util.find_spec("cupy") is not None
FLAGS = ("bench", "--tune", "--model", "Qwen3.5-35B-A3B", "--state-dtype", "float32", "--tree", "chain:3")


class FakeBackend:
    name, methods = "cuda", cuda_backend.CUDA_METHODS

    def __init__(self, eager: bool = False) -> None: ...

    def device(self) -> dict[str, Any]:
        return {"name": "a GPU"}


class FakeTuner:
    """Plans take the microseconds of their name's length; Ctrl-C comes when the batch does."""

    interrupt = 0

    def candidates(self, problem: Problem) -> list[VerifyPlan]:
        return candidates(problem)

    def safe(self, problem: Problem, batch: int) -> VerifyPlan:
        return modelled_plan(problem, batch)

    def compile(self, plans: Iterable[VerifyPlan]) -> None: ...

    def refusal(self, point: Point) -> str | None:
        if point.batch == self.interrupt:
            raise KeyboardInterrupt
        return None

    def measure(self, point: Point, plans: Sequence[VerifyPlan]) -> dict[str, float]:
        return {plan.name: float(len(plan.name)) for plan in plans}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeTuner]:
    monkeypatch.setattr(cuda_backend, "CudaBackend", FakeBackend)
    monkeypatch.setattr(tuning, "tuner_on", lambda backend: FakeTuner())
    monkeypatch.setattr(FakeTuner, "interrupt", 0)
    return FakeTuner


def test_the_fastest_plans_are_written_and_summed_up(call: Any, fake_gpu: Any, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    code, text, err = call(*FLAGS, "--batch", "1,64", "--method", "treelog,bole", "--out", str(out))
    assert code == 0
    table = read_plans(out / "plans.csv")
    assert {(row.place.batch, row.place.log_rows) for row in table.rows} == {(1, 0), (1, 16), (64, 0), (64, 16)}
    assert {len(row.plan) for row in table.rows} == {len("block-h1-s1")}
    assert "fastest plans" in text
    assert "block-h2-s1 ×2" in text
    assert "the plans taken without a table last 1.00 times as long in the median of 4 places" in err
    assert f"wrote {out}" in err


def test_the_default_methods_are_those_that_have_plans(call: Any, fake_gpu: Any) -> None:
    code, text, _ = call(*FLAGS, "--batch", "8", "--json")
    rows = json.loads(text)["rows"]
    assert code == 0
    assert {(row["log_rows"], row["log_bf16"]) for row in rows} == {(0, False), (16, False), (16, True)}
    assert {row["batch"] for row in rows} == {8}


def test_ctrl_c_keeps_what_is_tuned_and_resume_goes_on(
    call: Any, fake_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*FLAGS, "--batch", "1,8,64", "--method", "bole", "--out", str(tmp_path / "out"))
    fake_gpu.interrupt = 64
    code, _, err = call(*flags)
    assert code == 130
    assert f"2 places are kept in {tmp_path / 'out'}; continue with the same flags and --resume" in err.replace(
        "\n", ""
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["plans.csv", "plans_device.json"]
    assert len(read_plans(tmp_path / "out" / "plans.csv").rows) == 2
    fake_gpu.interrupt = 1
    assert call(*flags, "--resume")[0] == 0, "batch 1 is there already"
    assert len(read_plans(tmp_path / "out" / "plans.csv").rows) == 3
    code, _, err = call(*flags)
    assert code == 2
    assert "--overwrite to tune anew" in err
    monkeypatch.setattr(FakeBackend, "device", lambda self: {"name": "another GPU"})
    code, _, err = call(*flags, "--resume")
    assert code == 2
    assert "was tuned on a GPU, this GPU is another GPU; give --overwrite to tune" in " ".join(err.split())


def test_an_interruption_before_the_first_place_writes_nothing(call: Any, fake_gpu: Any, tmp_path: Path) -> None:
    fake_gpu.interrupt = 8
    code, _, err = call(*FLAGS, "--batch", "8", "--out", str(tmp_path / "out"))
    assert code == 130
    assert "no place was tuned yet" in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--phase", "step"), "--phase has no meaning beside --tune"),
        (("--profile", "mine"), "--profile has no meaning beside --tune"),
        (("--eager",), "--eager has no meaning beside --tune"),
        (("--resume",), "--resume needs the folder"),
        (("--method", "recurrent"), "no method of recurrent"),
        (("--method", "storeall"), "--tune: storeall has one way to run"),
        (("--method", "specla"), "--method is 'specla'"),
    ],
)
def test_flags_without_meaning_are_refused(call: Any, fake_gpu: Any, flags: tuple[str, ...], words: str) -> None:
    code, _, err = call(*FLAGS, "--batch", "8", *flags)
    assert code == 2
    assert re.search(words, " ".join(err.split()))


def test_a_cpu_has_nothing_to_tune(call: Any) -> None:
    code, _, err = call(*FLAGS, "--backend", "cpu")
    assert code == 2
    assert "--tune: backend cpu has one way to run a verification; give --backend cuda" in " ".join(err.split())


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed")
def test_without_cupy_tuning_says_how_to_get_it(call: Any) -> None:
    code, _, err = call(*FLAGS)
    assert code == 3
    assert "pip install -e" in err
