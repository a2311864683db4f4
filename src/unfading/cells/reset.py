"""Resets: a wrapper cell that sets the state of some rows to its initial value before a step.

    s'_{t-1} = s_0 where r_t, else s_{t-1}              r_t in {0, 1} for each row
    s_t = step(x_t, s'_{t-1})

The mask r is one more feature of the input, behind the cell's own. Whatever cuts, reverses, batches or records the input does
the same to the mask, and the derivative of `where` stops gradients at a reset.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.wrap import WrapperCell
from unfading.errors import cell_name


class Inputs(NamedTuple):
    inner: Any  # the inputs of the wrapped cell
    reset: Tensor  # [T, B, 1], 1 before whose steps the state is reset, else 0


class Weights(NamedTuple):
    inner: Any  # the weights of the wrapped cell
    initial: tuple[Tensor, ...]  # [n] for each part of the state


class ResetCell(WrapperCell[Inputs]):
    """A cell whose input has one more feature, the mask of resets.

    Args:
        cell: the cell to wrap.
        learned: the learned initial states of a stack, or None where the cell's own is used.
        first: the index of the first of them that belongs to this cell.
    """

    def __init__(self, cell: Cell, learned: nn.ParameterList | None = None, first: int = 0):
        super().__init__(cell)
        self.input_size += 1
        self.learned = learned
        self.first = first

    @property
    def described_as(self) -> str:
        """The name in messages: that of the wrapped cell, since a layer adds this wrapper by itself."""
        return cell_name(self.cell)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        I = self.cell.input_size
        reset = x[:, :, I:]
        return Inputs(self.cell.project(x[:, :, :I], start), reset[..., :1, :1] if self.example_frame else reset)

    def weights(self) -> Weights:
        initial = self.cell.initial_state(1)
        if self.learned is None:
            return Weights(self.cell.weights(), tuple(part[0] for part in initial))
        return Weights(self.cell.weights(), tuple(self.learned[self.first + i] for i in range(len(initial))))

    def step(self, inputs: Inputs, state: Any, weights: Weights) -> Any:
        begins = inputs.reset > 0.5
        parts = zip(weights.initial, state, strict=True)
        state = type(state)(*(torch.where(begins, initial, part) for initial, part in parts))
        return self.cell.step(inputs.inner, state, weights.inner)


def with_resets(x: Tensor, resets: Tensor) -> Tensor:
    """The input of a `ResetCell`: x [T, B, I] or [T, B, I, height, width], and resets [T, B] behind its features."""
    column = resets.to(x.dtype).reshape(*resets.shape, *[1] * (x.dim() - 2))
    return torch.cat([x, column.expand(*x.shape[:2], 1, *x.shape[3:])], dim=2)
