"""The constants that may be fitted: few, physical, each with its default and how far from it is believable.

| constant | what it stands for |
|---|---|
| `host.ms_per_step` | CPU time per engine step that the GPU does not hide: scheduling, sampling, launches |
| `host.ms_per_prompt_step` | further CPU time of a step with a prompt: inputs, launches without CUDA graphs |
| `gpu_time.decode_factor` | GPU time of memory-bound steps over that of the operator tables |
| `gpu_time.prompt_factor` | GPU time that prompts add over that of the operator tables |
| `acceptance` | chance that a drafted token is accepted once those before it were; only where no result tells |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.errors import UsageError


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant: where the fit starts and the standard deviation of the belief about it, on the fit's scale.

    The scale is the logarithm, or the logit where `is_chance`. `least` keeps the logarithm finite.
    """

    name: str
    default: float
    spread: float
    least: float = 0.0
    is_chance: bool = False

    def to_fit(self, value: float) -> float:
        """The value on the fit's scale."""
        if self.is_chance:
            clipped = min(max(value, 1e-3), 1 - 1e-3)
            return math.log(clipped / (1 - clipped))
        return math.log(max(value, self.least))

    def from_fit(self, x: float) -> float:
        """The value at a point of the fit's scale."""
        return 1 / (1 + math.exp(-x)) if self.is_chance else math.exp(min(max(x, -700.0), 700.0))


#: Host times may be off by several times, GPU times by tens of percent: kernels were measured, hosts were not.
CONSTANTS: dict[str, Constant] = {
    constant.name: constant
    for constant in (
        Constant("host.ms_per_step", 2.0, 1.0, least=1e-3),
        Constant("host.ms_per_prompt_step", 9.0, 1.0, least=1e-3),
        Constant("gpu_time.decode_factor", 1.0, 0.25, least=1e-2),
        Constant("gpu_time.prompt_factor", 1.0, 0.25, least=1e-2),
        Constant("acceptance", 0.75, 1.0, is_chance=True),
    )
}
#: What `treewy calibrate --fit` fits unless told otherwise.
DEFAULT_NAMES = ("host.ms_per_step", "host.ms_per_prompt_step", "gpu_time.decode_factor", "gpu_time.prompt_factor")

Values = Mapping[str, float]


def defaults(names: Sequence[str] = DEFAULT_NAMES) -> dict[str, float]:
    """Default values of the named constants; raises `UsageError` for a name that is none."""
    for name in names:
        if name not in CONSTANTS:
            raise UsageError(f"no constant '{name}'; known are {', '.join(CONSTANTS)}")
    return {name: CONSTANTS[name].default for name in names}
