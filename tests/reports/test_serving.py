"""Published serving results: which rows are usable, how they become levels, and that predictions stay near them."""

from __future__ import annotations

from typing import Any

import pytest

from reports import serving_causes
from reports.serving import GroupResult, Point, groups, halves, predict_all, summarise, worst
from reports.serving_causes import CHANGES
from reports.serving_levels import level_of_row
from reports.serving_rows import Row, load, sorted_rows, why_not
from simulator.calibration.fit import Fitted
from simulator.sglang.ledger import SglangLedger
from simulator.sglang.settings import SglangSettings

USABLE: dict[str, Row] = {row["id"]: row for row in sorted_rows().usable}


def test_every_row_is_usable_or_has_a_reason() -> None:
    rows = sorted_rows()
    assert len(rows.usable) + sum(count for _, count in rows.reasons) == rows.total == 181


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hybrid": 0}, "not a hybrid"),
        ({"gpu": "B300"}, "GPU without rates"),
        ({"quant": "NVFP4"}, "NVFP4"),
        ({"total_in": None, "isl": None}, "lengths"),
        ({"ttft_median": 0.0}, "contradict"),
        ({"request_rate": None, "max_concurrency": 512, "req_s": 1.0, "e2e_mean": 8000.0}, "contradict"),
    ],
)
def test_a_row_that_lacks_something_is_left_out(change: dict[str, Any], reason: str) -> None:
    row = USABLE["s013"]
    assert why_not(row) is None
    assert reason in (why_not({**row, **change}) or "")


def test_one_half_of_the_loads_is_fitted_and_no_load_is_in_both() -> None:
    for rows in groups().values():
        fitting, others = halves(rows)
        assert len(fitting) + len(others) == len(rows)
        assert others or len(rows) == 0
        assert not {load(row) for row in fitting} & {load(row) for row in others} or len(rows) > 2


def test_a_level_has_the_rows_lengths_and_load() -> None:
    level = level_of_row(USABLE["s013"])
    (block,) = list(level.blocks())
    assert len(block.prompt_tokens) == 1000
    assert block.prompt_tokens.mean() == pytest.approx(342.058, rel=0.01)
    assert block.output_tokens.mean() == pytest.approx(281.412, rel=0.01)
    assert block.arrival_s[-1] == pytest.approx(125.0)


def test_fixed_lengths_and_a_cap_on_clients() -> None:
    level = level_of_row(USABLE["s056"])
    (block,) = list(level.blocks())
    assert set(block.prompt_tokens.tolist()) == {8192}
    assert set(block.output_tokens.tolist()) == {1024}
    assert level.cell.scenario.workload.max_concurrency == 16
    assert level.cell.tree.num_drafts == 3


def sglang_ledger(row: str) -> SglangLedger:
    ledger = level_of_row(USABLE[row]).cell.ledger
    assert isinstance(ledger, SglangLedger)
    return ledger


def test_rows_of_sglang_run_on_its_model_with_its_own_defaults() -> None:
    plain, drafted, large = (sglang_ledger(row) for row in ("s099", "s056", "s285"))
    assert drafted.pools.max_running_requests <= 48 < plain.pools.max_running_requests
    assert plain.pools.by_state_cache
    assert plain.layout.slots_reserved == drafted.layout.slots_reserved == 5  # radix cache, extra buffer, overlap
    assert plain.settings.chunked_prefill_size == 8192  # H200
    assert large.settings.chunked_prefill_size == 16384  # B200


def test_no_row_of_sglang_runs_on_vllms_model() -> None:
    rows = [row for row in USABLE.values() if row["engine"] == "SGLang"]
    assert all(isinstance(level_of_row(row).cell.ledger, SglangLedger) for row in rows)


def test_an_sglang_row_without_a_radix_cache_reserves_one_slot() -> None:
    row = {**USABLE["s099"], "prefix_cache": 0}
    settings = level_of_row(row).cell.scenario.engine
    assert isinstance(settings, SglangSettings)
    assert settings.mamba_radix_cache_strategy == "none"


def test_vllm_rows_that_ran_with_prefix_caching_have_it() -> None:
    cached, plain = (level_of_row(USABLE[row]).cell.engine for row in ("s035", "s139"))
    assert cached.enable_prefix_caching
    assert not plain.enable_prefix_caching


def test_what_is_changed_to_isolate_a_cause_is_one_setting_of_a_predicted_row() -> None:
    predicted = {row["id"] for rows in groups().values() for row in halves(rows)[1]}
    for row, _, settings, constants in CHANGES:
        assert row in predicted
        assert len(settings) + len(constants) == 1


def test_fewer_running_requests_wait_longer_and_decode_faster() -> None:
    group = ("SGLang", "Qwen3.5-122B-A10B", "B200")
    constants = tuple(Fitted(name, value, value, value, value) for name, value in (("acceptance", 0.88),))
    results = [GroupResult(group, (), ("s262",), constants, ())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_causes, "CHANGES", [each for each in CHANGES if each[0] == "s262"])
        (found,) = serving_causes.what_ifs(results)
    assert found.changed[0] > 2 * found.predicted[0]
    assert found.changed[1] < found.predicted[1]


def point(metric: str, measured: float, predicted: float) -> Point:
    return Point("r", ("e", "m", "g"), "1", "", metric, measured, predicted, False)


def test_summaries_are_of_absolute_errors() -> None:
    (found,) = summarise([point("tpot", 10.0, 9.0), point("tpot", 10.0, 12.0), point("tpot", 10.0, 10.5)])
    assert found.median == pytest.approx(0.1)
    assert found.within_target == pytest.approx(2 / 3)
    assert found.met


def test_the_worst_is_the_farthest_by_factor() -> None:
    assert worst([point("ttft", 10.0, 19.0), point("ttft", 10.0, 5.0)], 1)[0].predicted == 5.0


@pytest.mark.slow
def test_a_group_is_predicted_from_half_of_its_loads() -> None:
    # 35B on one H200, SGLang: fitted at 1 and 1024 clients, predicted at 16
    (result,) = predict_all(1, only=[("SGLang", "Qwen3.5-35B-A3B", "H200")])
    found = {item.metric: abs(item.relative) for item in result.points}
    assert found["output_throughput"] < 0.2
    assert found["tpot"] < 0.2
    assert found["ttft"] < 0.3
