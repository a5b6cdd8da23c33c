"""What random histories of every engine model share: workloads, how they are served, what must hold after a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from factory import chain_acceptance, no_drafts, run
from hypothesis import strategies as st

from simulator.engine import EngineConfig
from simulator.requests import PrefixIds, RequestBlock, Turns

LONGEST = 64


@dataclass(frozen=True)
class History:
    """Requests, the engine that serves them, and the client's cap on those in flight."""

    config: EngineConfig
    block: RequestBlock
    max_concurrency: int | None


class Harness:
    """One engine model under test: its histories and its own checks."""

    def histories(self) -> st.SearchStrategy[History]:
        """Workloads on engines down to the smallest that can serve them."""
        raise NotImplementedError

    def watcher(self, history: History) -> Watcher:
        """Checks to run after every step."""
        raise NotImplementedError

    def serve(self, history: History, after_step: Callable[[Any, Any], None] | None) -> tuple[Any, dict[str, Any]]:
        """Serve all requests, one step per call of `after_step`; the engine and its records."""
        rows = history.config.rows
        acceptance = chain_acceptance(*np.cumprod(np.full(rows - 1, 0.8))) if rows > 1 else no_drafts()
        return run(history.config, iter([history.block]), acceptance, history.max_concurrency, after_step)


@dataclass
class Watcher:
    """INV-3, INV-4 and INV-5 of a step, whatever the engine; `check_engine` adds what its own model promises."""

    config: EngineConfig
    now_s: float = 0.0

    def __call__(self, engine: Any, step: Any) -> None:
        state, queues = engine.state, engine.queues
        running = queues.slots[queues.running[: state["num_running"]]]
        place = (state["waiting_head"] + np.arange(state["num_waiting"])) % len(queues.waiting)
        waiting = queues.slots[queues.waiting[place]]
        assert state["free_blocks"] >= 0
        assert not waiting["blocks"].any()
        assert not waiting["computed"].any()
        unfinished = (running["done"] == 0).sum() + len(waiting)
        assert state["num_arrived"] == state["num_finished"] + unfinished
        assert len(set(running["request_id"]) | set(waiting["request_id"])) == len(running) + len(waiting)
        assert len(running) <= self.config.max_num_seqs
        assert step["start_s"] >= self.now_s
        self.now_s = float(state["now_s"])
        self.check_engine(engine, step, running)

    def check_engine(self, engine: Any, step: Any, running: Any) -> None:
        """Checks of one engine model; `running` are the slots of the running requests."""
        raise NotImplementedError


@st.composite
def request_blocks(draw: st.DrawFn, most: int = 10, outgrow: bool = False) -> RequestBlock:
    """Requests of at most `LONGEST` tokens with shared prefixes, conversations, prompt units and priorities.

    With `outgrow` there are several at nearly one time, all with short prompts and long replies.
    """
    count = draw(st.integers(3 if outgrow else 1, most))
    half = LONGEST // 2  # of any length, or short prompts with long replies: those outgrow the pool after admission
    growing = ((1, 4), (half, LONGEST - 4))
    ranges = growing if outgrow else draw(st.sampled_from([((1, half), (1, half)), growing]))
    prompts, outputs = (
        np.array(draw(st.lists(st.integers(*range_), min_size=count, max_size=count)), np.int32) for range_ in ranges
    )
    arrival_s = np.cumsum(draw(st.lists(st.floats(0, 0.002 if outgrow else 0.02), min_size=count, max_size=count)))
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


def check_end(history: History, engine: Any, kept: dict[str, Any]) -> None:
    """INV-3 to INV-5 when all requests are served, whatever the engine."""
    assert engine.state["free_blocks"] == engine.config.num_blocks
    assert not engine.queues.pool.refs.any()
    assert engine.state["num_free_slots"] == len(engine.queues.slots)
    done = kept["requests"][np.argsort(kept["requests"]["request_id"])]
    block, steps = history.block, kept["steps"]
    assert done["request_id"].tolist() == list(range(len(block.prompt_tokens)))
    assert done["output_tokens"].tolist() == block.output_tokens.tolist()
    assert steps["emitted_tokens"].sum() == block.output_tokens.sum()
    assert done["num_preemptions"].sum() == steps["preempted"].sum()
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
