"""The adjustments of a cell that change how much gradient passes through it: a factor for a matrix, a shift for a bias.

With a number q for each adjustment, zero for no change:

    W <- exp(q) W                a matrix, as a whole
    b <- b + q                   a vector or a scalar; if it holds several gates, each block of H rows has its own adjustment

Only the names and sizes of a cell's parameters are known here. The effect of an adjustment is found by measuring it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.diagnostics.measure.lattice_step import Parameters


class Adjustment(NamedTuple):
    """A factor for one matrix, or a shift of one block of a bias.

    Args:
        name: of the parameter.
        rows: the rows of a vector that are shifted; None for a matrix, which is multiplied.
    """

    name: str
    rows: slice | None

    def __str__(self) -> str:
        return self.name if self.rows is None else f"{self.name}[{self.rows.start}:{self.rows.stop}]"


def cell_adjustments(cell: Cell) -> list[Adjustment]:
    """All adjustments of the trainable parameters of a cell."""
    adjustments: list[Adjustment] = []
    for name, value in cell.named_parameters():
        if not value.requires_grad:
            continue
        if value.dim() > 1 and min(value.shape) > 1:
            adjustments.append(Adjustment(name, None))
        else:
            H, n = cell.output_size, value.numel()
            size = H if n % H == 0 else n
            adjustments += [Adjustment(name, slice(start, start + size)) for start in range(0, n, size)]
    return adjustments


def input_matrices(cell: Cell) -> set[str]:
    """The names of the matrices that multiply the input of a cell: those that `project` depends on."""
    names = {adjustment.name for adjustment in cell_adjustments(cell) if adjustment.rows is None}
    matrices = {name: value for name, value in cell.named_parameters() if name in names}
    like = cell.initial_state(1)[0]
    with torch.enable_grad():
        inputs = cell.project(torch.ones(1, 1, cell.input_size, dtype=like.dtype, device=like.device))
        fields = [field.sum() for field in _pytree.tree_leaves(inputs) if field.requires_grad]
        if not fields or not matrices:
            return set()
        gradients = torch.autograd.grad(torch.stack(fields).sum(), list(matrices.values()), allow_unused=True)
    return {name for name, gradient in zip(matrices, gradients, strict=True) if gradient is not None}


def adjusted(theta: Parameters, changes: Sequence[tuple[Adjustment, Tensor]]) -> dict[str, Tensor]:
    """The parameters with each of the adjustments applied by its q, a scalar tensor."""
    new = dict(theta)
    for adjustment, q in changes:
        value = new[adjustment.name]
        q = q.to(value.dtype)
        if adjustment.rows is None:
            new[adjustment.name] = value * q.exp()
        else:
            mask = torch.zeros(value.numel(), dtype=value.dtype, device=value.device)
            mask[adjustment.rows] = 1.0
            new[adjustment.name] = value + q * mask.reshape(value.shape)
    return new
