"""The scheduler: one fact of the engine's behaviour per test, then its invariants on random histories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factory import chain_acceptance, no_drafts, requests, run, small
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import Engine, EngineConfig


def test_one_request_takes_a_step_for_its_prompt_and_one_per_further_token() -> None:
    engine, kept = run(small(), requests([10], [5]))
    assert len(kept["steps"]) == 5
    assert kept["steps"]["prefill_tokens"].tolist() == [10, 0, 0, 0, 0]
    assert kept["requests"]["first_token_s"][0] == pytest.approx(1.010e-3)
    assert engine.state["num_finished"] == 1


def test_a_long_prompt_is_cut_by_the_token_budget() -> None:
    _, kept = run(small(), requests([150], [1]))
    assert kept["steps"]["prefill_tokens"].tolist() == [64, 64, 22]


def test_the_long_prefill_threshold_cuts_a_prompt_further() -> None:
    _, kept = run(small(long_prefill_token_threshold=50), requests([150], [1]))
    assert kept["steps"]["prefill_tokens"].tolist() == [50, 50, 50]


def test_drafts_count_against_the_budget() -> None:
    # Four requests decode 8 rows each: 32 of 40 tokens; a prompt of 30 gets the other 8.
    config = small(rows=8, max_num_seqs=5, max_num_batched_tokens=40, num_blocks=200)
    _, kept = run(config, requests([8, 8, 8, 8, 30], [40] * 5), chain_acceptance(*[0.0] * 7))
    mixed = [step for step in kept["steps"] if step["decoding"] == 4 and step["prefill_tokens"]]
    assert mixed[0]["prefill_tokens"] == 8


def test_drafts_that_are_surely_accepted_multiply_the_tokens() -> None:
    _, kept = run(small(rows=4), requests([10], [9]), chain_acceptance(1.0, 1.0, 1.0))
    assert kept["steps"]["emitted_tokens"].tolist() == [1, 4, 4]
    assert kept["requests"]["accepted_tokens"][0] == 6


def test_a_request_ends_exactly_at_its_output_length() -> None:
    _, kept = run(small(rows=4), requests([10], [7]), chain_acceptance(1.0, 1.0, 1.0))
    assert kept["steps"]["emitted_tokens"].tolist() == [1, 4, 2]


def test_running_requests_come_first_and_admission_is_in_order_of_arrival() -> None:
    _, kept = run(small(max_num_seqs=2), requests([10, 10, 10], [4, 8, 4]))
    by_id = kept["requests"][np.argsort(kept["requests"]["request_id"])]
    assert (np.diff(by_id["scheduled_s"]) >= 0).all()
    assert by_id["scheduled_s"][2] == by_id["last_token_s"][0]


def test_a_prompt_is_admitted_only_when_all_of_it_fits_and_blocks_those_behind_it() -> None:
    # 30 blocks: the first request holds 2 + 8; a prompt of 250 needs 18; the small one must wait its turn.
    _, kept = run(small(num_blocks=30), requests([120, 250, 250, 5], [30, 3, 3, 3]))
    by_id = kept["requests"][np.argsort(kept["requests"]["request_id"])]
    assert by_id["scheduled_s"][3] >= by_id["scheduled_s"][2]
    assert by_id["scheduled_s"][2] >= by_id["last_token_s"][1]
    assert by_id["num_preemptions"].sum() == 0


def test_when_blocks_run_out_the_last_request_is_recomputed() -> None:
    # Two requests of 2 + 2 blocks in a pool of 9 grow past it; the younger one is preempted and finishes later.
    engine, kept = run(small(num_blocks=9, max_model_len=112), requests([30, 30], [80, 80]))
    by_id = kept["requests"][np.argsort(kept["requests"]["request_id"])]
    assert by_id["num_preemptions"].tolist() == [0, 1]
    assert engine.state["num_preemptions"] == 1
    again = [step for step in kept["steps"] if step["prefill_tokens"] > 0][-1]
    assert again["prefill_tokens"] > 30  # prompt and what had been emitted


def test_no_request_is_admitted_in_a_step_that_preempted() -> None:
    _, kept = run(small(num_blocks=12, max_num_seqs=3, max_model_len=160), requests([30] * 8, [100] * 8))
    preempting = kept["steps"][kept["steps"]["preempted"] > 0]
    assert len(preempting)
    assert (preempting["prefill_tokens"] == 0).all()


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room_for_all_of_it() -> None:
    config = small(chunked_prefill=False, long_prefill_token_threshold=16)
    _, kept = run(config, requests([60, 60], [3, 3]))
    assert kept["steps"]["prefill_tokens"].tolist() == [60, 60, 0, 0]


def test_without_chunked_prefill_a_preempted_request_is_recomputed_whole() -> None:
    config = small(chunked_prefill=False, num_blocks=12, max_num_seqs=3, max_model_len=160, max_num_batched_tokens=160)
    _, kept = run(config, requests([30] * 4, [100] * 4))
    assert kept["requests"]["num_preemptions"].sum() > 0
    assert len(kept["requests"]) == 4


def test_an_engine_that_can_schedule_nothing_says_so_instead_of_running_for_ever() -> None:
    with pytest.raises(RuntimeError, match="could schedule nothing"):
        run(small(chunked_prefill=False), requests([150], [1]))


def test_a_recomputed_request_verifies_no_drafts_before_it_emits() -> None:
    # The recomputation is cut so that all but one token are computed: that last step is still a prompt step.
    config = small(rows=4, num_blocks=9, max_model_len=112, long_prefill_token_threshold=7)
    _, kept = run(config, requests([30, 30], [80, 80]), chain_acceptance(0.0, 0.0, 0.0))
    assert kept["requests"]["num_preemptions"].sum() > 0
    assert (kept["steps"]["decoding"] + (kept["steps"]["prefill_tokens"] > 0) <= 2).all()
    assert kept["requests"]["verify_rounds"].sum() < kept["steps"]["emitted_tokens"].sum()


def test_rows_never_pass_max_model_len() -> None:
    config = small(rows=8, max_model_len=32, num_blocks=8)
    engine, kept = run(config, requests([20], [12]), chain_acceptance(*[0.0] * 7))
    assert kept["steps"]["used_blocks"].max() == 2 + 2
    assert engine.state["num_finished"] == 1


def test_what_keeps_requests_waiting_is_counted() -> None:
    by_memory, _ = run(small(num_blocks=12, max_model_len=160), requests([60] * 4, [20] * 4))
    assert by_memory.state["memory_limited_steps"] > 0
    by_seqs, _ = run(small(max_num_seqs=1), requests([10] * 3, [9] * 3))
    assert by_seqs.state["seqs_limited_steps"] > 10
    by_budget, _ = run(small(num_blocks=90), requests([64] * 4, [1] * 4))
    assert by_budget.state["budget_limited_steps"] == 3
    free, _ = run(small(), requests([10], [9]))
    assert sum(int(free.state[f"{name}_limited_steps"]) for name in ("memory", "seqs", "budget")) == 0


def test_all_requests_of_a_burst_wait_at_the_server_however_they_are_handed_over() -> None:
    def blocks() -> Any:
        for _ in range(5):
            yield from requests([10] * 20, [2] * 20)

    _, kept = run(small(), blocks())
    assert kept["steps"]["waiting"][0] == 96


def test_the_clients_cap_limits_requests_in_flight_and_dates_the_send() -> None:
    _, kept = run(small(), requests([10] * 6, [4] * 6), max_concurrency=2)
    assert kept["steps"]["running"].max() == 2
    assert kept["steps"]["waiting"].max() == 0
    sends = np.sort(kept["requests"]["arrival_s"])
    assert (sends[:2] == 0).all()
    assert set(sends[2:]) <= set(kept["requests"]["last_token_s"])


def test_a_late_arrival_keeps_its_own_time_when_a_permit_is_free() -> None:
    _, kept = run(small(), requests([10, 10], [50, 4], [0.0, 0.0125]), max_concurrency=2)
    by_id = kept["requests"][np.argsort(kept["requests"]["request_id"])]
    assert by_id["arrival_s"][1] == 0.0125
    assert by_id["scheduled_s"][1] > 0.0125


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    _, kept = run(small(), requests([10, 10], [2, 2], [1.0, 7.5]))
    assert kept["requests"]["scheduled_s"].tolist() == [1.0, 7.5]


@st.composite
def histories(draw: st.DrawFn) -> tuple[EngineConfig, list[int], list[int], list[float], int | None]:
    """Any workload on any engine whose pool fits one request, down to the smallest."""
    rows = draw(st.sampled_from([1, 2, 4, 8]))
    states = draw(st.integers(1, 6))
    groups = draw(st.integers(1, 2))
    block = draw(st.sampled_from([4, 16]))
    longest = 96
    whole_prompts = draw(st.booleans())
    smallest = groups * -(-longest // block) + states
    config = small(
        rows=rows,
        state_blocks=states,
        attention_groups=groups,
        block_size_tokens=block,
        max_model_len=longest,
        num_blocks=smallest + draw(st.integers(0, 40)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=96 if whole_prompts else draw(st.integers(8, 80)),
        chunked_prefill=not whole_prompts,
        long_prefill_token_threshold=draw(st.sampled_from([0, 7])),
        seed=draw(st.integers(0, 9)),
    )
    count = draw(st.integers(1, 12))
    prompts = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 36), min_size=count, max_size=count))
    arrivals = np.cumsum(draw(st.lists(st.floats(0, 0.02), min_size=count, max_size=count))).tolist()
    return config, prompts, outputs, arrivals, draw(st.sampled_from([None, 1, 3]))


def check_step(engine: Engine, step: Any, clock: list[float]) -> None:
    """INV-3 memory conserved, INV-4 requests conserved, INV-5 the clock never goes back."""
    state, queues, config = engine.state, engine.queues, engine.config
    running = queues.slots[queues.running[: state["num_running"]]]
    held = int(running["blocks"].sum())
    assert state["free_blocks"] + held == config.num_blocks
    assert state["free_blocks"] >= 0
    ring = (state["waiting_head"] + np.arange(state["num_waiting"])) % len(queues.waiting)
    waiting = queues.slots[queues.waiting[ring]]
    assert not waiting["blocks"].any()
    assert not waiting["computed"].any()
    assert state["num_arrived"] == state["num_finished"] + state["num_running"] + state["num_waiting"]
    assert len(set(running["request_id"]) | set(waiting["request_id"])) == len(running) + len(waiting)
    assert state["num_running"] <= config.max_num_seqs
    assert step["prefill_tokens"] + step["decoding"] <= config.max_num_batched_tokens
    assert step["start_s"] >= clock[-1]
    clock.append(float(state["now_s"]))


@settings(max_examples=300, deadline=None)
@given(histories())
def test_inv_3_4_5_memory_and_requests_are_conserved_and_time_goes_forward(history: Any) -> None:
    config, prompts, outputs, arrivals, cap = history
    survival = np.cumprod(np.full(config.rows - 1, 0.8))
    acceptance = chain_acceptance(*survival) if config.rows > 1 else no_drafts()
    clock = [0.0]
    engine, kept = run(
        config, requests(prompts, outputs, arrivals), acceptance, cap, lambda e, step: check_step(e, step, clock)
    )
    done = kept["requests"][np.argsort(kept["requests"]["request_id"])]
    assert engine.state["free_blocks"] == config.num_blocks
    assert done["request_id"].tolist() == list(range(len(prompts)))
    assert done["output_tokens"].tolist() == outputs
    assert kept["steps"]["emitted_tokens"].sum() == sum(outputs)
    assert (done["arrival_s"] >= np.array(arrivals)).all()
    assert (done["arrival_s"] <= done["scheduled_s"]).all()
    assert (done["scheduled_s"] < done["first_token_s"]).all()
    assert (done["first_token_s"] <= done["last_token_s"]).all()


@settings(max_examples=50, deadline=None)
@given(histories())
def test_inv_6_one_seed_gives_one_result(history: Any) -> None:
    config, prompts, outputs, arrivals, cap = history
    survival = np.cumprod(np.full(max(config.rows - 1, 1), 0.6))
    acceptance = chain_acceptance(*survival[: config.rows - 1])
    results = [run(config, requests(prompts, outputs, arrivals), acceptance, cap)[1] for _ in range(2)]
    assert results[0].keys() == results[1].keys()
    for kind in results[0]:
        assert np.array_equal(results[0][kind], results[1][kind])


def test_inv_6_another_seed_gives_other_acceptances() -> None:
    survival = np.cumprod(np.full(3, 0.6))
    rounds = [
        run(small(rows=4, seed=seed), requests([10] * 4, [200] * 4), chain_acceptance(*survival))[1]["requests"][
            "verify_rounds"
        ].tolist()
        for seed in (1, 2)
    ]
    assert rounds[0] != rounds[1]
