"""The command lines of the check modules: exit codes without CuPy, and flags that are refused before anything runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kernels_cupy import attention_bench, attention_gate, commandline, drift, gate, offline, sanitize
from lab.errors import MissingError, exit_code

ROOT = Path(__file__).parents[2]
MODULES = ("gate", "sanitize", "drift", "attention_gate", "attention_bench", "counters")


def flags_of(module: str, tmp_path: Path) -> list[str]:
    return ["--out", str(tmp_path / "out")] if module in ("attention_bench", "counters") else []


@pytest.mark.parametrize("module", MODULES)
def test_without_cupy_a_check_ends_as_the_readme_says(module: str, tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.modules['cupy'] = None\n"
        f"runpy.run_module('kernels_cupy.{module}', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, *flags_of(module, tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 3
    assert re.fullmatch(r"missing: the CUDA kernels need CuPy; .*\n", done.stderr)


def refusal(
    module: ModuleType, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What `main` says when it refuses a flag; anything that runs after the flags are read fails the test."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("it starts before it refuses")

    for name in ("load_cupy", "table"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, started)
    monkeypatch.setattr(sys, "argv", [module.__name__, *flags])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "flags", "words"),
    [
        (gate, ["--processes", "0"], "--processes: '0' given; a whole number from 1 is needed"),
        (gate, ["--trees", "0"], "--trees: '0' given; a whole number from 1"),
        (gate, ["--trees=-9"], "--trees: '-9' given"),
        (gate, ["--ptx", "sm_80"], "--ptx: 'sm_80' given"),
        (drift, ["--processes", "-1"], "--processes: '-1' given"),
        (drift, ["--steps", "1e3"], "--steps: '1e3' given"),
        (sanitize, ["--part", "4"], "--part: '4' given; a whole number from 0 to 3"),
        (sanitize, ["--part", "0", "--record", "x"], "--record: not allowed with argument --part"),
        (attention_gate, ["--processes", "2"], "unrecognized arguments: --processes 2"),
        (attention_bench, ["--out", "x", "--rows", "1,,2"], "--rows: '1,,2' given; positive whole numbers by single"),
        (attention_bench, ["--out", "x", "--batches", "0"], "--batches: '0' given"),
        (attention_bench, ["--out", "x", "--heads", "16x3"], "--heads: '16x3' given; query heads x KV heads"),
        (attention_bench, ["--out", "x", "--limit-s", "nan"], "--limit-s: 'nan' given; a positive number of seconds"),
        (offline, ["--nothing"], "unrecognized arguments: --nothing"),
        (offline, ["resources.csv"], "unrecognized arguments: resources.csv"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, ModuleType) else None,
)
def test_flags_that_cannot_be_used_are_refused(
    module: ModuleType,
    flags: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(module, flags, monkeypatch, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "flag"), [(gate, "--out"), (drift, "--out"), (offline, "--out"), (sanitize, "--record")]
)
@pytest.mark.parametrize("place", ["folder", "nowhere/record.json"])
def test_a_file_that_cannot_be_written_is_refused(
    module: ModuleType,
    flag: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    err = refusal(module, [flag, str(tmp_path / place)], monkeypatch, capsys)
    assert f"{tmp_path / place} cannot be written" in err


def test_help_of_the_resource_table_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = offline.TABLE.read_bytes()
    monkeypatch.setattr(offline, "table", lambda: pytest.fail("--help compiles"))
    monkeypatch.setattr(sys, "argv", ["offline", "--help"])
    with pytest.raises(SystemExit) as stop:
        offline.main()
    assert stop.value.code == 0
    assert "resources.csv" in capsys.readouterr().out
    assert offline.TABLE.read_bytes() == before


def test_the_resource_table_goes_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offline, "table", lambda: "a table\n")
    monkeypatch.setattr(offline, "TABLE", tmp_path / "resources.csv")
    for flags, file in (([], "resources.csv"), (["--out", str(tmp_path / "mine.csv")], "mine.csv")):
        monkeypatch.setattr(sys, "argv", ["offline", *flags])
        assert offline.main() == 0
        assert (tmp_path / file).read_text() == "a table\n"


def test_without_a_compiler_the_resource_table_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def table() -> str:
        raise MissingError("no CUDA compiler")

    monkeypatch.setattr(offline, "table", table)
    monkeypatch.setattr(sys, "argv", ["offline", "--out", str(tmp_path / "x.csv")])
    assert exit_code(offline.main) == 3
    assert capsys.readouterr().err == "missing: no CUDA compiler\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [2e-3, 5e-3, float("inf")])
def test_the_gate_of_attention_is_red_above_its_limit(
    error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worst = {case.name: 1e-3 for case in attention_gate.cases()}
    worst[next(iter(worst))] = error
    monkeypatch.setattr(attention_gate, "load_cupy", lambda: None)
    monkeypatch.setattr(attention_gate, "run", lambda case: worst[case.name])
    monkeypatch.setattr(sys, "argv", ["attention_gate"])
    is_red = error > attention_gate.LIMIT
    assert attention_gate.main() == int(is_red)
    assert f"cases, {int(is_red)} red, worst {error:.2e} of 4e-03 allowed" in capsys.readouterr().out


@pytest.mark.parametrize("differs", [[], ["u of layer 1"]])
def test_the_gate_is_red_where_a_chained_launch_differs(
    differs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = [{"method": "treelog", "plan": "stream-w4", "differs": differs}]
    monkeypatch.setattr(gate, "check_gpu", lambda: None)
    monkeypatch.setattr(gate, "cases", lambda trees, quick: iter(()))
    monkeypatch.setattr(gate, "device_record", lambda: {"name": "a GPU"})
    monkeypatch.setattr(gate.chained, "records", lambda quick, processes: found)
    monkeypatch.setattr(sys, "argv", ["gate", "--processes", "1", "--out", str(tmp_path / "gate.json")])
    assert gate.main() == int(bool(differs))
    assert f"1 cases of chained launches, {len(differs)} differ" in capsys.readouterr().out
    assert json.loads((tmp_path / "gate.json").read_text())["chained"] == found


def test_ctrl_c_ends_with_a_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        commandline.run(stopped)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing was written\n"


def test_these_are_all_command_lines_of_the_package() -> None:
    folder = ROOT / "kernels_cupy"
    found = {path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert found == {*MODULES, "offline"}
