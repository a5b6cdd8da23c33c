"""What `simulate` and `plan` say before they run: what a profile does not price, foreign calibrations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lab.errors import UsageError

if TYPE_CHECKING:
    from simulator.scenario import Scenario


def calibration_notes(cells: Iterable[Scenario]) -> list[str]:
    """One sentence for every calibration that was fitted on another model or GPU than a cell that uses it."""
    from simulator.calibration.file import calibration_record

    notes = []
    for name, model, gpu in dict.fromkeys((cell.calibration, cell.model, cell.gpu) for cell in cells):
        if name is None:
            continue
        record = calibration_record(name, model, gpu)
        if not record["same_model_and_gpu"]:
            fitted = record["fitted_on"] or {}
            on = f"{fitted.get('model', 'an unnamed model')} on {fitted.get('gpu', 'an unnamed GPU')}"
            notes.append(
                f"calibration {name} was fitted on {on}, not on {model} on {gpu}; "
                "fit one of this setup with treewy calibrate"
            )
    return notes


def profile_notes(cells: Iterable[Scenario]) -> list[str]:
    """One sentence for every profile and state type that lacks a step of a method which the cells simulate."""
    from lab.methods import get_method
    from lab.methods.base import LayerHeads
    from lab.profiles.folders import GPU_NAMES, check_gpu
    from lab.profiles.kernels import gpu_kernels
    from lab.shapes import load_shape
    from lab.trees import parse_tree

    lacking: dict[tuple[str, str], dict[str, None]] = {}
    for cell in cells:
        if cell.gpu.lower() in GPU_NAMES or (kernels := gpu_kernels(cell.gpu)) is None:
            continue
        method, tree = get_method(cell.speculation.state_method), parse_tree(cell.speculation.tree)
        shape = load_shape(cell.model)
        dtype = cell.engine.state_dtype(shape.mamba_ssm_dtype)
        try:
            method.check_tree(tree)
            heads = LayerHeads.of(shape, dtype, cell.tensor_parallel_size)
        except UsageError:
            continue  # the sweep says why such a cell cannot run
        if kernels.profile.step(method.name, heads, tree, [1]) is None:
            lacking.setdefault((cell.gpu, dtype), {})[method.name] = None
    notes = []
    for (gpu, dtype), methods in lacking.items():
        kernels = gpu_kernels(gpu)
        assert kernels is not None
        device, again = kernels.profile.device, f"--profile {gpu} --resume --method {','.join(methods)}"
        notes.append(
            f"profile {gpu} has no step of {', '.join(methods)} ({dtype} state): their states cost what the operator "
            f"tables of {check_gpu(gpu)} say, not what {device['name']} takes; do not compare them with the others "
            f"before they are measured: treewy bench --backend {device['backend']} {again}"
        )
    return notes
