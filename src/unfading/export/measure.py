"""Measurements of a trained model as an export: what it takes on a device, what it loses, and where.

`measure` returns plain rows, from which `report/export_page.py` makes a page.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unfading.export import cortex_m
from unfading.export.arrays_of_c import SIZES
from unfading.export.c_model import CSource
from unfading.export.error_by_value import ErrorByValue
from unfading.export.instructions import rounded
from unfading.export.int8 import block_entries, with_int8
from unfading.export.matrix_storage import multiply_adds
from unfading.export.model_stages import Exported, exported
from unfading.export.quantised_model import IntegerRunner, Quantised
from unfading.export.stage import Stage, StageRunner
from unfading.export.trained import ROWS, Trained
from unfading.export.write_c import Precision, c
from unfading.fuse.ir.program import Op
from unfading.tasks.base import Batch, EveryStep

PRECISIONS: tuple[Precision, ...] = ("float32", "int8", "integer")
WINDOWS, STEPS = 2, 256  # sequences, and steps of each, that an emulated device runs
ARRAY = re.compile(r"^static const (\w+) (\w+)\[(\d+)\]", re.MULTILINE)


def measure(subject: Trained, *, batches: int, rows: int) -> dict[str, Any]:
    """Plain rows about a trained model.

    Args:
        subject: the model with its task.
        batches: batches of training rows for the calibration of integers.
        rows: test rows for scores; errors are measured on the first batch of them.
    """
    test = list(subject.batches("test", -(-rows // ROWS)))
    model = exported(subject.model, subject.scale)
    reason, twin = None, None
    try:
        twin = subject.quantised(batches)
    except ValueError as error:
        reason = str(error)
    tools = cortex_m.missing(cortex_m.GCC, cortex_m.QEMU)
    sizes = [_sizes(subject, precision, twin, test[0], tools) for precision in PRECISIONS if precision != "integer" or twin]
    scores, errors = _scores(subject, model, twin, test)
    names = [stage.name for stage in model.stages]
    return {
        "name": subject.name,
        "model": model.name,
        "task": type(subject.task).__name__,
        "metric": subject.task.metric,
        "higher_is_better": subject.task.higher_is_better,
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "steps": test[0].x.shape[0],
        "test_rows": sum(batch.x.shape[1] for batch in test),
        "calibration_rows": batches * ROWS,
        "stages": [
            {"stage": name, "multiply_adds": _multiply_adds(stage)} for name, stage in zip(names, model.stages, strict=True)
        ],
        "precisions": [{**each, "score": scores[each["precision"]]} for each in sizes],
        "not_in_integers": reason,
        "missing": tools,
        "over_steps": errors.over_steps(names),
        "operations": [] if errors.by_value is None else errors.by_value.rows(),
    }


def _multiply_adds(stage: Stage) -> int:
    """The multiply-adds of the matrix products of a stage at one step, with matrices as they are stored in int8."""
    blocks = (block for value in stage.program.values() if value.op is Op.DOT for block in value.blocks)
    return sum(multiply_adds(block_entries(stage, block), "int8_t") for block in blocks)


# -- sizes --------------------------------------------------------------------------------------------------------------------


def _sizes(
    subject: Trained, precision: Precision, twin: Quantised | None, batch: Batch, tools: Sequence[str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        if precision == "integer" and twin is not None:
            source = c(twin, folder)
        else:
            source = c(subject.model, folder, precision=precision, scale=subject.scale)
        stages = [stage.name for stage in exported(subject.model, subject.scale).stages]
        row: dict[str, Any] = {
            "precision": precision,
            "constants": source.constants,
            "parts": _parts(source, stages),
            "state": source.state,
            "scratch": source.scratch,
            "multiply_adds": source.multiply_adds,
        }
        if cortex_m.GCC not in tools:
            sizes = cortex_m.compiled(folder)
            row |= {"code": sizes.code, "functions": _functions(sizes.functions, stages), "stack": sizes.stack}
        if not tools:
            x = batch.x[:STEPS, :WINDOWS]
            given = twin.samples(x) if precision == "integer" and twin is not None else x.numpy()
            windows = np.ascontiguousarray(np.moveaxis(given, 1, 0))
            row["instructions"] = cortex_m.run(folder, windows, integer=precision == "integer").instructions
    return row


def _parts(source: CSource, stages: Sequence[str]) -> dict[str, int]:
    """The bytes of constants of each stage, and of those that all share."""
    parts = dict.fromkeys(stages, 0)
    for kind, name, count in ARRAY.findall(source.source):
        owner = next((stage for stage in stages if name.startswith(f"{stage}_")), name)
        parts[owner] = parts.get(owner, 0) + SIZES[kind] * int(count)
    return parts


def _functions(functions: dict[str, int], stages: Sequence[str]) -> dict[str, int]:
    """The bytes of code of each stage, of model_push and model_reset, and of the arithmetic that stages call."""
    parts = {name: functions.get(name, 0) for name in stages}
    parts["push and reset"] = sum(functions.get(name, 0) for name in ("model_push", "model_reset"))
    parts["arithmetic"] = sum(functions.values()) - sum(parts.values())
    return parts


# -- scores and errors --------------------------------------------------------------------------------------------------------


class _Errors(NamedTuple):
    squares: dict[str, NDArray[Any]]  # by precision: the squared distance from float64 at each step and stage, [T, stages]
    size: NDArray[Any]  # the square of the values themselves
    by_value: ErrorByValue | None

    def over_steps(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The relative error of the output of each stage at each step."""
        rows = []
        for precision, squares in self.squares.items():
            relative = np.sqrt(squares / np.maximum(self.size, 1e-30))
            rows += [
                {"precision": precision, "stage": name, "step": step, "error": float(relative[step, i])}
                for i, name in enumerate(names)
                for step in range(len(relative))
            ]
        return rows


