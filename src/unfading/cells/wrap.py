"""Wrapper cells: noise on the recurrence of any cell, drawn in `project` and applied in `step`.

    recurrent dropout:  W h_{t-1}  becomes  W (m * h_{t-1}) in every product of the step, m = Bernoulli(1 - rate) / (1 - rate),
                        one mask per row and matrix for all time (Gal & Ghahramani 2016). The state itself is not dropped, nor
                        the values inside DeepTransition's network; EquilibriumRNN has no product in its step. The masks of
                        convolutional cells drop whole channels.
    zoneout:            s_t = m_t * s_{t-1} + (1 - m_t) * step(s_{t-1}), m_t = Bernoulli(rate) for each step and each entry of
                        every part of the state (Krueger et al. 2017); in evaluation m_t is its expectation, the rate.

Layers have both as keyword arguments. Masks come from torch's global generator, like those of nn.Dropout.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.cells.base import Cell, in_frame
from unfading.cells.base import Inputs as AnyInputs
from unfading.cells.convolution import Convolution
from unfading.cells.matrix import BlockDiagonal, LowRank, Masked
from unfading.errors import check_share, check_type


class Inputs(NamedTuple):
    inner: Any  # the inputs of the wrapped cell
    masks: tuple[Tensor, ...]  # [1, B, n] per matrix, or [T, B, n] per part of the state; none in evaluation of dropout


class WrapperCell(Cell[AnyInputs, Any, Any]):
    """The common part of wrappers: everything except `project` and `step` comes from the wrapped cell."""

    def __init__(self, cell: Cell):
        check_type("cell", cell, Cell)
        super().__init__(cell.input_size, cell.output_size)
        self.cell = cell
        self.example_frame = cell.example_frame
        self.shared = tuple(f"inner.{name}" for name in cell.shared)

    @property
    def constant(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"inner.{name}" for name in self.cell.constant)

    def weights(self) -> Any:
        return self.cell.weights()

    def initial_state(self, batch: int) -> Any:
        return self.cell.initial_state(batch)

    def state_frame(self, frame: tuple[int, ...]) -> tuple[int, ...]:
        return self.cell.state_frame(frame)

    def output(self, state: Any) -> Tensor:
        return self.cell.output(state)

    def penalty(self) -> Tensor | None:
        return self.cell.penalty()


class NoiseCell(WrapperCell[Inputs]):
    """The common part of wrappers that draw masks."""

    def __init__(self, cell: Cell, rate: float):
        super().__init__(cell)
        check_share("rate", rate)
        self.rate = rate

    @property
    def noisy(self) -> bool:
        """Whether to draw masks: while the innermost cell, which belongs to the network, is in training mode."""
        return innermost(self).training


class RecurrentDropoutCell(NoiseCell):
    """Variational dropout on the inputs of a cell's recurrent matrices.

    Args:
        cell: the cell to wrap; its step must compute its products with `unfading.linear`, or with `unfading.convolve`.
        rate: probability of dropping an entry.
    """

    def __init__(self, cell: Cell, rate: float):
        super().__init__(cell, rate)
        if rate == 1.0:
            raise ValueError("rate=1.0 would drop the whole recurrence; take a rate below 1.")
        weights = cell.weights()
        # The number of columns of every matrix in the step.
        self.columns = {
            name: W.shape[1]
            for name, W in zip(weights._fields, weights, strict=True)
            if isinstance(W, LowRank | BlockDiagonal | Convolution) or (isinstance(W, Tensor) and W.dim() == 2)
        }
        if not self.columns:
            raise ValueError(f"{type(cell).__name__} has no recurrent matrix for recurrent dropout to act on.")

    @property
    def constant(self) -> tuple[str, ...]:  # type: ignore[override]
        masks = tuple(f"masks.{i}" for i in range(len(self.columns))) if self.noisy else ()
        return (*super().constant, *masks)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        inner = self.cell.project(x, start)
        if not self.noisy:
            return Inputs(inner, ())
        keep, state = 1 - self.rate, self.cell.initial_state(1)[0]
        pixel = (1,) * len(self.example_frame)
        return Inputs(inner, tuple(_bernoulli(state, keep, (1, x.shape[1], n, *pixel)) / keep for n in self.columns.values()))

    def step(self, inputs: Inputs, state: Any, weights: Any) -> Any:
        if not inputs.masks:
            return self.cell.step(inputs.inner, state, weights)
        masked = zip(self.columns, inputs.masks, strict=True)
        weights = weights._replace(**{name: Masked(getattr(weights, name), mask) for name, mask in masked})
        try:
            return self.cell.step(inputs.inner, state, weights)
        except (TypeError, AttributeError) as error:
            if "Masked" not in str(error):
                raise
            name, product = type(self.cell).__name__, "convolve" if self.example_frame else "linear"
            raise TypeError(
                f"recurrent dropout acts where {name}.step calls unfading.{product}(v, W); it uses one of "
                f"{', '.join(self.columns)} in another way ({error}). Write that product with {product}, or leave out the "
                "dropout."
            ) from error


class ZoneoutCell(NoiseCell):
    """Random entries of the state keep their value for a step.

    Args:
        cell: the cell to wrap.
        rate: probability that an entry keeps its value.
    """

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        state = in_frame(self.cell.initial_state(x.shape[1]), self.state_frame(x.shape[3:]))
        if self.noisy:
            masks = tuple(_bernoulli(part, self.rate, (x.shape[0], *part.shape)) for part in state)
        else:
            masks = tuple(part.new_full((), self.rate).expand(x.shape[0], *part.shape) for part in state)
        return Inputs(self.cell.project(x, start), masks)

    def step(self, inputs: Inputs, state: Any, weights: Any) -> Any:
        new = self.cell.step(inputs.inner, state, weights)
        return type(state)(*(m * old + (1 - m) * n for m, old, n in zip(inputs.masks, state, new, strict=True)))


def outputs_first_part(cell: Cell) -> bool:
    """Whether the output of a cell is the first part of its state, as it is unless a cell defines `output` itself."""
    return getattr(innermost(cell).output, "__func__", None) is Cell.output


def innermost(cell: Cell) -> Cell:
    """The cell inside all wrappers."""
    while isinstance(cell, WrapperCell):
        cell = cell.cell
    return cell


def _bernoulli(like: Tensor, share: float, shape: tuple[int, ...]) -> Tensor:
    """Ones with probability `share`, else zeros. Not in place, so that each model under vmap draws its own."""
    return torch.bernoulli(like.new_full(shape, share))
