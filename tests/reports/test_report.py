"""The report file: what it holds, that it loads nothing, that text from files is escaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lab.methods import METHODS
from reports import write_report
from reports.palette import METHOD_COLOURS, METHOD_DASHES
from tests.reports.synthetic import ledgers, rate_sweep, record, sweep, write_run


class Elements(HTMLParser):
    """All start tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._raw = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.text.append(data)

    def count(self, tag: str, **attributes: str) -> int:
        return sum(1 for name, attrs in self.tags if name == tag and attributes.items() <= attrs.items())


def report(folder: Path, rows: list[dict[str, Any]], run_record: dict[str, Any] | None = None) -> str:
    return write_report(write_run(folder / "run", rows, run_record)).read_text(encoding="utf-8")


def words(html: str) -> str:
    return re.sub(r"\s+", " ", " ".join(Elements(html).text))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report(tmp_path_factory.mktemp("full"), sweep())


def test_the_answer_comes_before_everything_else(full: str) -> None:
    text = words(full)
    order = [
        "Answer",
        "At gpu_memory_utilization 0.9 and 256 concurrent requests, replayssm with tree 1,1,1 reaches",
        "Not run: replayssm",
        "docs/validation.md",
        "Best configuration",
        "Where requests begin to wait",
        "By load",
        "State methods",
        "Ratios to storeall",
        "How sure are we",
        "Run it again",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_seven_figures_draw_every_budget_or_load(full: str) -> None:
    elements = Elements(full)
    for figure in ("peak-kv", "ttft", "throughput", "tpot", "width", "steps"):
        assert elements.count("div", **{"data-figure": figure}) == 3
    assert elements.count("div", **{"data-figure": "ledger"}) == 1


def test_step_bars_leave_out_terms_that_take_no_time(tmp_path: Path) -> None:
    def data(folder: str, **columns: Any) -> dict[str, Any]:
        html = report(tmp_path / folder, sweep(methods=("storeall",), trees=("1,1,1",), **columns))
        found: dict[str, Any] = json.loads(re.findall(r'id="report-data">(.*?)</script>', html)[0])["group-1"]
        return found

    whole = data("whole", draft_share=0.0)
    folded = [step["fold"] for step in whole["specs"]["steps"][0]["transform"] if "fold" in step]
    assert folded == [[f"{term}_ms" for term in ("rows", "head", "state", "attention", "prefill", "host")]]
    for cell in whole["data"]["cells"]:
        assert sum(cell[name] for name in folded[0]) < cell["mean_step_ms"]  # what drafts took is missing
    assert "steps" not in data("unknown", mean_step_ms="")["specs"]


def test_nothing_is_loaded_from_anywhere(full: str) -> None:
    for tag, attributes in Elements(full).tags:
        if tag == "a":
            continue
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, name)
    style = full[full.index("<style>") : full.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in full


def test_ratios_are_those_of_the_same_tree_budget_and_load(tmp_path: Path) -> None:
    rows = sweep(methods=("storeall", "treelog"), loads=(8,))
    for cell in rows:
        if cell["gpu_memory_utilization"] == 0.75 and cell["tree"] == "2,2,2":
            treelog = cell["state_method"] == "treelog"
            cell["reserved_records_gib"] = 0.0
            cell |= {"output_throughput": 246.0 if treelog else 200.0, "peak_kv_gib": 2.0 if treelog else 6.5}
            cell |= {
                "p99_ttft_ms": 100.0 if treelog else 133.0,
                "mean_tpot_ms": 10.0 if treelog else 9.1,
            }
            cell |= {"peak_running": 8 if treelog else 7}
    html = report(tmp_path, rows)
    body = html[html.index('data-for-budget="0.75" data-for-tree="2,2,2"') :]
    cells = re.findall(r'<td class="(?:better|worse|tie)">([^<]*)</td>', body[: body.index("</tbody>")])
    assert cells == ["1.23x", "3.25x", "1.33x", "0.91x", "1.14x"]


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>'\"&"
    rows = sweep(loads=(8, 64), model=evil, workload=evil)
    for cell in rows:
        cell["state_method"] = cell["state_method"].replace("treewy", evil)
        cell["tree"] = cell["tree"].replace("3,3,3", evil)
    run_record = record(evil, workload={evil: evil}, versions={evil: evil}, step_cost=[{"term": evil, "source": evil}])
    run_record["skipped"] = [{"state_method": evil, "tree": evil, "reason": evil}]
    run_record["acceptance"] = [{"preset": evil, "n": 1}, {"preset": evil, "n": 2}]
    run_record["ledgers"] = [entry | {"lines": {evil: 2**30}, "state_method": evil} for entry in ledgers()[:3]]
    html = report(tmp_path, rows, run_record)
    assert "<script>alert" not in html
    assert Elements(html).count("script") == 3
    assert "alert(1)" in words(html)


def test_data_in_the_script_is_valid_json(tmp_path: Path) -> None:
    html = report(tmp_path, sweep(loads=(8, 64), mean_tpot_ms="nan"))
    data = html.split('id="report-data">')[1].split("</script>")[0]
    (section,) = json.loads(data).values()
    assert all(point["mean_tpot_ms"] is None for point in section["data"]["cells"])


def test_what_is_not_a_number_is_a_dash(tmp_path: Path) -> None:
    text = words(report(tmp_path, sweep(loads=(8, 64), p99_ttft_ms="inf", acceptance_length="nan")))
    assert " – " in text
    assert not re.search(r"\b(nan|inf)\b", text, re.IGNORECASE)


def test_an_empty_sweep_says_why(tmp_path: Path) -> None:
    text = words(report(tmp_path, [], record(ledgers=[])))
    assert "No cell was run. 36 combinations skipped" in text
    assert "verifies chains only" in text


def test_without_storeall_the_ratio_table_says_so(tmp_path: Path) -> None:
    text = words(report(tmp_path, sweep(methods=("treewy", "treelog"), loads=(8,))))
    assert "storeall was not run here, so there is nothing to compare with." in text


def test_several_groups_have_a_section_each(tmp_path: Path) -> None:
    rows = sweep(loads=(8,)) + sweep(loads=(8,), workload="sharegpt")
    html = report(tmp_path, rows)
    elements = Elements(html)
    assert [f"group-{n}" for n in (1, 2)] == [a["id"] for t, a in elements.tags if t == "section" and a.get("id")]
    assert "Qwen3.5-35B-A3B on H200, sharegpt, closed loop" in words(html)


def test_a_rate_sweep_is_labelled_in_requests_per_second(tmp_path: Path) -> None:
    text = words(report(tmp_path, rate_sweep()))
    assert "requests/s" in text
    assert "concurrent requests" not in text


def test_sources_of_step_costs_are_listed(full: str) -> None:
    text = words(full)
    assert "recurrent state (GDN)" in text
    for source in ("measured", "modelled", "extrapolated"):
        assert f'<span class="source {source}">' in full


def test_a_source_with_its_reason_in_one_text_is_split(tmp_path: Path) -> None:
    terms = [{"term": "state", "state_method": "treelog", "source": "modelled: bytes of the phases of treelog"}]
    html = report(tmp_path, sweep(loads=(8,)), record(step_cost=terms))
    assert '<span class="source modelled">modelled</span>' in html
    assert "bytes of the method&#39;s phases" in html


def test_a_source_of_all_models_is_one_row(tmp_path: Path) -> None:
    models = ("Qwen3.5-35B-A3B", "Qwen3.5-27B")
    terms = [{"term": "rows", "model": model, "source": "measured: tables"} for model in models]
    terms += [{"term": "state", "model": models[1], "source": "modelled: bytes"}]
    rows = [cell for model in models for cell in sweep(loads=(8,), model=model)]
    text = words(report(tmp_path, rows, record(step_cost=terms)))
    assert "projections, experts and norms all all measured tables" in text
    assert "recurrent state (GDN) Qwen3.5-27B all modelled bytes" in text


def test_the_scenario_is_printed_as_yaml_that_reads_back(full: str) -> None:
    import html as entities

    import yaml

    block = full.rsplit("<pre><code>", 1)[1].split("</code>")[0]
    assert yaml.safe_load(entities.unescape(block)) == record()["scenario"]


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sweep(loads=(8, 64)))
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert sorted(path.name for path in run.iterdir()) == ["report.html", "run.json", "summary.csv"]


