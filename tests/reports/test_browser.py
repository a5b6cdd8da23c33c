"""The report in a real browser, at desk and phone width: it draws, it fits, it answers to pointer and controls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reports import write_report
from tests.reports.chromium import Page, browse, find_browser
from tests.reports.synthetic import BUDGETS, LOADS, METHODS, write_examples

pytestmark = pytest.mark.browser

DESK, PHONE = (1280, 900, False), (390, 844, True)
#: Points of a chart that can be seen.
MARKS = ".mark-symbol path[stroke][aria-roledescription]"
#: Charts per report.
CHARTS = {"full": 19, "single": 6, "empty": 0, "rate": 19, "several": 38}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    executable = find_browser()
    if executable is None:
        message = "no Chromium or Chrome on PATH; install one, for example the Debian package 'chromium'"
        if os.environ.get("TREEWY_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with browse(executable, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {run.name: write_report(run) for run in write_examples(tmp_path_factory.mktemp("runs"))}


def points(page: Page) -> int:
    """Marks drawn for cells, in all charts."""
    return int(page.evaluate(f"document.querySelectorAll('.chart svg {MARKS}').length"))


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", CHARTS)
def test_report_draws_without_errors_and_fits(
    page: Page, reports: dict[str, Path], name: str, size: tuple[int, int, bool]
) -> None:
    page.open(reports[name], *size)
    assert page.problems == []
    assert page.requests == [reports[name].resolve().as_uri()]
    assert page.evaluate("innerWidth") == size[0]
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate("document.querySelectorAll('.chart svg').length") == CHARTS[name]
    overhang = "c => c.querySelector('svg').getBoundingClientRect().width - c.clientWidth"
    widths = page.evaluate(f"[...document.querySelectorAll('.chart')].map({overhang})")
    assert [width for width in widths if width > 1] == []


def test_every_cell_of_the_chosen_tree_is_drawn(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["full"], *DESK)
    marks = page.evaluate(f"document.querySelectorAll('[data-figure=ttft] svg {MARKS}').length")
    assert marks == len(BUDGETS) * len(METHODS) * len(LOADS)


def test_a_method_is_switched_off_in_all_charts(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["full"], *DESK)
    before = points(page)
    click = "document.querySelector('button[data-method=treelog]').click(); new Promise(r => setTimeout(r, 300))"
    page.evaluate(click)
    assert points(page) < before
    pressed = "[...document.querySelectorAll('button[data-method=treelog]')].map(b => b.ariaPressed)"
    assert set(page.evaluate(pressed)) == {"false"}
    page.evaluate(click)
    assert points(page) == before
    assert page.problems == []


def test_the_tree_control_moves_charts_tables_and_titles(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["full"], *DESK)
    shown = "[...document.querySelectorAll('tbody[data-for-tree]')].filter(b => !b.hidden).map(b => b.dataset.forTree)"
    assert page.evaluate(shown) == ["1,1,1"]
    before = points(page)
    page.evaluate("document.querySelector('input[value=\"3,3,3\"]').click(); new Promise(r => setTimeout(r, 300))")
    assert page.evaluate(shown) == ["3,3,3"]
    assert page.evaluate("document.querySelector('[data-shown=tree]').textContent") == "3,3,3"
    assert points(page) < before  # replayssm verifies chains only
    assert page.problems == []


def test_the_budget_control_moves_the_ledger(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["full"], *DESK)
    path = "document.querySelector('[data-figure=ledger] svg .mark-rect path:last-of-type').getAttribute('aria-label')"
    before = page.evaluate(path)
    page.evaluate("document.querySelector('input[value=\"0.6\"]').click(); new Promise(r => setTimeout(r, 300))")
    assert page.evaluate(path) != before
    assert page.problems == []


def test_step_bars_hold_every_term_of_every_configuration(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["full"], *DESK)
    panel = "document.querySelectorAll('[data-figure=steps]')[2].querySelectorAll('svg .mark-rect path')"
    configurations = 3 * len(METHODS) - 2  # replayssm verifies chains only
    assert page.evaluate(f"{panel}.length") == 7 * configurations
    width = f"[...{panel}].map(p => p.getBBox().width).reduce((a, b) => a + b)"
    before = page.evaluate(width)
    click = "; new Promise(r => setTimeout(r, 300))"
    page.evaluate("document.querySelector('input[value=\"0.6\"]').click()" + click)
    assert page.evaluate(width) < before  # fewer requests run, so steps are shorter
    page.evaluate("document.querySelector('button[data-method=treelog]').click()" + click)
    assert page.evaluate(f"{panel}.length") == 7 * (configurations - 3)
    label = page.evaluate(f"{panel}[0].getAttribute('aria-label')")
    assert "part of the step: projections, experts and norms" in label
    assert "share of the step: " in label
    assert page.problems == []


def test_the_pointer_shows_figures_with_units(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["full"], *DESK)
    page.evaluate("document.querySelector('[data-figure=ttft]').scrollIntoView({block: 'center'})")
    place = page.evaluate(
        f"(() => {{ const b = [...document.querySelectorAll('[data-figure=ttft] svg {MARKS}')].at(-1)"
        ".getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    page.move_to(place[0] - 4, place[1])
    page.move_to(*place)
    text = page.evaluate(
        "new Promise(r => setTimeout(() => r(document.querySelector('#vg-tooltip-element.visible')?.innerText), 400))"
    )
    assert text is not None
    assert "undefined" not in text
    assert any(method in text for method in METHODS)
    for label in (
        "state method",
        "draft tree",
        "output, tokens/s",
        "p99 TTFT, ms",
        "blocks at the peak, GiB",
        "records reserved, GiB",
        "limit",
    ):
        assert label in text
    assert page.problems == []


def test_saturated_cells_are_hollow(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["rate"], *DESK)
    marks = f"document.querySelectorAll('[data-figure=ttft] svg {MARKS}[fill=white]').length"
    rows = "JSON.parse(document.getElementById('report-data').textContent)['group-1'].data.cells"
    saturated = page.evaluate(f"{rows}.filter(c => c.tree === '1,1,1' && c.pace === 'saturated').length")
    assert page.evaluate(marks) == saturated > 0


@pytest.mark.parametrize("name", ["full", "rate"])
def test_the_answer_fits_a_phone_without_scrolling_sideways(page: Page, reports: dict[str, Path], name: str) -> None:
    page.open(reports[name], *PHONE)
    boxes = "[...document.querySelectorAll('.best, .knees')].map(t => t.getBoundingClientRect().right)"
    assert max(page.evaluate(boxes)) <= PHONE[0]


def test_the_page_prints(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["full"], *DESK)
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 50_000
    assert page.problems == []
