"""State methods by name: one file each, one line here."""

from __future__ import annotations

from lab.errors import UsageError
from lab.methods.base import LayerHeads, Phase, StateMethod
from lab.methods.bole import Bole
from lab.methods.deltalog import DeltaLog
from lab.methods.lumotree import LumoTree
from lab.methods.recurrent import Recurrent
from lab.methods.replayssm import ReplaySSM
from lab.methods.specla import SpecLA
from lab.methods.storeall import StoreAll
from lab.methods.treelog import TreeLog
from lab.methods.treewy import TreeWY

__all__ = ["METHODS", "SERIAL_METHODS", "LayerHeads", "Phase", "StateMethod", "get_method"]

METHODS: dict[str, StateMethod] = {
    method.name: method
    for method in (
        Recurrent(),
        StoreAll(),
        ReplaySSM(),
        TreeWY(),
        Bole(),
        SpecLA(),
        LumoTree(),
        DeltaLog(),
        TreeLog(),
    )
}

#: Methods whose verification goes from row to row: it has one way to run, and no factors.
SERIAL_METHODS = (Recurrent.name, StoreAll.name)


def get_method(name: str) -> StateMethod:
    """The state method of that name; raises `UsageError` naming the known ones."""
    try:
        return METHODS[name]
    except KeyError:
        raise UsageError(f"state_method is '{name}'; allowed are {', '.join(METHODS)}") from None