def test_the_answer_is_short(full: str) -> None:
    text = words(full)
    answer = text[text.index("Answer") : text.index("Best configuration")]
    assert len(answer.split()) <= 120


def test_records_stand_beside_the_reduction_of_blocks(tmp_path: Path) -> None:
    rows = sweep(methods=("storeall", "treelog"), trees=("1,1,1",), budgets=(0.75,), loads=(8,))
    rows[0] |= {"peak_kv_gib": 6.5, "reserved_records_gib": 0.0}
    rows[1] |= {"peak_kv_gib": 3.0, "peak_running": 8, "reserved_records_gib": 32.0}  # 1 GiB of it in use
    html = report(tmp_path, rows)
    assert ">3.25x<" in html
    assert "<td>32.0</td>" in html
    assert "a method reserves its records beside it at start-up" in words(html)


def test_a_closed_loop_tells_what_becomes_of_its_first_burst(tmp_path: Path) -> None:
    burst = "In a closed loop all clients send their first request at once; p99 holds that burst."
    assert burst in words(report(tmp_path / "none", sweep(loads=(8, 64))))
    warm = words(report(tmp_path / "warm", sweep(loads=(8, 64), num_warmup_requests=32)))
    assert burst not in warm
    assert "The first 32 requests of a cell, the burst of all clients at the start among them, are left out of" in warm
    assert "At loads above 32 the rest of that burst is in p99." in warm
    assert "warm-up not counted" in warm
    assert "burst" not in words(report(tmp_path / "rate", rate_sweep()))


