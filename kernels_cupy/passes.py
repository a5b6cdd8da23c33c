"""How many layers a measurement goes over in one pass."""

from __future__ import annotations

from kernels_cupy.compiler import load_cupy
from kernels_cupy.steps import Shape

#: Layers cover at least this many times the L2 cache, which does not forget in the order of use.
CACHE_COVER = 4
MAX_LAYERS = 512
#: Layers of a pass at least, as a model's follow one another; what a step does once for all layers is shared by them.
#: So many only if they take half of the device's memory at most.
PASS_LAYERS = 8


def pass_layers(shape: Shape) -> int:
    """Layers that a pass goes over: none is in the L2 cache, and they are `PASS_LAYERS` at least if so many fit."""
    cuda = load_cupy().cuda
    covering = int(-(-CACHE_COVER * cuda.Device().attributes["L2CacheSize"] // shape.layer_bytes()))
    fitting = int(cuda.runtime.memGetInfo()[1] / 2 // allocated_bytes(shape, 1))
    return min(max(covering, min(PASS_LAYERS, fitting)), MAX_LAYERS)


def allocated_bytes(shape: Shape, layers: int) -> float:
    """Device memory that a `Step` takes at most while it is made: storeall copies its states once."""
    copies = 2 if shape.method == "storeall" else 1
    return copies * layers * shape.layer_bytes()
