"""Places are tested before they are written, and what lies there stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.errors import UsageError
from lab.files import check_replaceable, check_writable, replace_text


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    for check in (check_writable, check_replaceable):
        check(tmp_path / "old")
        check(tmp_path / "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "kept")]


def test_folders_and_places_in_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be written \(Is a directory\); give a file"):
        check_writable(tmp_path)
    with pytest.raises(UsageError, match=r"cannot be written \(No such file or directory\)"):
        check_writable(tmp_path / "none" / "file")


def test_a_file_that_could_not_be_put_in_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv.tmp").mkdir()
    with pytest.raises(OSError, match=r"a\.csv\.tmp"):
        replace_text(tmp_path / "a.csv", "text")
    with pytest.raises(UsageError, match=r"a\.csv\.tmp cannot be written"):
        check_replaceable(tmp_path / "a.csv")