def test_saturated_cells_are_marked_and_a_batch_is_neither_good_nor_bad(tmp_path: Path) -> None:
    rows = rate_sweep(rates=(2, 40))
    html = report(tmp_path, rows)
    text = words(html)
    assert "memory, saturated" in text
    assert "nothing that was run keeps up" in text
    assert "Highest rate that is sustained" in text
    assert "closed loop" not in text
    body = html[html.index('data-for-budget="0.6" data-for-tree="1,1,1"') :]
    marks = re.findall(r'<td class="(better|worse|tie)">', body[: body.index("</tbody>")])
    assert marks[4::5] == ["tie"] * 4
    assert marks[12:15] == ["tie"] * 3  # latencies of saturated cells


def test_limits_are_drawn_per_method(full: str) -> None:
    data = json.loads(full.split('id="report-data">')[1].split("</script>")[0])
    limits = data["group-1"]["data"]["limits"]
    assert {row["state_method"] for row in limits} == {"storeall", "replayssm", "treewy", "treelog"}


def test_methods_are_explained_once(full: str) -> None:
    assert words(full).count(METHODS["treelog"].title) == 1
    assert f'title="{METHODS["treelog"].title}"' in full


def test_host_time_digest_and_defaults_are_told(full: str) -> None:
    text = words(full)
    assert '<span class="source fitted">fitted</span>' in full
    assert "h200 82f57a3c79069c52" in text
    assert "engine: enable chunked prefill yes" in text


def test_combinations_not_run_are_counted_once_and_name_their_model(tmp_path: Path) -> None:
    entry = record()["skipped"][0] | {"state_method": "recurrent", "tree": "chain:0"}
    rows = sweep(loads=(8,)) + sweep(loads=(8,), model="Qwen3.5-27B")
    text = words(report(tmp_path, rows, record(skipped=[entry, dict(entry)])))
    assert "1 combination skipped" in text
    assert "model state method tree memory budget load combinations reason" in text
    assert "Qwen3.5-35B-A3B recurrent none 0.6" in text


def test_a_trace_shorter_than_the_run_is_named(tmp_path: Path) -> None:
    trace = [{"trace": "mine.csv", "num_requests": 1000, "trace_rows": 400}]
    text = words(report(tmp_path, sweep(loads=(8,)), record(workload=trace)))
    assert "mine.csv has 400 rows for 1,000 requests: it is read 2.5 times over" in text


def test_every_state_method_has_its_own_colour_and_dash() -> None:
    assert set(METHOD_COLOURS) == set(METHOD_DASHES) == set(METHODS)
    assert len(set(METHOD_COLOURS.values())) == len(METHODS)
    assert len(set(map(tuple, METHOD_DASHES.values()))) == len(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_method_colours_stand_out_from_white(name: str) -> None:
    """WCAG asks for 3:1 between graphics and their ground."""
    channels = [int(METHOD_COLOURS[name][at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert 1.05 / (luminance + 0.05) >= 3
