"""Workloads: a stream of requests with arrival time, prompt length and output length.

Lengths come from a trace, in its order and with prompt and output kept together, or from a named
distribution. Arrivals come from the trace's clock, from gamma-distributed gaps as in `vllm bench serve`, at
a constant rate, or all at time 0 for a closed loop, whose pace the client's cap on concurrency sets.
Requests are made in blocks, so that memory does not grow with their number. Random numbers of gaps, prompts,
outputs and priorities come from separate streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lab.errors import UsageError
from simulator.conversations import conversation_blocks, is_conversational
from simulator.requests import PrefixIds, RequestBlock, check_units, requests_of
from simulator.traces import MAX_TOKENS, Trace, load_trace

if TYPE_CHECKING:
    from simulator.settings import WorkloadSettings

Floats = NDArray[np.float64]

#: Draws stay within this many standard deviations of the logarithm, so that every law has a longest request.
CLIP_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Independent lognormal prompt and output lengths with the given means; `sigma` 0 makes them constant."""

    prompt_mean: int
    output_mean: int
    sigma: float

    def lengths(self, mean: int, normal: Floats) -> NDArray[np.int32]:
        """Token counts, at least 1, from standard normal numbers."""
        spread = self.sigma * np.clip(normal, -CLIP_SIGMAS, CLIP_SIGMAS)
        tokens: Floats = np.rint(mean * np.exp(spread - self.sigma**2 / 2))
        return np.asarray(np.maximum(tokens, 1), dtype=np.int32)


#: Named length distributions after the three synthetic workload kinds of the TreeWY evaluation
#: (https://github.com/vllm-project/vllm/issues/54080), whose own parameters are not published. The means here agree
#: with its peaks of running requests at gpu_memory_utilization 0.6: they imply about 1.6 attention blocks of 1,072
#: tokens per running balanced-chat request and 8.4 per summarize-heavy one.
LENGTH_LAWS: dict[str, LengthLaw] = {
    "balanced-chat": LengthLaw(1024, 1024, 0.2),
    "generation-heavy": LengthLaw(256, 2048, 0.2),
    "summarize-heavy": LengthLaw(8192, 512, 0.2),
}


def length_law(text: str) -> LengthLaw:
    """The distribution of that name, or `fixed:IN/OUT`; raises `UsageError` otherwise."""
    if text in LENGTH_LAWS:
        return LENGTH_LAWS[text]
    fixed = re.fullmatch(r"fixed:([0-9]+)/([0-9]+)", text)
    if fixed and all(1 <= int(tokens) <= MAX_TOKENS for tokens in fixed.groups()):
        return LengthLaw(int(fixed[1]), int(fixed[2]), 0.0)
    known = ", ".join(LENGTH_LAWS)
    raise UsageError(f"workload.lengths = '{text}': allowed are {known} and fixed:IN/OUT with 1 token or more each")


def request_blocks(workload: WorkloadSettings, seed: int, block: int = 4096) -> Iterator[RequestBlock]:
    """All `num_requests` requests in blocks of `block`; the requests do not depend on the size of a block.

    Raises `UsageError` at the call, not at the first block.
    """
    arrival_seed, prompt_seed, output_seed, priority_seed = np.random.SeedSequence(seed).spawn(4)
    trace = _trace(workload)
    if trace is not None and is_conversational(workload, trace):
        blocks = conversation_blocks(trace, workload, lambda count: _clock(workload, None, arrival_seed, block, count))
    elif trace is not None:
        blocks = _from_trace(trace, workload, _clock(workload, trace, arrival_seed, block, workload.num_requests))
    else:
        clock = _clock(workload, None, arrival_seed, block, workload.num_requests)
        blocks = _from_law(length_law(workload.lengths or ""), clock, prompt_seed, output_seed)
        blocks = (_sharing(requests, workload.shared_prefix_tokens) for requests in blocks)
    return blocks if workload.priority_classes is None else _with_classes(blocks, workload, priority_seed)


