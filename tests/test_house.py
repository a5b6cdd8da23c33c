"""The house is in order: dependency lists agree, shipped data has an origin, no file names a private path."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

#: Names that differ: distribution on the Python index -> package on conda-forge.
CONDA_NAMES = {"cupy-cuda13x": "cupy", "nvidia-cuda-nvrtc": "cuda-nvrtc"}
#: What only conda has to be told: the interpreter, the installer, the CUDA release that `cupy-cuda13x` names.
CONDA_ONLY = {"python", "pip", "cuda-version"}


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def conda_requirements() -> dict[str, Requirement]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    requirements = [Requirement(line) for line in environment["dependencies"]]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def shipped_data() -> list[str]:
    """Paths below lab/data that are data, not code, relative to the root."""
    files = [path for path in (ROOT / "lab" / "data").rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts]
    return sorted(path.relative_to(ROOT).as_posix() for path in data)


def checked_in_files() -> list[Path]:
    """Files that git tracks or would track."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_environment_and_pyproject_list_the_same_dependencies() -> None:
    project = pyproject()["project"]
    lines = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    expected = {}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        expected[CONDA_NAMES.get(name, name)] = str(requirement.specifier)

    conda = {name: str(req.specifier) for name, req in conda_requirements().items() if name not in CONDA_ONLY}

    assert conda == expected


def test_environment_and_pyproject_want_the_same_python() -> None:
    wanted = Requirement("python" + pyproject()["project"]["requires-python"])
    assert conda_requirements()["python"].specifier == wanted.specifier


def test_every_shipped_data_file_is_named_in_notice() -> None:
    named = set((ROOT / "NOTICE").read_text(encoding="utf-8").split())
    assert shipped_data(), "lab/data holds no data"
    assert [path for path in shipped_data() if path not in named] == []


def test_notice_names_only_files_that_exist() -> None:
    words = (ROOT / "NOTICE").read_text(encoding="utf-8").split()
    named = [word for word in words if word.startswith(("lab/", "tests/"))]
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_shipped_gzip_files_carry_no_time_stamp() -> None:
    """Byte 4 to 7 of a gzip header is its time, byte 3 the flag of a stored file name; both are 0 here."""
    compressed = [path for path in shipped_data() if path.endswith(".gz")]
    assert [path for path in compressed if any((ROOT / path).read_bytes()[3:8])] == []


def test_no_checked_in_file_names_a_path_of_somebodys_machine() -> None:
    private = re.compile(rb"(?<![\w.])/(home|root|work|Users)/[A-Za-z]")
    offending = []
    for path in checked_in_files():
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        if private.search(content):
            offending.append(path.relative_to(ROOT).as_posix())
    assert offending == []
