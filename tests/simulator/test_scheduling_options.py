"""Options of the scheduler: priorities, turns, asynchronous scheduling, watermark, the gate on whole prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factory import chain_acceptance, requests, run, small
from workloads import csv_file, workload

from lab.errors import InfeasibleError, UsageError
from simulator.check import check
from simulator.requests import Turns
from simulator.scenario import Scenario
from simulator.workload import request_blocks


def by_id(kept: dict[str, Any]) -> Any:
    return kept["requests"][np.argsort(kept["requests"]["request_id"])]


def test_a_lower_priority_number_is_admitted_first() -> None:
    (block,) = requests([10] * 4, [8] * 4)
    block = block._replace(priority=np.array([2, 1, 0, 1], np.int32))
    _, kept = run(small(max_num_seqs=1, priority_policy=True), iter([block]))
    assert np.argsort(by_id(kept)["scheduled_s"]).tolist() == [2, 1, 3, 0]
    _, kept = run(small(max_num_seqs=1), iter([block]))
    assert np.argsort(by_id(kept)["scheduled_s"]).tolist() == [0, 1, 2, 3]


def test_the_request_of_least_precedence_is_preempted() -> None:
    (block,) = requests([30, 30], [80, 80])
    block = block._replace(priority=np.array([1, 0], np.int32))
    config = small(num_blocks=9, max_model_len=112, priority_policy=True)
    _, kept = run(config, iter([block]))
    assert by_id(kept)["num_preemptions"].tolist() == [1, 0]


def test_a_turn_is_sent_after_the_reply_and_the_time_to_think() -> None:
    (block,) = requests([10, 10, 10], [5, 5, 5])
    block = block._replace(turns=Turns(np.array([-1, 0, 1], np.int32), 0.25))
    _, kept = run(small(), iter([block]), max_concurrency=1)
    done = by_id(kept)
    assert done["arrival_s"][1:] == pytest.approx(done["last_token_s"][:-1] + 0.25)
    assert (done["scheduled_s"] == done["arrival_s"]).all()


def test_asynchronous_scheduling_hides_host_time_and_holds_a_finished_request_one_step_longer() -> None:
    # 1 ms of host time and 10 µs of rows a step: together without, the larger of the two with.
    _, plain = run(small(), requests([10], [3]))
    _, ahead = run(small(async_scheduling=True), requests([10], [3]))
    assert plain["steps"]["duration_us"].tolist() == [1010.0, 1001.0, 1001.0]
    assert ahead["steps"]["duration_us"].tolist() == [1000.0, 1000.0, 1000.0]
    assert ahead["steps"]["host_us"].tolist() == [990.0, 999.0, 999.0]
    assert ahead["requests"]["last_token_s"] == pytest.approx(3e-3)
    _, ahead = run(small(async_scheduling=True), requests([10, 10], [3, 5]))
    assert ahead["steps"]["running"].tolist() == [2, 2, 2, 2, 1]
    assert ahead["steps"]["decoding"].tolist() == [0, 2, 2, 1, 1]


def test_a_request_that_accepted_drafts_end_early_is_verified_once_more() -> None:
    sure = chain_acceptance(1.0, 1.0, 1.0)
    for output, rounds in ((5, 2), (6, 2), (2, 1)):  # 1 + 4; 1 + 4 + 1 foreseen; 1 + 1 foreseen
        _, kept = run(small(rows=4, async_scheduling=True), requests([10], [output]), sure)
        assert kept["requests"]["verify_rounds"].tolist() == [rounds - (output == 5)]
        assert kept["steps"]["decoding"].tolist() == [0] + [1] * rounds


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_one_client_sends_its_next_request_when_the_last_is_answered(ahead: bool, rows: int) -> None:
    config = small(async_scheduling=ahead, rows=rows)
    acceptance = chain_acceptance(0.9, 0.8, 0.7) if rows > 1 else None
    _, kept = run(config, requests([10] * 4, [3, 9, 1, 6]), acceptance, max_concurrency=1)
    done = by_id(kept)
    assert done["arrival_s"][1:].tolist() == done["last_token_s"][:-1].tolist()


def test_with_asynchronous_scheduling_a_new_request_misses_the_step_that_is_scheduled_already() -> None:
    _, kept = run(small(async_scheduling=True), requests([10, 10], [9, 1], [0.0, 0.0005]))
    assert by_id(kept)["scheduled_s"][1] == pytest.approx(2e-3)
    _, kept = run(small(), requests([10, 10], [9, 1], [0.0, 0.0005]))
    assert by_id(kept)["scheduled_s"][1] == pytest.approx(1.01e-3)


def test_the_watermark_keeps_blocks_free_at_admission() -> None:
    # Two prompts need 2 + 3 blocks each, of 10: they run together unless one block must stay free.
    for watermark, together in ((0, 2), (1, 1)):
        config = small(num_blocks=10, watermark_blocks=watermark, max_model_len=128)
        _, kept = run(config, requests([40, 40], [4, 4]))
        assert kept["steps"]["running"].max() == together


def test_without_the_gate_a_prompt_is_admitted_for_its_first_chunk() -> None:
    prompts = requests([60, 120], [60, 2])
    gated, _ = run(small(num_blocks=13, max_model_len=128), prompts)
    prompts = requests([60, 120], [60, 2])
    loose, _ = run(small(num_blocks=13, max_model_len=128, reserve_full_isl=False), prompts)
    assert gated.state["num_preemptions"] == 0
    assert loose.state["num_preemptions"] > 0


def scenario(**engine: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "model": "Qwen3.5-35B-A3B",
            "engine": {"enable_prefix_caching": True, **engine},
            "speculation": {"state_method": "storeall"},
            "workload": {"lengths": "fixed:300/40", "max_concurrency": 4, "num_requests": 8},
        }
    )


@pytest.mark.parametrize("field", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_prefix_caching_needs_steps_of_a_block_and_says_how_long_one_is(field: str) -> None:
    with pytest.raises(InfeasibleError, match=rf"{field} = 1071 is below the block of 1072 tokens.*at least 1072"):
        check(scenario(**{field: 1071}))
    check(scenario(**{field: 1072}))


def test_prefix_caching_needs_chunked_prefill() -> None:
    with pytest.raises(UsageError, match="needs enable_chunked_prefill: true"):
        check(scenario(enable_chunked_prefill=False, max_num_batched_tokens=32768))


def test_reserved_speculative_blocks_change_the_ledger_and_name_a_viable_number() -> None:
    # vLLM pull 57261: concurrency (N - max_num_seqs * G * k) / (blocks per request - G * k)
    cell = check(scenario(num_gpu_blocks_override=873, max_num_seqs=8, reserve_speculative_blocks=True))
    plain = check(scenario(num_gpu_blocks_override=873, max_num_seqs=8))
    assert cell.ledger.blocks_per_request == plain.ledger.blocks_per_request - 9
    assert cell.ledger.max_concurrency == pytest.approx((873 - 8 * 9) / (plain.ledger.blocks_per_request - 9))
    assert cell.ledger.usable_blocks == 872 - 72
    with pytest.raises(InfeasibleError, match="the largest viable max_num_seqs is 92"):
        check(scenario(num_gpu_blocks_override=873, max_num_seqs=93, reserve_speculative_blocks=True))
    check(scenario(num_gpu_blocks_override=873, max_num_seqs=92, reserve_speculative_blocks=True))


def test_priorities_and_conversations_come_from_a_trace(tmp_path: Any) -> None:
    text = "input_tokens,output_tokens,conversation,priority\n10,5,a,1\n20,5,b,0\n30,5,a,1\n"
    load = workload(trace=csv_file(tmp_path, text), num_requests=5)
    (block,) = request_blocks(load, 0)
    assert block.prompt_tokens.tolist() == [10, 30, 20, 10, 30]  # turns together, then the trace again
    assert block.turns is not None
    assert block.turns.after.tolist() == [-1, 0, -1, -1, 3]
    assert block.priority is not None
    assert block.priority.tolist() == [1, 1, 0, 1, 1]
    assert block.prefix is not None
    assert block.prefix.stream.tolist() == [0, 0, 1, 2, 2]


def test_priority_classes_are_drawn_by_their_shares_whatever_the_block() -> None:
    load = workload(num_requests=4000, priority_classes={0: 1, 5: 3})
    drawn = [np.concatenate([b.priority for b in request_blocks(load, 0, block)]) for block in (4096, 7)]
    assert np.array_equal(drawn[0], drawn[1])
    assert (drawn[0] == 5).mean() == pytest.approx(0.75, abs=0.03)
    assert set(drawn[0]) == {0, 5}


@pytest.mark.parametrize(("column", "value"), [("hash_ids", "1 x"), ("priority", "0.5"), ("priority", "2000")])
def test_a_bad_column_of_a_trace_is_named(tmp_path: Any, column: str, value: str) -> None:
    path = csv_file(tmp_path, f"input_tokens,output_tokens,{column}\n10,5,1\n10,5,{value}\n")
    with pytest.raises(UsageError, match=rf"column {column}, row 2: '{value}' is not"):
        list(request_blocks(workload(trace=path, num_requests=2), 0))


def test_prompts_need_as_many_units_as_their_tokens_fill(tmp_path: Any) -> None:
    path = csv_file(tmp_path, "input_tokens,output_tokens,hash_ids\n1000,5,1 2\n1100,5,1 2\n")
    with pytest.raises(UsageError, match=r"row 2: 2 hash_ids for 1100 tokens; units .* = 512 tokens need 3"):
        list(request_blocks(workload(trace=path, num_requests=2), 0))


def test_no_priority_class_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="priority_classes"):
        workload(num_requests=2, priority_classes={})
