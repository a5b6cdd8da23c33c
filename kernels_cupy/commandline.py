"""What the command lines of this package share: checked flags, and exit codes as those of `treewy`.

A flag's converter runs while the line is read, so that nothing is computed for a value that cannot be used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lab.errors import UsageError, exit_code
from lab.files import check_writable


def run(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit: 0 done, 1 a check failed, 2 unusable input, 3 a device or extra is missing, 130 Ctrl-C."""
    try:
        sys.exit(exit_code(main))
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(130)


def whole(lowest: int = 1, highest: int | None = None) -> Callable[[str], int]:
    """The converter of a flag that takes a whole number from `lowest` to `highest`."""

    def convert(text: str) -> int:
        value = int(text) if text.isdecimal() else None
        if value is None or value < lowest or (highest is not None and value > highest):
            upper = "" if highest is None else f" to {highest}"
            raise argparse.ArgumentTypeError(f"{text!r} given; a whole number from {lowest}{upper} is needed")
        return value

    return convert


def wholes(text: str) -> list[int]:
    """The converter of a flag that takes positive whole numbers by commas."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} given; positive whole numbers by single commas are needed")
    return list(map(int, words))


def seconds(text: str) -> float:
    """The converter of a flag that takes a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} given; a positive number of seconds is needed")
    return value


def out_file(text: str) -> Path:
    """The converter of a flag that names a file to write."""
    try:
        check_writable(Path(text))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)
