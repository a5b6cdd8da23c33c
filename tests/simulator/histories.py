"""Random engine histories: any workload on any engine, down to the smallest pool, and what must hold after every step.

An engine model takes part through a `Harness`: a strategy of histories, a way to serve one, and its own checks. The
checks that hold for every engine are in `check_common`; `HARNESSES` is what `test_histories.py` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from factory import chain_acceptance, no_drafts, run, small
from hypothesis import strategies as st

from simulator.blockpool import group_key
from simulator.engine import EngineConfig
from simulator.requests import PrefixIds, RequestBlock, Turns

LONGEST = 64


@dataclass(frozen=True)
class History:
    """Requests, the engine that serves them, and the client's cap on those in flight."""

    config: Any
    block: RequestBlock
    max_concurrency: int | None


class Harness(Protocol):
    """One engine model under test."""

    def histories(self) -> st.SearchStrategy[History]: ...

    def serve(self, history: History, after_step: Callable[[Any, Any], None] | None) -> tuple[Any, dict[str, Any]]:
        """Serve all requests, one step per call of `after_step`; the engine and its records."""

    def watcher(self, history: History) -> Callable[[Any, Any], None]:
        """Checks to run after every step."""

    def check_end(self, engine: Any) -> None:
        """What must hold when all requests are served."""


@st.composite
def request_blocks(draw: st.DrawFn, most: int = 10) -> RequestBlock:
    """Requests of at most `LONGEST` tokens with shared prefixes, conversations, prompt units and priorities."""
    count = draw(st.integers(1, most))
    numbers = st.lists(st.integers(1, LONGEST // 2), min_size=count, max_size=count)
    prompts, outputs = np.array(draw(numbers), np.int32), np.array(draw(numbers), np.int32)
    arrival_s = np.cumsum(draw(st.lists(st.floats(0, 0.02), min_size=count, max_size=count)))
    stream = np.array(draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count)), np.int64)
    prefix = PrefixIds.streams(stream, draw(st.sampled_from([0, 8, 20])))
    if draw(st.booleans()):  # prompts in units of 8 tokens, of two families
        units = -(-prompts // 8)
        family = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
        ids = np.concatenate([1000 * f + np.arange(n) for f, n in zip(family, units, strict=True)])
        start = np.concatenate([[0], np.cumsum(units)]).astype(np.int64)
        prefix = prefix._replace(unit_tokens=8, unit_start=start, unit_ids=ids.astype(np.int64))
    turns = None
    if draw(st.booleans()):  # every further request of a group of three follows the one before it
        after = np.where(np.arange(count) % 3 == 0, -1, np.arange(count) - 1).astype(np.int32)
        turns = Turns(after, draw(st.sampled_from([0.0, 0.003])))
    priority = np.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), np.int32)
    return RequestBlock(arrival_s, prompts, outputs, priority, turns, prefix)


def check_common(history: History, kept: dict[str, Any]) -> None:
    """INV-4 and INV-5 of the finished requests, whatever the engine."""
    done = kept["requests"][np.argsort(kept["requests"]["request_id"])]
    block, steps = history.block, kept["steps"]
    assert done["request_id"].tolist() == list(range(len(block.prompt_tokens)))
    assert done["output_tokens"].tolist() == block.output_tokens.tolist()
    assert steps["emitted_tokens"].sum() == block.output_tokens.sum()
    first = slice(None) if block.turns is None else block.turns.after < 0
    assert (done["arrival_s"][first] >= block.arrival_s[first]).all()
    assert (done["arrival_s"] <= done["scheduled_s"]).all()
    assert (done["scheduled_s"] < done["first_token_s"]).all()
    assert (done["first_token_s"] <= done["last_token_s"]).all()
    assert (np.diff(steps["start_s"]) > 0).all()
    assert (done["cached_tokens"] < done["prompt_tokens"]).all()
    if block.turns is not None:
        follows = np.flatnonzero(block.turns.after >= 0)
        answered_s = done["last_token_s"][block.turns.after[follows]]
        assert (done["arrival_s"][follows] >= answered_s + block.turns.think_s - 1e-12).all()