def _from_trace(trace: Trace, workload: WorkloadSettings, clock: Iterator[Floats]) -> Iterator[RequestBlock]:
    """Requests in the order of the trace, from its start again, as others, after its end."""
    reached = 0
    for arrival_s in clock:
        round_, rows = np.divmod(np.arange(reached, reached + len(arrival_s)), len(trace.prompt_tokens))
        yield requests_of(trace, workload, arrival_s, rows, round_)
        reached += len(arrival_s)


def _sharing(block: RequestBlock, shared_tokens: int) -> RequestBlock:
    """Requests that have their first tokens in common."""
    own = np.full(len(block.prompt_tokens), -1, np.int64)
    return block._replace(prefix=PrefixIds.streams(own, shared_tokens)) if shared_tokens else block


def _with_classes(
    blocks: Iterator[RequestBlock], workload: WorkloadSettings, seed: np.random.SeedSequence
) -> Iterator[RequestBlock]:
    """Requests with priorities drawn by their shares."""
    classes = sorted((workload.priority_classes or {}).items())
    priorities = np.array([priority for priority, _ in classes], np.int32)
    shares = np.cumsum([share for _, share in classes])
    rng = np.random.default_rng(seed)
    for block in blocks:
        drawn = rng.random(len(block.prompt_tokens)) * shares[-1]
        chosen = np.searchsorted(shares[:-1], drawn, side="right")
        yield block._replace(priority=priorities[chosen])


def _from_law(
    law: LengthLaw,
    clock: Iterator[Floats],
    prompt_seed: np.random.SeedSequence,
    output_seed: np.random.SeedSequence,
) -> Iterator[RequestBlock]:
    prompts, outputs = np.random.default_rng(prompt_seed), np.random.default_rng(output_seed)
    for arrival_s in clock:
        n = len(arrival_s)
        prompt_tokens = law.lengths(law.prompt_mean, prompts.standard_normal(n))
        output_tokens = law.lengths(law.output_mean, outputs.standard_normal(n))
        yield RequestBlock(arrival_s, prompt_tokens, output_tokens)


def length_limits(workload: WorkloadSettings) -> tuple[int, int]:
    """Upper bounds of prompt tokens and of prompt + output tokens of one request; exact for a trace."""
    trace = _trace(workload)
    if trace is None:
        law = length_law(workload.lengths or "")
        prompt, output = (int(law.lengths(mean, np.array([CLIP_SIGMAS]))[0]) for mean in _means(law))
        return prompt, prompt + output
    used = slice(workload.num_requests)
    prompts = trace.prompt_tokens[used].astype(np.int64)
    return int(prompts.max()), int((prompts + trace.output_tokens[used]).max())


def describe(workload: WorkloadSettings) -> dict[str, Any]:
    """The workload's parameters and the lengths of its requests, as plain JSON values.

    Lengths are those of the trace's rows in use or, for a distribution, those of the distribution itself.
    """
    trace = _trace(workload)
    if trace is None:
        law = length_law(workload.lengths or "")
        grid = np.array([NormalDist().inv_cdf((i + 0.5) / 4000) for i in range(4000)])
        prompt, output = (law.lengths(mean, grid) for mean in _means(law))
        kind = "fixed lengths" if law.sigma == 0 else f"lognormal lengths, sigma {law.sigma:g}"
        source = f"{workload.lengths}: {kind}, mean {law.prompt_mean} in, {law.output_mean} out"
    else:
        used = slice(workload.num_requests)
        prompt, output = trace.prompt_tokens[used], trace.output_tokens[used]
        source = trace.source
    result: dict[str, Any] = {
        "source": source,
        "trace": workload.trace,
        "lengths": workload.lengths,
        "arrivals": workload.arrivals,
        "request_rate": workload.request_rate,
        "burstiness": workload.burstiness,
        "max_concurrency": workload.max_concurrency,
        "num_requests": workload.num_requests,
        "think_time_s": workload.think_time_s,
        "shared_prefix_tokens": workload.shared_prefix_tokens,
        "priority_classes": workload.priority_classes,
        "trace_rows": None if trace is None else len(trace.prompt_tokens),
        "trace_rows_dropped": None if trace is None else trace.num_dropped,
    }
    for name, tokens in (("prompt", prompt), ("output", output)):
        result[f"mean_{name}_tokens"] = round(float(tokens.mean()), 2)
        result[f"p50_{name}_tokens"] = round(float(np.percentile(tokens, 50)), 2)
        result[f"p99_{name}_tokens"] = round(float(np.percentile(tokens, 99)), 2)
        result[f"max_{name}_tokens"] = int(tokens.max())
    return result


