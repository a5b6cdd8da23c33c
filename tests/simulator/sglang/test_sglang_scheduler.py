"""SGLang's scheduler: one fact of the engine's behaviour per test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factory import chain_acceptance, requests, run
from sglang_factory import small_sglang

from simulator.engine import Engine


def by_id(kept: dict[str, Any]) -> Any:
    return kept["requests"][np.argsort(kept["requests"]["request_id"])]


def test_a_prompt_has_a_step_of_its_own_and_the_running_requests_wait_for_it() -> None:
    _, kept = run(small_sglang(), requests([10, 10], [9, 3], [0.0, 0.004]))
    prompts = kept["steps"]["prefill_tokens"] > 0
    assert prompts.sum() == 2
    assert (kept["steps"]["decoding"][prompts] == 0).all()


def test_with_mixed_chunks_the_running_requests_ride_along() -> None:
    _, kept = run(small_sglang(sglang={"mixed_chunk": True}), requests([10, 10], [9, 3], [0.0, 0.004]))
    prompts = kept["steps"][kept["steps"]["prefill_tokens"] > 0]
    assert prompts["decoding"].tolist() == [0, 1]
    assert len(kept["steps"]) == 9


def test_prompts_share_a_batch_up_to_the_chunk_and_the_last_is_cut() -> None:
    _, kept = run(small_sglang(), requests([50, 40, 30], [2] * 3))
    assert kept["steps"]["prefill_tokens"].tolist() == [64, 56, 0]
    assert kept["steps"]["running"].tolist() == [2, 3, 3]


def test_a_cut_falls_on_the_end_of_a_page() -> None:
    _, kept = run(small_sglang(page_size=16), requests([50, 40], [2, 2]))
    # 50 tokens take four pages of the chunk's four, so that the second prompt waits for the next step
    assert kept["steps"]["prefill_tokens"].tolist()[:2] == [50, 40]


def test_without_chunks_a_batch_holds_whole_prompts_below_max_prefill_tokens() -> None:
    config = small_sglang(sglang={"chunked_prefill_size": 0}, max_num_batched_tokens=256)
    _, kept = run(config, requests([100, 20, 20, 150], [1] * 4))
    assert kept["steps"]["prefill_tokens"].tolist() == [120, 20, 150]


def test_a_prompt_is_admitted_when_it_fits_beside_what_the_others_are_expected_to_emit() -> None:
    """After one decode step the first holds 101 tokens and may emit 49 more of its 51, of which 0.7 (less one step of
    decay) count: of 200 tokens 64.8 are left for the second's prompt, its 5 outputs and a page, so 58 fit."""

    def waits(prompt: int) -> bool:
        _, kept = run(small_sglang(tokens=200), requests([100, prompt], [51, 5], [0.0, 0.0012]))
        return bool(by_id(kept)["scheduled_s"][1] > 0.003)

    assert [prompt for prompt in range(50, 70) if waits(prompt)] == list(range(59, 70))


def test_clients_that_ask_for_more_than_they_get_are_admitted_later() -> None:
    def running(max_new_tokens: int) -> int:
        config = small_sglang(tokens=600, max_num_seqs=8, sglang={"max_new_tokens": max_new_tokens})
        return int(run(config, requests([20] * 8, [20] * 8))[1]["steps"]["running"].max())

    assert (running(0), running(200)) == (8, 2)


def staggered(prompts: list[int], outputs: list[int]) -> Any:
    """Requests that come 3 ms apart, so that each finds the earlier ones running."""
    return requests(prompts, outputs, [0.003 * turn for turn in range(len(prompts))])


def test_a_conservative_scheduler_admits_later_and_retracts_less() -> None:
    def retracted(conservativeness: float) -> int:
        config = small_sglang(tokens=260, max_num_seqs=8, sglang={"schedule_conservativeness": conservativeness})
        engine, kept = run(config, staggered([20] * 20, [60] * 20))
        assert len(kept["requests"]) == 20
        return int(engine.state["num_preemptions"])

    assert retracted(0.1) > retracted(1.4)


