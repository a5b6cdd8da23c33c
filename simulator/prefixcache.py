"""Prefix caching with recurrent states, vLLM's Mamba cache mode `align`: what a request holds, finds and leaves.

Attention blocks are shared between requests with equal prefixes. Of the recurrent state a request holds, in every
group, the block that the running state is written to, k speculative ones, and, after it has moved on to another block,
the one before, until tokens beyond it are computed: at most 2 + k. A state can be hit where a prompt chunk ended on a
block boundary or decoding crossed one. So a hit is a multiple of the block length, and needs both the KV up to there
and the state there.
"""

from __future__ import annotations

from typing import Any

from simulator.blockpool import drop, find, group_key, hold, publish, take, unpublish
from simulator.enginestate import UNBOUNDED, Queues, attention_blocks, num_tokens
from simulator.jit import njit


@njit()
def aligned_chunk(settings: Any, slot: Any, computed: int, rows: int) -> int:
    """Cut a prompt chunk so that it ends on a block boundary, up to the last one whose state can be hit again.

    With drafts the last matching block is never used (the drafter has to see its tokens), so that the last useful
    boundary is one block earlier.
    """
    block, tokens = settings.block_size_tokens, num_tokens(slot)
    last = checkpoint(settings, tokens)
    if computed >= max(slot.prompt_tokens, tokens - 1):
        pass
    elif computed + rows < last:
        rows = rows // block * block
    elif computed < last < computed + rows:
        rows = last - computed
    return int(rows)


@njit(inline="always")
def checkpoint(settings: Any, tokens: Any) -> Any:
    """Tokens at the last block boundary whose state a prompt of that many tokens leaves to be hit."""
    blocks = tokens // settings.block_size_tokens
    if settings.rows > 1:
        blocks = max(blocks - 1, 0)
    return blocks * settings.block_size_tokens


@njit()
def find_hit(queues: Queues, index: int) -> tuple[int, int, bool]:
    """Blocks of a waiting request's prefix that are cached, how many of its cached blocks are free, and whether the
    state there is being written in this very step, so that the request has to wait for the next one."""
    settings, pool = queues.settings[0], queues.pool
    groups = settings.attention_groups
    keys = queues.keys[index]
    limit = (num_tokens(queues.slots[index]) - 1) // settings.block_size_tokens  # one token is left to compute
    matching = 0
    while matching < limit:
        missing = False
        for group in range(groups):
            missing |= find(pool, group_key(keys[matching], group)) < 0
        if missing:
            break
        matching += 1
    if settings.rows > 1 and matching > 0:
        matching -= 1
    while matching > 0:
        missing = False
        for group in range(groups, groups + settings.state_groups):
            missing |= find(pool, group_key(keys[matching - 1], group)) < 0
        if not missing:
            break
        matching -= 1
    free = 0
    for block in range(matching):
        for group in range(groups):
            free += pool.refs[find(pool, group_key(keys[block], group))] == 0
    writing = False
    if matching > 0:
        for group in range(groups, groups + settings.state_groups):
            found = find(pool, group_key(keys[matching - 1], group))
            free += pool.refs[found] == 0
            writing |= pool.written[found] == queues.state[0].num_steps
    return matching, free, writing


@njit(inline="always")
def first_states(settings: Any) -> Any:
    """State blocks that a request takes when it is admitted."""
    return settings.state_groups * (1 + settings.speculative_blocks)