def _means(law: LengthLaw) -> tuple[int, int]:
    return law.prompt_mean, law.output_mean


def _trace(workload: WorkloadSettings) -> Trace | None:
    if workload.trace is None:
        return None
    trace = load_trace(workload.trace, clock=workload.arrivals == "trace")
    if trace.hash_ids is not None:
        check_units(trace, workload.hash_block_tokens)
    return trace


def _indices(count: int, block: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, block):
        yield np.arange(start, min(start + block, count))


def _clock(
    workload: WorkloadSettings, trace: Trace | None, seed: np.random.SeedSequence, block: int, count: int
) -> Iterator[Floats]:
    """`count` arrival times in seconds, block by block."""
    rate = workload.request_rate
    if workload.burstiness != 1.0 and workload.arrivals != "gamma":
        raise UsageError(
            f"workload.burstiness = {workload.burstiness:g} needs arrivals 'gamma', not '{workload.arrivals}'"
        )
    if workload.arrivals == "closed-loop":
        return (np.zeros(len(indices)) for indices in _indices(count, block))
    if workload.arrivals == "trace" and trace is not None and trace.arrival_s is not None:
        return _trace_clock(trace.arrival_s, count, rate, block)
    if rate is None:
        raise UsageError(f"workload.arrivals '{workload.arrivals}' needs request_rate (requests per second)")
    if workload.arrivals == "constant":
        return ((indices + 1) / rate for indices in _indices(count, block))
    return _gamma_clock(workload.burstiness, count, rate, seed, block)


def _trace_clock(times: Floats, count: int, rate: float | None, block: int) -> Iterator[Floats]:
    """The trace's times, repeated one mean gap after its end, stretched to a mean rate where one is given."""
    rows = len(times)
    period = times[-1] * rows / max(rows - 1, 1)

    def at(indices: NDArray[np.int64]) -> Floats:
        shifted: Floats = (indices // rows) * period + times[indices % rows]
        return shifted

    stretch = 1.0
    if rate is not None and count > 1:
        last = float(at(np.array([count - 1]))[0])
        if last == 0:
            raise UsageError(
                f"workload.request_rate = {rate:g}: the first {count} time stamps of the trace are equal, "
                "so that they cannot be stretched to a rate"
            )
        stretch = (count - 1) / rate / last
    return (at(indices) * stretch for indices in _indices(count, block))


def _gamma_clock(shape: float, count: int, rate: float, seed: np.random.SeedSequence, block: int) -> Iterator[Floats]:
    """Gamma gaps of shape burstiness (1 is Poisson), scaled so that the last arrival is at count / rate."""

    def cumulative() -> Iterator[Floats]:
        rng, reached = np.random.default_rng(seed), 0.0
        for indices in _indices(count, block):
            gaps = rng.standard_gamma(shape, len(indices))
            gaps[0] += reached
            times = np.cumsum(gaps)
            reached = float(times[-1])
            yield times

    total = 0.0
    for times in cumulative():
        total = float(times[-1])
    end = count / rate
    if total == 0:  # gaps of a tiny shape can all underflow: one burst
        return (np.full(len(indices), end) for indices in _indices(count, block))
    return (times / total * end for times in cumulative())
