"""The two memory pools of SGLang: slots for recurrent states, and KV cache by the token.

What is left of the GPU after weights is split once, at start-up. The state pool has K slots, of which a running request
reserves S by the strategy of the radix cache; what speculation needs beside the slots exists once per running request
(a state per row for storeall, a ring or records for the others), with one more for padding. The rest is KV cache.
Formulas: `srt/mem_cache/kv_cache_configurator.py` of SGLang 0.5.23. All sizes are bytes of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from lab.errors import InfeasibleError
from lab.methods.base import LayerHeads, StateMethod
from lab.shapes import ModelShape
from lab.trees import DraftTree
from lab.units import gib
from simulator.sglang.settings import DEFAULT_RUNNING, SPECULATIVE_RUNNING, SglangSettings

#: Slots of a running request with a radix cache, before what the strategies add: its own state and two checkpoints.
RADIX_SLOTS = 3


def state_slots(strategy: str, overlap: bool) -> int:
    """Slots that a running request reserves in the state pool (S)."""
    if strategy == "none":
        return 1
    extra = {"no_buffer": 0, "extra_buffer": 2 if overlap else 1, "extra_buffer_lazy": 1}[strategy]
    return RADIX_SLOTS + extra


def slots_in_use(reserved: int) -> int:
    """Slots that a running request holds of those reserved: with a radix cache one fewer.

    A user measured 4.0 of 5 at every load (jpezzulli/sglang-rtxpro6000 issue 5): the request's own state, two buffers
    and one of the two checkpoints. The others are taken to leave one unused as well.
    """
    return max(reserved - 1, 1)


@dataclass(frozen=True, slots=True)
class RequestLaw:
    """What tokens, slots and running requests cost for one model, method, tree and strategy.

    `slot_state_bytes` and `slot_conv_bytes` are one slot; `row_state_bytes` and `row_conv_bytes` what speculation keeps
    per running request in states and convolution rows, `scratch_bytes` in records and logs. `slots_reserved` is S,
    `slots_held` what a running request uses of it. `for_all_asked`: the ring of ReplaySSM is laid out for
    `max_running_requests` as asked, the other buffers for the requests that the slots let run.
    """

    page_size: int
    token_bytes: int
    drafter_token_bytes: int
    slot_state_bytes: int
    slot_conv_bytes: int
    row_state_bytes: int
    row_conv_bytes: int
    scratch_bytes: int
    slots_reserved: int
    slots_held: int
    for_all_asked: bool
    rows: int

    @property
    def slot_bytes(self) -> int:
        return self.slot_state_bytes + self.slot_conv_bytes

    @property
    def running_bytes(self) -> int:
        """Beside its slots, per running request."""
        return self.row_state_bytes + self.row_conv_bytes + self.scratch_bytes

    @property
    def kv_token_bytes(self) -> int:
        return self.token_bytes + self.drafter_token_bytes

    # The names that vLLM's layout has for the same things ---------------------------------------------------------

    @property
    def block_size_tokens(self) -> int:
        return self.page_size

    @property
    def bytes_per_block(self) -> int:
        return self.page_size * self.kv_token_bytes

    @property
    def scratch_bytes_per_request(self) -> int:
        return self.running_bytes


def request_law(
    shape: ModelShape, tp: int, settings: SglangSettings, method: StateMethod, tree: DraftTree
) -> RequestLaw:
    """The law of one cell; raises `UsageError` when TP does not divide the heads or the method cannot take the tree.

    `storeall` keeps a state with its convolution window per row, as SGLang does; ReplaySSM a ring of
    `linear_replayssm_cache_len` rows with u and k as two bf16 parts. The other methods, which SGLang does not have,
    keep their records and one raw convolution row per tree row.
    """
    shape.check_tensor_parallel(tp)
    method.check_tree(tree)
    layers, drafted = shape.num_linear_layers, tree.num_drafts > 0
    heads = LayerHeads.of(shape, settings.state_dtype(shape.mamba_ssm_dtype), tp)
    token = shape.kv_bytes_per_token_layer(settings.kv_dtype, tp)
    slot_state, slot_conv = layers * heads.state_bytes, layers * shape.conv_bytes_layer(tp)
    row_state = row_conv = scratch = 0
    if method.name == "storeall" and drafted:
        row_state, row_conv = tree.num_rows * slot_state, tree.num_rows * slot_conv
    elif method.name == "replayssm":
        scratch = layers * settings.linear_replayssm_cache_len * heads.record_bytes(4, 4)
    elif method.name != "storeall":
        scratch = layers * method.pool_scratch_bytes(heads, tree)
        row_conv = layers * tree.num_rows * shape.conv_row_bytes_layer(tp) if drafted else 0
    strategy, overlap = settings.radix_strategy(method.name), settings.overlap_schedule(method.name)
    reserved = state_slots(strategy, overlap)
    return RequestLaw(
        page_size=settings.page_size,
        token_bytes=shape.num_full_layers * token,
        drafter_token_bytes=shape.drafting_layers * token if drafted else 0,
        slot_state_bytes=slot_state,
        slot_conv_bytes=slot_conv,
        row_state_bytes=row_state,
        row_conv_bytes=row_conv,
        scratch_bytes=scratch,
        slots_reserved=reserved,
        slots_held=slots_in_use(reserved),
        for_all_asked=method.name == "replayssm" and drafted,
        rows=tree.num_rows,
    )


def balanced_full_memory_ratio(law: RequestLaw, request_tokens: float) -> float:
    """`mamba_full_memory_ratio` at which both pools fill together with requests of that many tokens.

    A running request needs S slots and its buffers from one part, its tokens from the other. Drafts are no slots: they
    count through `running_bytes` alone (SGLang issue 37066, pull 35064).
    """
    return (law.slots_reserved * law.slot_bytes + law.running_bytes) / (request_tokens * law.kv_token_bytes)


@dataclass(frozen=True, slots=True)
class Pools:
    """Sizes of the pools: slots (K), running requests that buffers are laid out for, tokens, running requests.

    `notes` are the engine's own messages. `by_state_cache`: the slots cap what runs.
    """

    max_mamba_cache_size: int
    buffered_requests: int
    max_total_num_tokens: int
    max_running_requests: int
    by_state_cache: bool
    notes: tuple[str, ...]


def solve_pools(law: RequestLaw, rest_bytes: int, settings: SglangSettings) -> Pools:
    """The pools that SGLang makes of `rest_bytes`; raises `InfeasibleError` when one of them has no room."""
    asked = settings.max_running_requests
    notes = []
    if asked is None and law.rows > 1:
        asked = SPECULATIVE_RUNNING
        notes.append(
            f"max_running_requests is {asked} for speculative decoding, as it was not given; set it to change it"
        )
    slots = _slots(law, rest_bytes, settings, asked)
    if slots <= 0:
        raise InfeasibleError(
            f"Not enough GPU memory for hybrid (mamba/linear-attention) state cache: max_mamba_cache_size comes to "
            f"{slots} with {gib(rest_bytes)} after weights, {gib(law.slot_bytes)} a slot and "
            f"{gib(law.running_bytes)} a running request; {_more_slots(settings)}, or "
            + ("lower max_running_requests" if law.for_all_asked else "use a narrower tree")
        )
    limit = slots // law.slots_reserved
    buffered = asked if law.for_all_asked and asked is not None else limit if asked is None else min(asked, limit)
    kv_bytes = rest_bytes - (slots + 1) * law.slot_bytes - _buffers(law, buffered)
    tokens = kv_bytes // law.kv_token_bytes
    least, room = max(law.page_size, 2), tokens
    if settings.max_total_tokens is not None:
        tokens = min(tokens, settings.max_total_tokens)
    tokens -= tokens % law.page_size
    if tokens < least <= room:
        raise InfeasibleError(
            f"max_total_tokens = {settings.max_total_tokens} holds no request (page_size is {law.page_size}); raise "
            f"max_total_tokens to at least {least}"
        )
    if tokens < least:
        raise InfeasibleError(
            f"no memory is left for the KV cache: {slots} state slots and buffers for {buffered} running requests take "
            f"all of {gib(rest_bytes)}; lower max_mamba_cache_size, mamba_full_memory_ratio "
            f"({settings.mamba_full_memory_ratio:g}) or max_running_requests, or raise mem_fraction_static"
        )
    wanted = asked
    if wanted is None:
        low, high = DEFAULT_RUNNING
        wanted = min(max(tokens * 512 // settings.context_length, low), high)
    running = min(wanted, tokens // 2)
    by_state_cache = limit < running
    if limit < 1:
        raise InfeasibleError(
            f"the state cache is too small to serve any request: max_mamba_cache_size {slots} and "
            f"{law.slots_reserved} state slots per request; {_more_slots(settings, law.slots_reserved)}, or choose a "
            "mamba_radix_cache_strategy that reserves fewer slots"
        )
    if by_state_cache:
        notes.append(
            f"max_running_requests is capped to {limit} by the mamba state cache (max_mamba_cache_size={slots}, "
            f"{law.slots_reserved} state slots per request); {_more_slots(settings)}"
        )
    elif running < wanted and settings.max_running_requests is not None:
        notes.append(f"max_running_requests is reduced from {wanted} to {running} by the KV cache of {tokens} tokens")
    return Pools(slots, buffered, tokens, min(running, limit), by_state_cache, tuple(notes))


def _slots(law: RequestLaw, rest_bytes: int, settings: SglangSettings, asked: int | None) -> int:
    """Slots of the state pool, K.

    Given, or one per running request without a radix cache, or what the share r / (1 + r) of the memory holds: slots
    and one more, with the buffers of the K // S requests that they let run and one more.
    """
    if settings.max_mamba_cache_size is not None:
        return settings.max_mamba_cache_size
    if law.slots_reserved == 1 and asked is not None:
        return asked
    ratio = Fraction(str(settings.mamba_full_memory_ratio))
    budget = int(rest_bytes * ratio / (1 + ratio)) if rest_bytes > 0 else 0
    slot, buffer, reserved = law.slot_bytes, law.running_bytes, law.slots_reserved
    if law.for_all_asked and asked is not None:
        return (budget - _buffers(law, asked) - slot) // slot
    return (budget - slot - buffer) * reserved // (slot * reserved + buffer)


def _buffers(law: RequestLaw, requests: int) -> int:
    """Bytes of the buffers of running requests, with one for padding where there are any."""
    return law.running_bytes * (requests + 1)


def _more_slots(settings: SglangSettings, least: int | None = None) -> str:
    """What gives more state slots; `least` are needed."""
    ratio, cache = settings.mamba_full_memory_ratio, settings.max_mamba_cache_size
    if cache is not None:
        return f"raise max_mamba_cache_size ({cache})" + (f" to at least {least}" if least else "")
    halve = ", halve the states with mamba_ssm_dtype bfloat16" if settings.mamba_ssm_dtype != "bfloat16" else ""
    return f"raise mamba_full_memory_ratio ({ratio:g}) or mem_fraction_static ({settings.mem_fraction_static:g}){halve}"
