"""Which tokens two requests share, and the keys of their blocks that follow from it.

Prompts have no text here. A request is a stretch of a stream of tokens: turns of one conversation read the same stream,
other requests each have their own. Its first tokens may be those of a prefix that all requests share, and a trace may
name its prompt in units of fixed length, where equal numbers stand for equal prompts up to the unit's end. A key stands
for all tokens up to the end of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.jit import njit
from simulator.requests import PrefixIds, RequestBlock

#: Kinds of stream, mixed into keys so that their numbers never meet.
_SHARED, _UNIT, _STREAM, _OWN = 1, 2, 3, 4


def block_keys(block: RequestBlock, first_id: int, block_size_tokens: int, columns: int) -> NDArray[np.int64]:
    """`[n, columns]` keys of all full blocks of all requests, numbered from `first_id`; 0 beyond a request's end."""
    count = len(block.prompt_tokens)
    prefix = block.prefix or PrefixIds.streams(np.full(count, -1, np.int64))
    keys = np.zeros((count, columns), np.int64)
    _fill(keys, block.prompt_tokens, block.output_tokens, prefix, first_id, block_size_tokens)
    return keys


@njit(inline="always")
def _mix(kind: int, number: Any, position: Any) -> Any:
    """A well-mixed 64-bit number (two rounds of a multiply-xorshift hash)."""
    x = np.uint64(number) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position) * np.uint64(8) + np.uint64(kind)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64(x ^ (x >> np.uint64(31)))


@njit()
def _fill(keys: Any, prompts: Any, outputs: Any, prefix: PrefixIds, first_id: int, size: int) -> None:
    for i in range(len(keys)):
        units = prefix.unit_ids[prefix.unit_start[i] : prefix.unit_start[i + 1]]
        for block in range(min((prompts[i] + outputs[i]) // size, keys.shape[1])):
            end = (block + 1) * size
            unit = (end - 1) // prefix.unit_tokens
            if end <= prefix.shared_tokens and end <= prompts[i]:
                keys[i, block] = _mix(_SHARED, 0, end)
            elif end <= prompts[i] and unit < len(units):
                keys[i, block] = _mix(_UNIT, units[unit], end)
            elif prefix.stream[i] >= 0:
                keys[i, block] = _mix(_STREAM, prefix.stream[i], end)
            else:
                keys[i, block] = _mix(_OWN, first_id + i, end)