@njit()
def admit(queues: Queues, index: int, hit: int, tokens: int, lookahead: int) -> None:
    """Give a request the `hit` cached blocks and new ones for `tokens` tokens and `lookahead` further slots."""
    settings, state, pool = queues.settings[0], queues.state[0], queues.pool
    slot, keys = queues.slots[index], queues.keys[index]
    groups, spare = settings.attention_groups, settings.speculative_blocks + 1
    state.num_free_rows -= 1
    slot.row = queues.free_rows[state.num_free_rows]
    table, states = queues.tables[slot.row], queues.states[slot.row]
    for block in range(hit):
        for group in range(groups):
            found = find(pool, group_key(keys[block], group))
            state.free_blocks -= hold(pool, found)
            table[block, group] = found
    if hit > 0:
        for group in range(settings.state_groups):
            found = find(pool, group_key(keys[hit - 1], groups + group))
            state.free_blocks -= hold(pool, found)
            states[group, spare] = found
    slot.last_state = hit - 1
    slot.computed = hit * settings.block_size_tokens
    slot.published = hit
    slot.blocks = hit * groups + (settings.state_groups if hit > 0 else 0)
    for group in range(settings.state_groups):
        for place in range(spare):
            states[group, place] = take(pool)
    state.free_blocks -= first_states(settings)
    slot.blocks += first_states(settings)
    slot.running_state = (tokens - 1) // settings.block_size_tokens
    state.states_copied_in_step += hit > 0
    _take_attention(queues, slot, hit, tokens + lookahead)