@st.composite
def vllm_histories(draw: st.DrawFn) -> History:
    """vLLM's engine in both cache modes, with a pool from the smallest that fits one request."""
    caching, size = draw(st.booleans()), draw(st.sampled_from([8, 16]))
    rows = draw(st.sampled_from([1, 2, 4, 8]))
    groups, state_groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    speculative = draw(st.sampled_from([0, rows - 1]))
    states = state_groups * (speculative + (2 if caching else 1))
    whole_prompts = not caching and draw(st.booleans())
    config = small(
        rows=rows,
        state_blocks=states,
        state_groups=state_groups,
        speculative_blocks=speculative,
        prefix_caching=caching,
        attention_groups=groups,
        block_size_tokens=size,
        max_model_len=LONGEST,
        num_blocks=groups * -(-LONGEST // size) + states + draw(st.sampled_from([0, 0, 1, 5, 12, 40])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=LONGEST if whole_prompts else draw(st.integers(size, 48)),
        chunked_prefill=not whole_prompts,
        long_prefill_token_threshold=draw(st.sampled_from([0, size + 3])),
        retention_blocks=draw(st.sampled_from([0, 1, 3])),
        watermark_blocks=draw(st.sampled_from([0, 2])),
        reserve_full_isl=draw(st.booleans()),
        priority_policy=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    return History(config, draw(request_blocks()), draw(st.sampled_from([None, 1, 3])))


class VllmHarness:
    """The engine of `simulator.engine`."""

    def histories(self) -> st.SearchStrategy[History]:
        return vllm_histories()

    def serve(self, history: History, after_step: Callable[[Any, Any], None] | None) -> tuple[Any, dict[str, Any]]:
        rows = history.config.rows
        acceptance = chain_acceptance(*np.cumprod(np.full(rows - 1, 0.8))) if rows > 1 else no_drafts()
        return run(history.config, iter([history.block]), acceptance, history.max_concurrency, after_step)

    def watcher(self, history: History) -> Callable[[Any, Any], None]:
        return _VllmWatcher(history.config)

    def check_end(self, engine: Any) -> None:
        """INV-3: no block leaks."""
        assert engine.state["free_blocks"] == engine.config.num_blocks
        assert not engine.queues.pool.refs.any()
        assert engine.state["num_free_slots"] == len(engine.queues.slots)


@dataclass
class _VllmWatcher:
    config: EngineConfig
    now_s: float = 0.0
    content: dict[int, int] = field(default_factory=dict)
    finished: int = 0

    def __call__(self, engine: Any, step: Any) -> None:
        state, queues, config = engine.state, engine.queues, self.config
        running = queues.slots[queues.running[: state["num_running"]]]
        place = (state["waiting_head"] + np.arange(state["num_waiting"])) % len(queues.waiting)
        waiting = queues.slots[queues.waiting[place]]
        assert not waiting["blocks"].any()
        assert not waiting["computed"].any()
        unfinished = len(running) - running["done"].sum() + len(waiting)
        assert state["num_arrived"] == state["num_finished"] + unfinished
        assert len(set(running["request_id"]) | set(waiting["request_id"])) == len(running) + len(waiting)
        assert state["num_running"] <= config.max_num_seqs
        assert step["prefill_tokens"] + step["decoding"] <= config.max_num_batched_tokens
        assert step["start_s"] >= self.now_s
        self.now_s = float(state["now_s"])
        if config.prefix_caching:
            self._check_blocks(engine)
        else:
            assert state["free_blocks"] + running["blocks"].sum() == config.num_blocks
            assert state["free_blocks"] >= 0

    def _check_blocks(self, engine: Any) -> None:
        """INV-3 block by block; at most 2 + k states per group; what a request hit was never written again."""
        state, queues, config = engine.state, engine.queues, self.config
        pool, size = queues.pool, config.block_size_tokens
        refs = np.zeros(config.num_blocks, int)
        fresh = pool.written == state["num_steps"] - 1
        if self.finished == state["num_finished"]:  # nobody else gives a block away in the step that fills it
            assert not (fresh & (pool.refs == 0)).any()
        self.finished = int(state["num_finished"])
        for block in np.flatnonzero(fresh):
            self.content[int(block)] = int(pool.keys[block])
        for block in np.flatnonzero((pool.refs > 0) & (pool.keys == 0)):
            self.content.pop(int(block), None)
        for index in queues.running[: state["num_running"]]:
            slot = queues.slots[index]
            spare = config.speculative_blocks + 1 + (slot["last_state"] >= 0)
            assert spare <= 2 + config.speculative_blocks
            states = queues.states[slot["row"], :, :spare]
            held = int(slot["blocks"] - states.size) // config.attention_groups
            table = queues.tables[slot["row"], :held]
            np.add.at(refs, states.ravel(), 1)
            np.add.at(refs, table.ravel(), 1)
            for block in range(slot["computed"] // size):
                for group in range(config.attention_groups):
                    key = group_key_of(queues.keys[index, block], group)
                    assert pool.keys[table[block, group]] == key
                    assert self.content[int(table[block, group])] == key
        assert np.array_equal(refs, pool.refs)
        free, block = [], int(pool.after[config.num_blocks])
        while block != config.num_blocks:
            free.append(block)
            block = int(pool.after[block])
        assert sorted(free) == np.flatnonzero(refs == 0).tolist()
        assert len(free) == state["free_blocks"]


def group_key_of(key: np.int64, group: int) -> int:
    """The pool's key of a block, without warnings about the sum that wraps."""
    with np.errstate(over="ignore"):
        return int(group_key.py_func(key, group))


HARNESSES: dict[str, Harness] = {"vllm": VllmHarness()}
