"""`docs/kernels.md`: the CUDA kernels beside their floors, targets and public kernels; `make kernels`.

`python -m reports.kernels docs/kernels.md` rewrites what stands between the page's markers and the pictures beside it.
The rest of the page is written by hand and stays. Another folder with a profile may follow the page's path.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lab.errors import UsageError, exit_code
from lab.files import replace_text
from reports import evidence
from reports.kernelcells import STATES
from reports.kernelparts import PARTS, Record
from reports.roofline import roofline_svg, spots

_PART = re.compile(r"(<!-- generated: (?P<name>[^>]+?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def parts_of(page: str) -> dict[str, str]:
    """What stands between the markers of a page, by name."""
    return {found["name"]: found["body"].strip() for found in _PART.finditer(page)}


def fill(page: str, record: Record) -> str:
    """The page with its generated parts made anew; `UsageError` when its markers are not those of `PARTS`."""
    names = [found["name"] for found in _PART.finditer(page)]
    if sorted(names) != sorted(PARTS):
        raise UsageError(
            f"the page has the generated parts {', '.join(names) or 'none'}; each of {', '.join(PARTS)} is needed "
            "once, as '<!-- generated: NAME -->' and '<!-- end -->' on lines of their own"
        )
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found['name']](record)}\n{found[4]}", page)


def pictures(record: Record) -> dict[str, str]:
    """File names and SVG texts of the rooflines, one per state type."""
    return {
        f"kernels-roofline-{name}.svg": roofline_svg(
            list(spots(record.steps, state, record.bandwidth)), record.bandwidth, name
        )
        for state, name in STATES.items()
    }


def write_page(path: Path, folder: Path = evidence.H200) -> None:
    """Make the generated parts of the page at `path` anew, and the pictures beside it."""
    record = Record(folder)
    texts = {path: fill(path.read_text(encoding="utf-8"), record)}
    texts |= {path.with_name(name): svg for name, svg in pictures(record).items()}
    for target, text in texts.items():
        replace_text(target, text)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m reports.kernels docs/kernels.md [PROFILE_FOLDER]")
    sys.exit(exit_code(lambda: write_page(*map(Path, sys.argv[1:]))))