def test_the_ratio_decays_to_its_floor_and_a_retraction_raises_it() -> None:
    ratios: list[float] = []
    retractions: list[int] = []

    def look(engine: Engine, step: Any) -> None:
        ratios.append(float(engine.queues.sglang[0]["new_token_ratio"]))
        retractions.append(int(step["preempted"]))

    run(small_sglang(tokens=4000, max_model_len=2000), requests([10], [900]), after_step=look)
    assert ratios[0] == 0.7
    assert ratios[100] == pytest.approx(0.7 - 100 * 0.7 * 0.86 / 600)
    assert ratios[-1] == pytest.approx(0.7 * 0.14)
    ratios.clear()
    retractions.clear()
    bold = {"schedule_conservativeness": 0.1}
    run(small_sglang(tokens=260, max_num_seqs=8, sglang=bold), staggered([20] * 8, [60] * 8), after_step=look)
    first = int(np.argmax(np.array(retractions) > 0))
    assert retractions[first] > 0
    assert ratios[first] > 5 * ratios[first - 1]


def test_without_drafts_who_has_emitted_least_is_retracted() -> None:
    # The two later ones come together and have emitted as much as each other: the longer prompt goes.
    config = small_sglang(tokens=150, sglang={"schedule_conservativeness": 0.01})
    _, kept = run(config, requests([10, 20, 10], [90, 45, 45], [0.0, 0.004, 0.004]))
    assert by_id(kept)["num_preemptions"].tolist() == [0, 1, 0]


def test_with_drafts_the_last_is_retracted() -> None:
    config = small_sglang(tokens=150, rows=2, sglang={"schedule_conservativeness": 0.01})
    _, kept = run(config, requests([10, 20, 10], [90, 45, 45], [0.0, 0.004, 0.004]), chain_acceptance(0.0))
    assert by_id(kept)["num_preemptions"].tolist() == [0, 0, 1]


def test_a_retracted_request_is_recomputed_with_what_it_had_emitted() -> None:
    config = small_sglang(tokens=120, sglang={"schedule_conservativeness": 0.01})
    _, kept = run(config, staggered([10, 10], [100, 80]))
    assert by_id(kept)["num_preemptions"].tolist() == [0, 1]
    again = kept["steps"]["prefill_tokens"][kept["steps"]["prefill_tokens"] > 0][-1]
    assert again > 50


def test_a_retracted_request_goes_to_the_end_of_the_queue() -> None:
    config = small_sglang(tokens=130, max_num_seqs=2, sglang={"schedule_conservativeness": 0.01})
    _, kept = run(config, staggered([10, 10, 10], [100, 80, 20]))
    done = by_id(kept)
    assert done["num_preemptions"].tolist() == [0, 1, 0]
    assert done["last_token_s"][2] < done["last_token_s"][1]


def test_what_keeps_requests_waiting_is_counted() -> None:
    by_seqs, _ = run(small_sglang(max_num_seqs=1), requests([10] * 3, [9] * 3))
    assert by_seqs.state["seqs_limited_steps"] > 10
    by_states, _ = run(small_sglang(max_num_seqs=1, sglang={"state_capped": True}), requests([10] * 3, [9] * 3))
    assert (by_states.state["seqs_limited_steps"], by_states.state["memory_limited_steps"] > 10) == (0, True)
    by_tokens, _ = run(small_sglang(tokens=100), requests([60] * 3, [20] * 3))
    assert by_tokens.state["memory_limited_steps"] > 10
    by_budget, _ = run(small_sglang(), requests([64] * 4, [1] * 4))
    assert by_budget.state["budget_limited_steps"] == 3


def test_overlap_hides_the_shorter_of_host_and_gpu_time() -> None:
    # 1 ms of host time; a step of R rows takes R us on the GPU
    def durations(overlap: bool, prompt: int) -> Any:
        config = small_sglang(
            tokens=9000, max_model_len=4000, max_num_batched_tokens=4000,
            sglang={"overlap_schedule": overlap, "chunked_prefill_size": 4000, "max_prefill_tokens": 4000},
        )  # fmt: skip
        _, kept = run(config, requests([prompt], [2]))
        steps = kept["steps"]
        assert steps["duration_us"] == pytest.approx(steps["rows_us"] + steps["host_us"])
        return steps["duration_us"]

    assert durations(False, 3000).tolist() == pytest.approx([4000, 1001])
    assert durations(True, 3000).tolist() == pytest.approx([3000, 1000])


@pytest.mark.parametrize("option", ["prefix_caching", "priority_policy", "async_scheduling"])
def test_options_of_vllm_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"options of vLLM's scheduler"):
        small_sglang(**{option: True})
