"""The state methods on the CPU: Numba kernels of two families behind the protocol of all backends.

`serial` runs the recurrence row by row, `closed_form` the tree-WY system over a log. This is the backend that
every machine has; semantics are tested here.
"""

from __future__ import annotations

from lab.cpu.log_sessions import (
    BoleSession,
    DeltaLogSession,
    ReplaySSMSession,
    SpecLASession,
    TreeLogSession,
    TreeWYSession,
)
from lab.cpu.sessions import CpuSession, RecurrentSession, StoreAllSession

__all__ = ["SESSIONS", "CpuSession"]

#: State method -> its session class, called with `(spec, states, state_indices)`.
SESSIONS: dict[str, type[CpuSession]] = {
    "recurrent": RecurrentSession,
    "storeall": StoreAllSession,
    "replayssm": ReplaySSMSession,
    "treewy": TreeWYSession,
    "bole": BoleSession,
    "specla": SpecLASession,
    "deltalog": DeltaLogSession,
    "treelog": TreeLogSession,
}