class _FloatModel:
    """The stages of a model in floats, one step at a time."""

    def __init__(self, model: Exported, batch: int, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.runners = [StageRunner(stage, batch, dtype) for stage in model.stages]
        self.total: Tensor | float = 0.0
        self.largest: Tensor | None = None

    def outputs(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The output of each stage after one sample."""
        x = x.to(self.dtype)
        for i, runner in enumerate(self.runners):
            if self.model.pooling and i == len(self.runners) - 1:
                self.total = self.total + x
                mean = self.total / (runner.position + 1)
                self.largest = x if self.largest is None else torch.maximum(self.largest, x)
                x = mean if self.model.pooling == "mean" else torch.cat([x, mean, self.largest], dim=-1)
            x = runner.push(x)
            yield i, x


class _IntegerModel:
    """The stages of a model in integers, one step at a time."""

    def __init__(self, twin: Quantised, batch: int):
        self.twin = twin
        self.runners = [IntegerRunner(stage, batch) for stage in twin.stages]

    def outputs(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The output of each stage after one sample, as floats."""
        entries = rounded(x.double().numpy(), self.twin.sample_bits)
        for i, (runner, stage) in enumerate(zip(self.runners, self.twin.stages, strict=True)):
            entries = runner.push(entries)
            yield i, torch.from_numpy(entries * 2.0**-stage.output_bits)


@torch.no_grad()
def _scores(
    subject: Trained, model: Exported, twin: Quantised | None, test: Sequence[Batch]
) -> tuple[dict[str, float], _Errors]:
    """The score of each precision, and the errors on the first batch."""
    once = not isinstance(subject.model.head, EveryStep)
    in_int8 = model._replace(stages=tuple(with_int8(stage) for stage in model.stages))
    totals: dict[str, float] = dict.fromkeys(PRECISIONS if twin else PRECISIONS[:2], 0.0)
    weight, errors = 0, None
    for batch in test:
        rows = batch.x.shape[1]
        runs: dict[str, _FloatModel | _IntegerModel] = {
            "float32": _FloatModel(model, rows, torch.float32),
            "int8": _FloatModel(in_int8, rows, torch.float32),
        }
        if twin is not None:
            runs["integer"] = _IntegerModel(twin, rows)
        predictions: dict[str, list[Tensor]] = {name: [] for name in runs}
        exact = _FloatModel(model, rows, torch.float64) if errors is None else None
        squares = {name: np.zeros((len(batch.x), len(model.stages))) for name in runs}
        size = np.zeros((len(batch.x), len(model.stages)))
        samples = batch.x if model.tokens is None else torch.from_numpy(model.tokens).float()[batch.x]
        for t, x in enumerate(samples):
            wanted = {} if exact is None else dict(exact.outputs(x))
            for i, y in wanted.items():
                size[t, i] = float(y.square().sum())
            for name, run in runs.items():
                for i, y in run.outputs(x):
                    if wanted:
                        squares[name][t, i] = float((y.double() - wanted[i]).square().sum())
                predictions[name].append(y.float())
        if errors is None:
            by_value = None if twin is None else ErrorByValue(twin, samples)
            errors = _Errors(squares, size, by_value)
        weight += subject.task.weight(batch)
        for name, outputs in predictions.items():
            score = subject.task.metrics(_prediction(torch.stack(outputs), batch, once=once), batch)[subject.task.metric]
            totals[name] += subject.task.weight(batch) * float(score)
    assert errors is not None
    return {name: total / weight for name, total in totals.items()}, errors


def _prediction(outputs: Tensor, batch: Batch, *, once: bool) -> Tensor:
    if not once:
        return outputs
    last = torch.full((outputs.shape[1],), len(outputs) - 1) if batch.lengths is None else batch.lengths - 1
    return outputs[last, torch.arange(outputs.shape[1])]
