"""Calibration: run a model on samples and observe the largest absolute entry of every value."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unfading.export.instructions import LARGEST, LEAST_BITS
from unfading.export.model_stages import Exported
from unfading.export.stage import Stage, StageRunner
from unfading.fuse.ir.program import Op, Value

TOO_LARGE = LARGEST * 2.0**-LEAST_BITS


class Observed(NamedTuple):
    """The largest absolute entries that were observed."""

    sample: float  # of the samples
    values: tuple[dict[int, float], ...]  # of each stage, by the id of a value


def inputs_of(batches: Iterable[Any], model: Exported) -> list[Tensor]:
    """The inputs of batches, checked: each [T, B, I] float32, or tokens [T, B]."""
    if isinstance(batches, Tensor):
        batches = [batches]
    inputs = []
    for number, batch in enumerate(batches):
        x = batch[0] if isinstance(batch, tuple | list) else batch  # a Batch is a tuple with x first
        wanted = f"[T, B, {model.input_size}]" if model.tokens is None else "[T, B], tokens"
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        fits = isinstance(x, Tensor) and (
            x.dim() == 2 if model.tokens is not None else x.dim() == 3 and x.shape[2] == model.input_size
        )
        if not fits or not x.numel():
            raise ValueError(f"calibration data are tensors {wanted}, or batches that begin with one; got {shape}.")
        if model.tokens is None and not bool(torch.isfinite(x).all()):
            step, row, feature = torch.nonzero(~torch.isfinite(x))[0].tolist()
            raise ValueError(
                f"the data contain NaN or infinity: batch {number}, step {step}, row {row}, feature {feature}. Remove that row."
            )
        inputs.append(x.detach().cpu().float() if model.tokens is None else x.detach().cpu().long())
    if not inputs:
        raise ValueError("the calibration data are empty; wanted at least one batch of inputs [T, B, I].")
    return inputs


@torch.no_grad()
def observe(model: Exported, inputs: list[Tensor]) -> Observed:
    """Run the stages of a model on these inputs."""
    largest: tuple[dict[int, float], ...] = tuple({} for _ in model.stages)
    sample = float(max(x.abs().max() for x in inputs)) if model.tokens is None else float(np.abs(model.tokens).max())
    for x in inputs:
        runners = [StageRunner(stage, x.shape[1], torch.float32) for stage in model.stages]
        for x_t in x if model.tokens is None else torch.from_numpy(model.tokens).float()[x]:
            for runner, values in zip(runners, largest, strict=True):
                x_t = runner.push(x_t, lambda value, result: _note(values, value, result, runner.stage))  # noqa: B023
    return Observed(sample, largest)


def _note(values: dict[int, float], value: Value, result: Tensor, stage: Stage) -> None:
    if value.op in (Op.CONST, Op.ZERO):
        return
    most = float(result.abs().max()) if result.numel() else 0.0
    if not most <= TOO_LARGE:
        raise ValueError(
            f"a value of {stage.name} overflows on the calibration data: {value.op} gives {most:.3g}, and 16 bits hold at most "
            f"{TOO_LARGE:.3g}. Normalise the samples, or export it in float32."
        )
    values[value.id] = max(values.get(value.id, 0.0), most)
