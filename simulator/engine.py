"""The serving engine, a SimPy process, and the client that hands it requests.

The engine runs a span of compiled steps (`simulator.step.advance`), then lets the simulated clock catch up; a span ends
when the client must hand over more requests or a record buffer is full. The client hands over blocks of requests, each
sent at its arrival time and at most `max_concurrency` in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from simulator.blockkeys import block_keys
from simulator.blockpool import new_pool
from simulator.costtables import CostTables
from simulator.enginestate import SETTINGS, SLOT, STATE, UNBOUNDED, Queues
from simulator.requests import RequestBlock
from simulator.sampling import AcceptanceTables
from simulator.sglang.config import SglangConfig, sglang_record
from simulator.step import REQUEST, STEP, Records, advance, has_work, needs_backlog

#: Records kept in memory before they are handed to the sink.
BUFFER_RECORDS = 1 << 15

Sink = Callable[[str, Any], None]
Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the scheduler needs to know: limits in rows, requests and tokens, the pool in blocks, host time in µs.

    `state_blocks` are those of a running request, at most. With `prefix_caching` they are 2 + `speculative_blocks` in
    each of `state_groups`; `retention_blocks` says that a state is cached at every so many blocks (0: only at the end
    of a prompt). `watermark_blocks` stay free when a request is admitted beside others. With `sglang`
    SGLang's scheduler runs, which has none of the options from `prefix_caching` on.
    """

    num_blocks: int
    block_size_tokens: int
    attention_groups: int
    state_blocks: int
    rows: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    host_us_per_step: float = 0.0
    host_us_per_prompt_step: float = 0.0
    seed: int = 0
    prefix_caching: bool = False
    state_groups: int = 0
    speculative_blocks: int = 0
    retention_blocks: int = 1
    watermark_blocks: int = 0
    reserve_full_isl: bool = True
    priority_policy: bool = False
    async_scheduling: bool = False
    sglang: SglangConfig | None = None  # None: vLLM's scheduler

    def __post_init__(self) -> None:
        if self.sglang is not None and (self.prefix_caching or self.priority_policy or self.async_scheduling):
            raise ValueError("prefix_caching, priority_policy and async_scheduling are options of vLLM's scheduler")
        if not self.prefix_caching:
            return
        if self.state_blocks != self.state_groups * (2 + self.speculative_blocks):
            raise ValueError("with prefix_caching, state_blocks must be state_groups * (2 + speculative_blocks)")
        if not self.chunked_prefill or self.rows > self.block_size_tokens:
            raise ValueError("prefix_caching needs chunked_prefill and no more rows than block_size_tokens")

    @property
    def blocks_per_group(self) -> int:
        """Attention blocks of a request of `max_model_len` tokens in one group."""
        return -(-self.max_model_len // self.block_size_tokens)


class Engine:
    """A continuous-batching engine; `sink(kind, array)` receives full buffers of `steps`, `requests` and `gaps_s`."""

    def __init__(
        self,
        env: simpy.Environment,
        config: EngineConfig,
        cost: CostTables,
        acceptance: AcceptanceTables,
        sink: Sink,
        buffer_records: int = BUFFER_RECORDS,
    ) -> None:
        self.env = env
        self.config = config
        self.client: Callable[[], bool] = lambda: False
        self._cost = cost
        self._acceptance = acceptance
        self._sink = sink
        settings = np.zeros(1, SETTINGS)
        for field in SETTINGS.names or ():
            settings[field] = getattr(config, field)
        state = np.zeros(1, STATE)
        state["free_blocks"] = config.num_blocks
        state["backlog_low"] = config.max_num_seqs
        state["last_offered_s"] = -np.inf
        seqs = config.max_num_seqs if config.prefix_caching else 0
        self._queues = Queues(
            settings=settings,
            state=state,
            slots=np.zeros(0, SLOT),
            running=np.zeros(config.max_num_seqs, np.int32),
            backlog=np.zeros(0, np.int32),
            waiting=np.zeros(0, np.int32),
            timers=np.zeros(0, np.int32),
            free_slots=np.zeros(0, np.int32),
            keys=np.zeros((0, self._keyed_blocks), np.int64),
            pool=new_pool(config.num_blocks if config.prefix_caching else 0),
            tables=np.full((seqs, config.blocks_per_group, config.attention_groups), -1, np.int32),
            states=np.full((seqs, config.state_groups, 2 + config.speculative_blocks), -1, np.int32),
            free_rows=np.arange(seqs - 1, -1, -1, dtype=np.int32),
            sglang=sglang_record(config.sglang),
        )
        state["num_free_rows"] = len(self._queues.free_rows)
        size = max(buffer_records, 2 * config.max_num_seqs)
        self._records = Records(
            np.zeros(buffer_records, STEP), np.zeros(size, REQUEST), np.zeros(size), np.zeros(config.rows, np.int64)
        )
        self._grow(2 * config.max_num_seqs)
        env.process(self._run())

    @property
    def _keyed_blocks(self) -> int:
        return self.config.blocks_per_group if self.config.prefix_caching else 0

    @property
    def state(self) -> Any:
        """The engine's counters, one record of `simulator.enginestate.STATE`."""
        return self._queues.state[0]

    @property
    def accepted_at(self) -> Any:
        """`[rows]` verification rounds that accepted at least 1, 2, … drafts."""
        return self._records.accepted_at

    @property
    def queues(self) -> Queues:
        """Everything the scheduler holds: read it, do not change it."""
        return self._queues

    def offer(self, block: RequestBlock, first_id: int) -> None:
        """Put requests, numbered from `first_id`, at the end of the client's backlog."""
        count = len(block.prompt_tokens)
        if int(self.state["num_free_slots"]) < count:
            self._grow(max(count, len(self._queues.slots)))
        queues, state = self._queues, self.state
        left = int(state["num_free_slots"]) - count
        chosen = queues.free_slots[left : left + count]
        state["num_free_slots"] = left
        slots = np.zeros(count, SLOT)
        slots["request_id"] = np.arange(first_id, first_id + count)
        slots["arrival_s"] = block.arrival_s
        slots["scheduled_s"] = np.nan
        slots["prompt_tokens"] = block.prompt_tokens
        slots["output_tokens"] = block.output_tokens
        slots["priority"] = 0 if block.priority is None else block.priority
        slots["row"] = slots["next_turn"] = -1
        first = np.arange(count)
        if block.turns is not None:
            follows = np.flatnonzero(block.turns.after >= 0)
            before = block.turns.after[follows]
            slots["next_turn"][before] = chosen[follows]
            slots["think_s"][before] = block.turns.think_s
            first = np.flatnonzero(block.turns.after < 0)
        queues.slots[chosen] = slots
        if self.config.prefix_caching:
            size, columns = self.config.block_size_tokens, self._keyed_blocks
            queues.keys[chosen] = block_keys(block, first_id, size, columns)
        tail = int(state["backlog_head"]) + int(state["num_backlog"])
        queues.backlog[(tail + np.arange(len(first))) % len(queues.backlog)] = chosen[first]
        state["num_backlog"] += len(first)
        state["last_offered_s"] = block.arrival_s[first[-1]]

    def flush(self) -> None:
        """Hand all buffered records to the sink."""
        state = self.state
        for kind, counter in (
            ("steps", "step_records"),
            ("requests", "request_records"),
            ("gaps_s", "gap_records"),
        ):
            count = int(state[counter])
            if count:
                self._sink(kind, getattr(self._records, kind)[:count])
                state[counter] = 0

    def _run(self) -> Process:
        state = self.state
        while True:
            while needs_backlog(state):
                if not self.client():
                    state["backlog_low"] = 0  # nothing is left to ask for
            if not has_work(state):
                return
            advance(self._queues, self._cost, self._acceptance, self._records)
            if state["stalled"]:
                raise RuntimeError(f"engine step {state['num_steps']} at {state['now_s']:.3f} s could schedule nothing")
            self.flush()
            yield self.env.timeout(max(float(state["now_s"]) - self.env.now, 0.0))

    def _grow(self, by: int) -> None:
        """Room for `by` more requests; the waiting ring is laid straight."""
        queues, state = self._queues, self.state
        old = len(queues.slots)
        slots = np.zeros(old + by, SLOT)
        slots[:old] = queues.slots
        rings = {}
        for name in ("backlog", "waiting"):
            ring, length = np.zeros(old + by, np.int32), int(state[f"num_{name}"])
            if length:
                ring[:length] = getattr(queues, name)[(int(state[f"{name}_head"]) + np.arange(length)) % old]
            state[f"{name}_head"] = 0
            rings[name] = ring
        timers = np.zeros(old + by, np.int32)
        timers[:old] = queues.timers
        keys = np.zeros((old + by, self._keyed_blocks), np.int64)
        keys[:old] = queues.keys
        free_slots = np.zeros(old + by, np.int32)
        held = int(state["num_free_slots"])
        free_slots[:held] = queues.free_slots[:held]
        free_slots[held : held + by] = np.arange(old + by - 1, old - 1, -1)
        state["num_free_slots"] = held + by
        self._queues = queues._replace(slots=slots, free_slots=free_slots, timers=timers, keys=keys, **rings)  # type: ignore[arg-type]


class Client:
    """Hands a workload to an engine, block by block; at most `max_concurrency` requests are in flight.

    A request's `arrival_s` becomes the time it was sent: its arrival time, or when the cap let it. In a closed loop all
    arrive at time 0 and the cap alone sets the pace.
    """

    def __init__(self, engine: Engine, blocks: Iterator[RequestBlock], max_concurrency: int | None) -> None:
        self.num_offered = 0
        self._engine = engine
        self._blocks = blocks
        engine.state["permits"] = UNBOUNDED if max_concurrency is None else max_concurrency
        engine.client = self._offer_next

    def _offer_next(self) -> bool:
        """Offer one more block of requests; false when there is none."""
        block = next(self._blocks, None)
        if block is None:
            return False
        self._engine.offer(block, self.num_offered)
        self.num_offered += len(block.prompt_tokens)
        return True
