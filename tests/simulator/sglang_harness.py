"""Random histories of SGLang's engine, and INV-3 of its KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness import LONGEST, Harness, History, Watcher, request_blocks
from hypothesis import strategies as st
from sglang_factory import small_sglang


@st.composite
def sglang_histories(draw: st.DrawFn) -> History:
    """Any workload on any engine whose pools hold one request, down to the smallest."""
    bold = draw(st.booleans())  # bold admission of requests that outgrow a small KV pool
    block = draw(request_blocks(outgrow=bold))
    rows, page = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 4, 16]))
    asked = draw(st.sampled_from([0, 20]))
    longest = int((block.prompt_tokens + block.output_tokens).max())
    smallest = max(longest + page + 1, int(block.prompt_tokens.max()) + asked + page + 1, longest - 1 + rows + page)
    pages = -(-smallest // page) - (-draw(st.sampled_from([0, 5, 20] if bold else [0, 5, 10, 20, 40, 150])) // page)
    config = small_sglang(
        tokens=pages * page,
        page_size=page,
        rows=rows,
        max_model_len=LONGEST,
        max_num_seqs=draw(st.integers(4 if bold else 1, 6)),
        max_num_batched_tokens=240,
        seed=draw(st.integers(0, 9)),
        sglang={
            "chunked_prefill_size": draw(st.sampled_from([0, 16, 32, 64])),
            "max_new_tokens": asked,
            "max_prefill_tokens": draw(st.sampled_from([16, 64, 128])),
            "mixed_chunk": rows == 1 and draw(st.booleans()),
            "overlap_schedule": draw(st.booleans()),
            "schedule_conservativeness": 0.01 if bold else draw(st.sampled_from([0.1, 0.3, 1.0, 1.5])),
        },
    )
    return History(config, block, draw(st.sampled_from([None, 1, 3])))


class SglangHarness(Harness):
    """The scheduler of `simulator.sglang.scheduler`."""

    def histories(self) -> st.SearchStrategy[History]:
        return sglang_histories()

    def watcher(self, history: History) -> Watcher:
        return _SglangWatcher(history.config)


@dataclass
class _SglangWatcher(Watcher):
    def check_engine(self, engine: Any, step: Any, running: Any) -> None:
        """INV-3 of pages; at most one prompt is cut; the ratio stays in its bounds."""
        state, config, own = engine.state, self.config, engine.queues.sglang[0]
        assert config.sglang is not None
        assert state["free_blocks"] + running["blocks"].sum() == config.num_blocks
        assert (running["blocks"] * config.block_size_tokens >= running["computed"]).all()
        assert (running["decoding"][:-1] == 1).all()  # a cut prompt is the last
        assert own["min_new_token_ratio"] <= own["new_token_ratio"] <= 1
        assert step["prefill_tokens"] + step["decoding"] > 0
        if not config.sglang.mixed_chunk:
            assert step["prefill_tokens"] == 0 or step["decoding"] == 0
        if config.sglang.chunked_prefill_size:
            assert step["prefill_tokens"] <= config.sglang.chunked_prefill_size
