"""The pool of blocks with identities, as vLLM keeps it when prefixes are cached.

A block that nobody refers to stays in a list in the order in which blocks became free, and keeps its key: until it is
taken for something else it can be hit and brought back. Keys are 64-bit numbers that stand for the tokens up to the
block's end and for the layer group; two blocks may carry the same key. Lists and hash chains are arrays of block
numbers, so that every operation is a few array accesses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simulator.jit import njit

#: Multiplier of the multiplicative hash (2^64 over the golden ratio, odd, as a signed number).
_GOLDEN = np.int64(-7046029254386353131)


class BlockPool(NamedTuple):
    """Blocks numbered from 0; -1 means none. Entry n of `after` and `before` is the free list's two ends."""

    refs: Any  # [n] int32: requests that hold the block
    keys: Any  # [n] int64: what it can be hit by; 0: nothing
    written: Any  # [n] int64: the step that published it
    after: Any  # [n + 1] int32: the next block of the free list
    before: Any  # [n + 1] int32
    buckets: Any  # [power of two] int32: first block of every hash chain
    chain_after: Any  # [n] int32
    chain_before: Any  # [n] int32


def new_pool(num_blocks: int) -> BlockPool:
    """A pool of free blocks without keys, in the order of their numbers; of 0 blocks where no prefixes are cached."""
    order = np.arange(num_blocks + 1, dtype=np.int32)
    buckets = 1 << max(num_blocks, 1).bit_length()
    return BlockPool(
        refs=np.zeros(num_blocks, np.int32),
        keys=np.zeros(num_blocks, np.int64),
        written=np.full(num_blocks, -1, np.int64),
        after=np.roll(order, -1),
        before=np.roll(order, 1),
        buckets=np.full(buckets, -1, np.int32),
        chain_after=np.full(num_blocks, -1, np.int32),
        chain_before=np.full(num_blocks, -1, np.int32),
    )


@njit(inline="always")
def group_key(key: Any, group: Any) -> Any:
    """The key of a block of one layer group; never 0."""
    mixed = key + np.int64(group) * _GOLDEN
    return mixed if mixed != 0 else np.int64(1)


@njit(inline="always")
def _bucket(pool: Any, key: Any) -> Any:
    mixed = (key ^ (key >> np.int64(32))) * _GOLDEN
    return (mixed >> np.int64(20)) & np.int64(len(pool.buckets) - 1)


@njit()
def find(pool: BlockPool, key: int) -> int:
    """A block with that key, or -1."""
    block = pool.buckets[_bucket(pool, key)]
    while block >= 0 and pool.keys[block] != key:
        block = pool.chain_after[block]
    return int(block)


@njit()
def publish(pool: BlockPool, block: int, key: int, step: int) -> None:
    """Let a block be hit by a key; one that has a key keeps it."""
    if pool.keys[block] != 0:
        return
    pool.keys[block] = key
    pool.written[block] = step
    bucket = _bucket(pool, key)
    first = pool.buckets[bucket]
    pool.chain_after[block] = first
    pool.chain_before[block] = -1
    if first >= 0:
        pool.chain_before[first] = block
    pool.buckets[bucket] = block


@njit()
def unpublish(pool: BlockPool, block: int) -> None:
    """Take a block's key away."""
    if pool.keys[block] == 0:
        return
    after, before = pool.chain_after[block], pool.chain_before[block]
    if before >= 0:
        pool.chain_after[before] = after
    else:
        pool.buckets[_bucket(pool, pool.keys[block])] = after
    if after >= 0:
        pool.chain_before[after] = before
    pool.keys[block] = 0
    pool.written[block] = -1


@njit()
def _unlink(pool: BlockPool, block: int) -> None:
    after, before = pool.after[block], pool.before[block]
    pool.after[before] = after
    pool.before[after] = before


@njit()
def take(pool: BlockPool) -> int:
    """The block that has been free for longest, now held once and without a key. The list must not be empty."""
    end = len(pool.refs)
    block = pool.after[end]
    _unlink(pool, block)
    unpublish(pool, block)
    pool.refs[block] = 1
    return int(block)


@njit()
def hold(pool: BlockPool, block: int) -> int:
    """Refer to a block once more; returns the blocks that this takes off the free list (0 or 1)."""
    pool.refs[block] += 1
    if pool.refs[block] > 1:
        return 0
    _unlink(pool, block)
    return 1


@njit()
def drop(pool: BlockPool, block: int) -> int:
    """Refer to a block once less; returns the blocks that this puts at the end of the free list (0 or 1)."""
    pool.refs[block] -= 1
    if pool.refs[block] > 0:
        return 0
    end = len(pool.refs)
    last = pool.before[end]
    pool.after[last] = block
    pool.before[block] = last
    pool.after[block] = end
    pool.before[end] = block
    return 1
