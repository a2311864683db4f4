"""What of a cell can be turned to let more or less gradient through: a factor on every matrix, a shift of every bias.

With q a number for each adjustment, zero where nothing is turned:

    W <- exp(q) W                a matrix, as a whole
    b <- b + q                   a vector or a scalar; where it holds several gates, each block of H rows has its own adjustment

Nothing is known of a cell but its parameters and its sizes: what a bias opens or shifts is found by turning it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.diagnostics.measure.lattice_step import Parameters


class Adjustment(NamedTuple):
    """One thing to turn.

    Args:
        name: of the parameter.
        rows: of a vector, those that are shifted; None for a matrix, which is multiplied.
    """

    name: str
    rows: slice | None

    def __str__(self) -> str:
        return self.name if self.rows is None else f"{self.name}[{self.rows.start}:{self.rows.stop}]"


def adjustments(cell: Cell) -> list[Adjustment]:
    """Everything that can be turned in a cell, of what is trained."""
    found: list[Adjustment] = []
    for name, value in cell.named_parameters():
        if not value.requires_grad:
            continue
        if value.dim() > 1 and min(value.shape) > 1:
            found.append(Adjustment(name, None))
        else:
            H, n = cell.output_size, value.numel()
            size = H if n % H == 0 else n
            found += [Adjustment(name, slice(start, start + size)) for start in range(0, n, size)]
    return found


def input_matrices(cell: Cell) -> set[str]:
    """The matrices with which a cell reads its input: those that `project` depends on."""
    own = {adjustment.name for adjustment in adjustments(cell) if adjustment.rows is None}
    matrices = {name: value for name, value in cell.named_parameters() if name in own}
    like = cell.initial_state(1)[0]
    with torch.enable_grad():
        inputs = cell.project(torch.ones(1, 1, cell.input_size, dtype=like.dtype, device=like.device))
        fields = [field.sum() for field in _pytree.tree_leaves(inputs) if field.requires_grad]
        if not fields or not matrices:
            return set()
        gradients = torch.autograd.grad(torch.stack(fields).sum(), list(matrices.values()), allow_unused=True)
    return {name for name, gradient in zip(matrices, gradients, strict=True) if gradient is not None}


def turned(theta: Parameters, turns: Sequence[tuple[Adjustment, Tensor]]) -> dict[str, Tensor]:
    """Parameters by name, and the same with some adjustments turned by q, a scalar each."""
    new = dict(theta)
    for adjustment, q in turns:
        value = new[adjustment.name]
        q = q.to(value.dtype)
        if adjustment.rows is None:
            new[adjustment.name] = value * q.exp()
        else:
            where = torch.zeros(value.numel(), dtype=value.dtype, device=value.device)
            where[adjustment.rows] = 1.0
            new[adjustment.name] = value + q * where.reshape(value.shape)
    return new