@njit()
def release_last_state(queues: Queues, slot: Any) -> None:
    """Give back the state before the running one once tokens beyond it are computed."""
    settings, state = queues.settings[0], queues.state[0]
    if slot.last_state >= 0 and slot.last_state < -(-slot.computed // settings.block_size_tokens) - 1:
        for group in range(settings.state_groups):
            state.free_blocks += drop(queues.pool, queues.states[slot.row, group, settings.speculative_blocks + 1])
        slot.blocks -= settings.state_groups
        slot.last_state = -1


@njit()
def missing_blocks(queues: Queues, slot: Any, tokens: int, lookahead: int) -> int:
    """Blocks that a running request lacks for `tokens` tokens and `lookahead` further slots."""
    settings = queues.settings[0]
    states = settings.state_groups if (tokens - 1) // settings.block_size_tokens > slot.running_state else 0
    held = _attention_held(settings, slot)
    return int(max(attention_blocks(settings, tokens + lookahead) - held, 0) + states)


@njit()
def grow(queues: Queues, slot: Any, tokens: int, lookahead: int) -> None:
    """Take the `missing_blocks`; the running state moves on when `tokens` reach beyond its block."""
    settings, state = queues.settings[0], queues.state[0]
    held = _attention_held(settings, slot) // settings.attention_groups
    target = (tokens - 1) // settings.block_size_tokens
    if target > slot.running_state:
        states = queues.states[slot.row]
        for group in range(settings.state_groups):
            states[group, settings.speculative_blocks + 1] = states[group, 0]
            states[group, 0] = take(queues.pool)
        state.free_blocks -= settings.state_groups
        slot.blocks += settings.state_groups
        slot.last_state = slot.running_state
        slot.running_state = target
        slot.moved_at_step = state.num_steps
        if slot.decoding:
            state.states_published_in_step += 1
        else:
            state.states_copied_in_step += 1
    _take_attention(queues, slot, held, tokens + lookahead)


@njit()
def uncharge(queues: Queues, slot: Any) -> None:
    """Take back what `grow` counted for a request that loses its place in the same step: its state does not move."""
    state = queues.state[0]
    if slot.last_state < 0 or slot.moved_at_step != state.num_steps:
        return
    if slot.decoding:
        state.states_published_in_step -= 1
    else:
        state.states_copied_in_step -= 1


@njit()
def _attention_held(settings: Any, slot: Any) -> int:
    states = first_states(settings) + (settings.state_groups if slot.last_state >= 0 else 0)
    return int(slot.blocks - states)


@njit()
def _take_attention(queues: Queues, slot: Any, held: int, tokens: int) -> None:
    """Extend the attention blocks, `held` per group so far, to `tokens` tokens, and say when the next look is due."""
    settings, state = queues.settings[0], queues.state[0]
    size, groups = settings.block_size_tokens, settings.attention_groups
    wanted = max(int(attention_blocks(settings, tokens)) // groups, held)
    for block in range(held, wanted):
        for group in range(groups):
            queues.tables[slot.row, block, group] = take(queues.pool)
    state.free_blocks -= (wanted - held) * groups
    slot.blocks += (wanted - held) * groups
    room = min(wanted, slot.running_state + 1) * size
    if slot.last_state >= 0:
        slot.token_room = 0  # look again in the next step, to give that state back
    else:
        slot.token_room = room if room < settings.max_model_len else UNBOUNDED
    slot.publish_at = (slot.published + 1) * size


@njit()
def publish_prompt(queues: Queues, index: int) -> None:
    """Let the blocks that this step's prompt chunk fills be hit, and the state if the chunk ends on a boundary."""
    settings, slot = queues.settings[0], queues.slots[index]
    end = slot.computed + slot.scheduled
    _publish_attention(queues, index, end // settings.block_size_tokens)
    if end % settings.block_size_tokens == 0 and _is_kept(settings, slot, end):
        _publish_state(queues, index, slot.published, 0)


@njit()
def publish_decoded(queues: Queues, index: int) -> None:
    """Let the blocks that decoding has filled be hit, and the states at the boundaries that it has crossed."""
    settings, slot = queues.settings[0], queues.slots[index]
    while slot.publish_at <= slot.computed:
        _publish_attention(queues, index, slot.published + 1)
        if not _is_kept(settings, slot, slot.published * settings.block_size_tokens):
            continue
        if slot.running_state == slot.published - 1:
            _publish_state(queues, index, slot.published, 0)
        elif slot.last_state == slot.published - 1:
            _publish_state(queues, index, slot.published, settings.speculative_blocks + 1)


@njit()
def unpublish_prompt(queues: Queues, index: int) -> None:
    """Undo `publish_prompt` for a request that loses its place after it was scheduled."""
    settings, slot = queues.settings[0], queues.slots[index]
    for block in range(slot.computed // settings.block_size_tokens, slot.published):
        for group in range(settings.attention_groups):
            unpublish(queues.pool, queues.tables[slot.row, block, group])
    if slot.published * settings.block_size_tokens > slot.computed:
        for group in range(settings.state_groups):
            unpublish(queues.pool, queues.states[slot.row, group, 0])


@njit()
def _is_kept(settings: Any, slot: Any, tokens: int) -> bool:
    """Whether the state after that many tokens stays in the cache, by `prefix_cache_retention_interval`."""
    every = settings.retention_blocks
    if every > 0 and tokens // settings.block_size_tokens % every == 0:
        return True
    return bool(tokens == checkpoint(settings, slot.prompt_tokens))


@njit()
def _publish_attention(queues: Queues, index: int, until: int) -> None:
    settings, slot = queues.settings[0], queues.slots[index]
    for block in range(slot.published, until):
        for group in range(settings.attention_groups):
            key = group_key(queues.keys[index, block], group)
            publish(queues.pool, queues.tables[slot.row, block, group], key, queues.state[0].num_steps)
    slot.published = until
    slot.publish_at = (until + 1) * settings.block_size_tokens


@njit()
def _publish_state(queues: Queues, index: int, boundary: int, place: int) -> None:
    settings, slot = queues.settings[0], queues.slots[index]
    for group in range(settings.state_groups):
        key = group_key(queues.keys[index, boundary - 1], settings.attention_groups + group)
        publish(queues.pool, queues.states[slot.row, group, place], key, queues.state[0].num_steps)


@njit()
def release(queues: Queues, slot: Any) -> None:
    """Give back all blocks of a request, the last ones first; what was published can still be hit."""
    settings, state, pool = queues.settings[0], queues.state[0], queues.pool
    held = _attention_held(settings, slot) // settings.attention_groups
    for group in range(settings.attention_groups):
        for block in range(held - 1, -1, -1):
            state.free_blocks += drop(pool, queues.tables[slot.row, block, group])
    for group in range(settings.state_groups):
        for place in range(settings.speculative_blocks, -1, -1):
            state.free_blocks += drop(pool, queues.states[slot.row, group, place])
        if slot.last_state >= 0:
            state.free_blocks += drop(pool, queues.states[slot.row, group, settings.speculative_blocks + 1])
    queues.free_rows[state.num_free_rows] = slot.row
    state.num_free_rows += 1
    slot.row = -1
    slot.last_state = -1
    slot.blocks = 0
    slot.token_room = 0
