"""Random histories of vLLM's engine, and INV-3 of its pool block by block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from factory import small
from harness import LONGEST, Harness, History, Watcher, request_blocks
from hypothesis import strategies as st

from simulator.blockpool import group_key


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


class VllmHarness(Harness):
    """The scheduler of `simulator.scheduler`."""

    def histories(self) -> st.SearchStrategy[History]:
        return vllm_histories()

    def watcher(self, history: History) -> Watcher:
        return _VllmWatcher(history.config)


@dataclass
class _VllmWatcher(Watcher):
    content: dict[int, int] = field(default_factory=dict)
    finished: int = 0

    def check_engine(self, engine: Any, step: Any, running: Any) -> None:
        state, config = engine.state, self.config
        assert step["prefill_tokens"] + step["decoding"] <= config.max_num_batched_tokens
        if config.prefix_caching:
            self._check_blocks(engine)
        else:
            assert state["free_blocks"] + running["blocks"].sum() == config.num_blocks

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
