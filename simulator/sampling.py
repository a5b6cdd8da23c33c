"""Acceptance drawn by counter: a pure function of seed, request and round, cheap enough for every step.

The difficulty of a round is drawn anew in each round, so only its average matters for how deep the accepted
path goes: a tree enters as one row of survival chances per content class, and one uniform number against
that row is one draw. No state is kept. A request therefore meets the same luck under every schedule and
state method, and under the same number a tree that contains another accepts at least as much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.acceptance import AcceptanceModel
from lab.trees import DraftTree
from simulator.jit import njit

#: Streams of random numbers that never share a draw; the engine may add its own from 2 on.
ROUND_STREAM = 0
CLASS_STREAM = 1

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): golden-ratio increment and the two multipliers of its
# finaliser.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Odd multipliers that keep small seeds, streams and request numbers apart before the first mix.
_SEED = np.uint64(0xD1342543DE82EF95)
_STREAM = np.uint64(0xA24BAED4963EE407)
_REQUEST = np.uint64(0x9FB21C651E98DF25)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_UNIT = 2.0**-53


class AcceptanceTables(NamedTuple):
    """What a draw needs: two small arrays, passed into the compiled engine loop."""

    class_cum: NDArray[np.float64]  # [classes] cumulative share of the requests; the last is 1
    survival: NDArray[np.float64]  # [classes, max_depth] chance that at least 1, 2, … drafts are accepted


def build_tables(model: AcceptanceModel, tree: DraftTree) -> AcceptanceTables:
    """Tables for one model and tree; a tree without drafts has no depth and accepts nothing."""
    class_cum = np.cumsum(model.class_weights)
    class_cum[-1] = 1.0
    return AcceptanceTables(class_cum, np.ascontiguousarray(model.survival_by_class(tree)))


@njit()
def uniform(seed: int, stream: int, request: int, counter: int) -> float:
    """A number in [0, 1) of 53 bits that depends on its four arguments only."""
    x = np.uint64(seed) * _SEED + np.uint64(stream) * _STREAM + np.uint64(request) * _REQUEST
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    x = (x ^ (x >> _31)) + (np.uint64(counter) + np.uint64(1)) * _GAMMA
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return np.float64((x ^ (x >> _31)) >> _11) * _UNIT


@njit()
def request_class(tables: AcceptanceTables, seed: int, request_id: int) -> int:
    """Content class of a request, the same in all of its rounds."""
    chosen = 0
    if tables.class_cum.size > 1:
        number = uniform(seed, CLASS_STREAM, request_id, 0)
        while number >= tables.class_cum[chosen]:
            chosen += 1
    return chosen


@njit()
def sample_accepted(tables: AcceptanceTables, seed: int, request_id: int, round_index: int) -> int:
    """Accepted drafts of one verification, 0 to the depth of the tree; the bonus token is not counted."""
    row = request_class(tables, seed, request_id)
    number = uniform(seed, ROUND_STREAM, request_id, round_index)
    accepted = 0
    for depth in range(tables.survival.shape[1]):
        accepted += number < tables.survival[row, depth]
    return accepted
