"""What makes a cell compilable, tested on data: every row is computed from its own numbers, whatever stands beside it.

A trace shows which operations a method runs on tensors of two large sizes. A method may still branch on a size or on the index
of a step (`if x.shape[0] == 1`), or reach other rows in a way that the trace takes for its own row. So `project` and `step` are
run on random rows in tensors of several shapes, from several starts. A row must give the same result in all of them.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.ir.program import Program
from unfading.fuse.isolation import numbers
from unfading.fuse.locality import TOLERANCE, fields_of, same
from unfading.fuse.refusal import NotFusable
from unfading.reference import leaf_names
from unfading.source_lines import definition_line

ROWS = 320
SHAPES = ((1, 1, 3), (2, 3, 1), (3, 2, 4), (4, 1, 5), (1, 4, 6), (5, 1, 7), (16, 20, 2), (1, ROWS, 1000))  # T, B, start
BATCHES = (1, 2, 3, 4, 7)
TF32_TOLERANCE = 1e-2  # on a GPU whose float32 products round their factors to three digits


def check_rows_of_project(cell: Cell, like: Tensor) -> None:
    """Raise NotFusable if a field of `project` depends on more than x at its row and step.

    Args:
        cell: a copy, whose parameters have values.
        like: a tensor of the cell's device and dtype.
    """
    x = _random((ROWS, 1, cell.input_size), like, seed=0)
    line = definition_line(cell.project)
    whole = fields_of(cell, x, 0)
    for T, B, start in SHAPES:
        part = fields_of(cell, x[: T * B].reshape(T, B, -1), start)
        for name in part.keys() - {*cell.shared}:
            rows = part[name].flatten(0, 1)
            if not same(rows, whole[name].flatten(0, 1)[: T * B], _tolerance(rows)):
                reason = f"the field {name} of project depends on other rows, on their number or on the index of the step"
                raise NotFusable(reason, line)
    other = fields_of(cell, _random(tuple(x.shape), like, seed=1), 0)
    for name in cell.shared:
        if not same(other[name], whole[name], _tolerance(whole[name])):
            raise NotFusable(f"the shared field {name} of project depends on x, hence on one row or on all of them", line)


def check_rows_of_step(example: "StepExample") -> None:
    """Raise NotFusable if a state after a step depends on other rows, or on how many there are."""
    for batch in BATCHES:
        parts = zip(example.step(batch), example.whole, strict=True)
        if not all(same(rows, all_rows[:batch], _tolerance(rows)) for rows, all_rows in parts):
            reason = "a row's state depends on other rows, or on how many there are; a compiled step knows one row"
            raise NotFusable(reason, definition_line(example.cell.step))


def check_program(example: "StepExample", program: Program, tensors: Sequence[Tensor], *, projected: bool) -> None:
    """Raise NotFusable unless a program computes what the step computes.

    A trace runs on tensors without data, with gradients. A method may ask for more than the operations on a tensor show: its
    device, whether it requires a gradient, whether gradients are enabled. Then the recorded branch is not the one that runs.

    Args:
        example: of the step.
        program: of the step, or of projection and step together.
        tensors: the weights that the program reads.
        projected: whether the program contains the projection.
    """
    shared = [row for name, row in zip(example.names, example.leaves, strict=True) if name in example.cell.shared]
    rows = [example.x, *shared] if projected else example.leaves
    for part, want in zip(next_states(program, rows, list(example.state), tensors), example.whole, strict=True):
        size = want.nan_to_num(0.0, 0.0, 0.0).abs().amax().item()
        equal = torch.isclose(part, want, rtol=0.0, atol=10 * _tolerance(want) * size, equal_nan=True).all(-1)
        if equal.sum() < 0.9 * ROWS:  # rounding may decide a comparison in a few rows
            reason = "the step computes something else on tensors without data, on which it is recorded"
            raise NotFusable(reason, definition_line(example.cell.step))


class StepExample:
    """The second step of a random sequence of ROWS rows.

    The state before it is what the first step returns, plus random numbers: a part of a state may be zero at all times.

    Args:
        cell: a copy, whose parameters have values.
        weights: those that the step reads.
        like: a tensor of the cell's device and dtype.
    """

    def __init__(self, cell: Cell, weights: Any, like: Tensor):
        self.cell, self.weights = cell, weights
        x = _random((2, ROWS, cell.input_size), like, seed=0)
        inputs = cell.project(x)
        fields, self.tree = _pytree.tree_flatten(inputs)
        self.names = leaf_names(inputs)
        first, self.leaves = (
            [field[0 if name in cell.constant else t] for name, field in zip(self.names, fields, strict=True)] for t in range(2)
        )
        self.x = x[1]
        state = cell.step(_pytree.tree_unflatten(first, self.tree), cell.initial_state(ROWS), weights)
        self.state = type(state)(*(rows + _random(rows.shape, like, seed=i + 1) for i, rows in enumerate(state)))

    @cached_property
    def whole(self) -> Any:
        """The state after the step, of all rows."""
        return self.step(ROWS)

    def step(self, batch: int) -> Any:
        """The state after the step, computed from the first rows alone."""
        inputs = _pytree.tree_unflatten([rows[:batch] for rows in self.leaves], self.tree)
        return self.cell.step(inputs, type(self.state)(*(rows[:batch] for rows in self.state)), self.weights)


def _random(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    return 4 * (numbers(torch.zeros(1), seed, math.prod(shape)).reshape(tuple(shape)) - 0.5).to(like)


def _tolerance(tensor: Tensor) -> float:
    rounded = tensor.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return TF32_TOLERANCE if rounded else TOLERANCE[tensor.dtype]
