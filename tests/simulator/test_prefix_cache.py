"""Prefix caching in cache mode align: what is hit, what is held, what is left, what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import simpy
from factory import chain_acceptance, constant_cost, no_drafts, requests, run, small
from harness import History, check_end
from histories import HARNESSES

from simulator.blockkeys import block_keys
from simulator.engine import Client, Engine, EngineConfig
from simulator.requests import PrefixIds, RequestBlock
from simulator.settings import WorkloadSettings
from simulator.workload import request_blocks


def caching(rows: int = 1, speculative: int = 0, groups: int = 2, **changes: Any) -> EngineConfig:
    """A small engine with prefix caching and `groups` groups of states, in a pool of 200 blocks of 16 tokens."""
    values: dict[str, Any] = {
        "rows": rows,
        "prefix_caching": True,
        "state_groups": groups,
        "speculative_blocks": speculative,
        "state_blocks": groups * (2 + speculative),
        "num_blocks": 200,
    }
    return small(**(values | changes))


def turns(
    prompts: list[int], outputs: list[int], arrivals: list[float] | None = None, stream: list[int] | None = None
) -> Iterator[RequestBlock]:
    """Requests of one conversation (unless `stream` says otherwise), a second apart."""
    times = np.arange(len(prompts)) * 1.0 if arrivals is None else np.array(arrivals)
    prefix = PrefixIds.streams(np.array(stream or [0] * len(prompts), np.int64))
    (block,) = requests(prompts, outputs)
    return iter([block._replace(arrival_s=times, prefix=prefix)])


def hits(kept: dict[str, Any]) -> list[int]:
    """Cached tokens of every request, in their order."""
    return list(kept["requests"][np.argsort(kept["requests"]["request_id"])]["cached_tokens"])


def test_a_turn_hits_whole_blocks_of_the_history_replies_included() -> None:
    # 50 + 40 tokens, of which the last is never computed: 5 blocks of 16; then 140 tokens: 8 blocks.
    engine, kept = run(caching(), turns([50, 100, 180], [40, 40, 40]))
    assert hits(kept) == [0, 80, 128]
    assert engine.state["prefix_cache_queries"] == 330
    assert engine.state["prefix_cache_hits"] == 208


def test_with_drafts_the_last_matching_block_is_computed_again() -> None:
    acceptance = chain_acceptance(0.8, 0.6, 0.4)
    _, kept = run(caching(rows=4, speculative=3), turns([50, 100, 180], [40, 40, 40]), acceptance)
    assert hits(kept) == [0, 64, 112]


def test_a_prompt_keeps_the_states_at_its_chunks_ends_alone() -> None:
    # 100 tokens in chunks of 48, 48 and 4: states at 48 and 96; a fork after 90 tokens finds only the first.
    keys_differ = caching(max_num_batched_tokens=60)
    prefix = PrefixIds(0, np.array([-1, -1]), 10, np.array([0, 10, 20]), np.r_[0:10, 0:9, 99].astype(np.int64))
    (block,) = requests([100, 100], [1, 1], [0.0, 1.0])
    _, kept = run(keys_differ, iter([block._replace(prefix=prefix)]))
    assert kept["steps"]["prefill_tokens"].tolist() == [48, 48, 4, 48, 4]
    assert hits(kept) == [0, 48]


def test_two_equal_prompts_at_once_the_second_waits_a_step_and_hits() -> None:
    engine, kept = run(caching(), turns([40, 40], [3, 3], [0.0, 0.0]))
    assert engine.state["deferred_steps"] == 1
    assert hits(kept) == [0, 32]
    assert kept["steps"]["prefill_tokens"].tolist()[:3] == [32, 8 + 8, 0]


def test_retention_interval_0_keeps_only_the_state_at_the_end_of_the_prompt() -> None:
    _, kept = run(caching(retention_blocks=0), turns([50, 130], [40, 1]))
    assert hits(kept) == [0, 48]
    _, kept = run(caching(retention_blocks=4), turns([50, 130], [40, 1]))
    assert hits(kept) == [0, 64]


def test_blocks_that_were_used_again_are_not_hit() -> None:
    others = [120] * 6
    streams = [0, 1, 2, 3, 4, 5, 6, 0]
    _, kept = run(caching(num_blocks=200), turns([100, *others, 100], [2] * 8, stream=streams))
    assert hits(kept)[-1] == 96
    _, kept = run(caching(num_blocks=24), turns([100, *others, 100], [2] * 8, stream=streams))
    assert hits(kept)[-1] == 0


@pytest.mark.parametrize("speculative", [0, 3])
def test_a_request_holds_at_most_two_states_and_k_more_per_group(speculative: int) -> None:
    most = []

    def look(engine: Engine, step: Any) -> None:
        slot = engine.queues.slots[engine.queues.running[0]]
        if engine.state["num_running"]:
            attention = -(-(slot["computed"] + 3) // 16)
            most.append((slot["blocks"] - attention) / 2)

    config = caching(rows=4, speculative=speculative)
    run(config, requests([100], [120]), chain_acceptance(0.8, 0.6, 0.4), after_step=look)
    assert round(max(most)) == 2 + speculative
    assert round(min(most)) == 1 + speculative


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    def found(config: EngineConfig) -> int:
        """Tokens that preempted requests had and did not have to compute again."""
        lost = []

        def look(engine: Engine, step: Any) -> None:
            if step["preempted"]:
                slot = engine.queues.slots[engine.queues.waiting[engine.state["waiting_head"]]]
                lost.append(int(slot["prompt_tokens"] + slot["emitted"]))

        _, kept = run(config, requests([30] * 3, [100] * 3), after_step=look)
        assert lost
        return 90 + sum(lost) - int(kept["steps"]["prefill_tokens"].sum())

    assert found(caching(groups=1, num_blocks=20, max_model_len=160)) > 128
    assert found(small(num_blocks=20, max_model_len=160)) <= 3


def test_a_shared_prefix_is_computed_once() -> None:
    settings = WorkloadSettings(lengths="fixed:100/4", max_concurrency=1, num_requests=5, shared_prefix_tokens=70)
    _, kept = run(caching(groups=1, max_num_batched_tokens=96), request_blocks(settings, 0), max_concurrency=1)
    assert hits(kept) == [0, 0, 0, 0, 0]  # the chunk ended at 96 tokens: no state at 64
    _, kept = run(caching(groups=1, max_num_batched_tokens=32), request_blocks(settings, 0), max_concurrency=1)
    assert hits(kept) == [0, 64, 64, 64, 64]


def test_a_state_that_moves_on_is_paid_for() -> None:
    def total_us(publish_us: float) -> float:
        steps: list[Any] = []
        env = simpy.Environment()
        cost = constant_cost(64, 0.0, 256)._replace(publish_us=np.array([0.0, publish_us]))
        sink = lambda kind, array: steps.extend(array["duration_us"]) if kind == "steps" else None  # noqa: E731
        Client(Engine(env, caching(), cost, no_drafts(), sink), requests([10], [60]), None)
        env.run()
        return float(np.sum(steps))

    assert total_us(7.0) - total_us(0.0) == pytest.approx(7.0 * 4)  # 69 tokens cross 16, 32, 48 and 64


def test_keys_of_equal_prefixes_are_equal_and_no_others() -> None:
    prefix = PrefixIds(16, np.array([3, 3, 4, -1, -1]), 1, np.zeros(6, np.int64), np.zeros(0, np.int64))
    (block,) = requests([40, 64, 40, 40, 12], [24] * 5)
    keys = block_keys(block._replace(prefix=prefix), 10, 8, 9)
    assert (keys[:4, :2] == keys[0, :2]).all()  # the shared 16 tokens
    assert (keys[0, :8] == keys[1, :8]).all()  # one conversation
    assert not np.isin(keys[0, 2:8], keys[2]).any()
    assert len({int(row[3]) for row in keys}) == 4
    assert keys[4, 0] == keys[0, 0]
    assert keys[4, 1] != keys[0, 1]  # a prompt of 12 tokens has only those of the shared prefix
    assert (keys[0, 8:] == 0).all()


@pytest.mark.slow
def test_mooncake_hits_the_published_share_in_an_endless_cache() -> None:
    # Mooncake conversation trace: 36.6 % of the 512-token units are repetitions of an earlier one
    config = caching(
        groups=1, num_blocks=400_000, block_size_tokens=512, max_model_len=140_000, max_num_batched_tokens=8192
    )
    settings = WorkloadSettings(trace="mooncake-conversation", max_concurrency=4, num_requests=12031)
    engine, _ = run(config, request_blocks(settings, 0), max_concurrency=4, buffer_records=1 << 15)
    share = engine.state["prefix_cache_hits"] / engine.state["prefix_cache_queries"]
    assert share == pytest.approx(0.366, abs=0.01)


@pytest.mark.parametrize("prompt", [14, 40])
def test_what_a_request_was_to_compute_when_it_lost_its_place_is_not_hit(prompt: int) -> None:
    # A long prompt of low priority is cut to a block a step; a later request of high priority needs its blocks.
    config = caching(
        groups=1,
        num_blocks=10,
        max_model_len=128,
        long_prefill_token_threshold=16,
        priority_policy=True,
        reserve_full_isl=False,
    )
    (block,) = requests([120, prompt], [2, 60], [0.0, 0.0005])
    history = History(config, block._replace(priority=np.array([5, 0], np.int32)), None)
    engine, kept = HARNESSES["vllm"].serve(history, HARNESSES["vllm"].watcher(history))
    check_end(history, engine, kept)
    assert engine.state["num_preemptions"] > 0


def test_a_state_that_did_not_move_since_its_request_lost_its_place_is_not_paid_for() -> None:
    # Three replies cross into new blocks in the same steps. The first to run goes last by priority: its state moves,
    # then another needs the blocks.
    steps: list[Any] = []
    env = simpy.Environment()
    cost = constant_cost(64, 0.0, 160)._replace(publish_us=np.array([0.0, 7.0, 14.0, 21.0]))
    sink = lambda kind, array: steps.extend(array.copy()) if kind == "steps" else None  # noqa: E731
    (block,) = requests([30, 31, 31], [100] * 3, [0.0, 0.0005, 0.0005])
    block = block._replace(priority=np.array([5, 1, 0], np.int32))
    config = caching(groups=1, num_blocks=20, max_model_len=160, priority_policy=True)
    Client(Engine(env, config, cost, no_drafts(), sink, buffer_records=1), iter([block]), None)
    env.run()
    preempting = [step for step in steps if step["preempted"]]
    assert preempting
    for step in preempting:
        assert step["state_us"] <= 7.0 * step["decoding"]
