"""Running a compiled step where no gradient is wanted: weights packed once, and nothing stored but what is returned.

A long sequence is run in pieces of time that stay in the cache: what `project` makes of a piece, and the states of its
steps, live in memory that the next piece uses again. The first touch of fresh memory costs more than the arithmetic.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unfading.cells.base import Cell
from unfading.cells.wrap import WrapperCell
from unfading.fuse.gather import check, gather_inputs, gather_weights
from unfading.fuse.kernel import Walk
from unfading.fuse.plan import Plan, kernel

PIECE = 1 << 21  # bytes of projected input and states in one piece


class Inference:
    """A compiled step with its weights, packed for as long as this lives."""

    def __init__(self, found: Plan, cell: Cell, weights: Any):
        self.plan, self.cell = found, cell
        self.kernel = kernel(found.key, found.signature.dtype)
        self.weights = [leaf.detach().contiguous() for leaf in gather_weights(found, cell, weights)]
        self.packed = self.kernel.packed(self.kernel.infer, self.weights)

    def run(self, x: Tensor, states: Sequence[Tensor], start: int, walk: Walk) -> tuple[list[Tensor], list[Tensor]]:
        """The states after every step, and the final ones."""
        inputs = gather_inputs(self.plan, self.cell, x, start, {})
        check(self.plan, self.cell, [*inputs, *states, *self.weights])
        trajectory, final, _ = self.kernel.forward(inputs, states, self.weights, walk, keep=False, packed=self.packed)
        return trajectory, final


def steps_of_a_piece(found: Plan, batch: int) -> int:
    """How many steps of a sequence make up one piece."""
    signature = found.signature
    width = sum(n for n, kind in zip(signature.inputs, signature.kinds, strict=True) if kind == "sequence")
    return max(1, PIECE // (batch * (width + sum(signature.states)) * signature.dtype.itemsize))


def can_be_cut(cell: Cell, *, lengths: Tensor | None, reverse: bool) -> bool:
    """Whether pieces of time make the whole: not where one draw of noise serves all of it, and not backwards where rows of
    different lengths are at different steps at the same time, and the step matters."""
    drawn = isinstance(cell, WrapperCell) and cell.training
    return not drawn and not cell.constant and not (reverse and lengths is not None and cell.shared)


def outputs_in_pieces(
    inference: Inference, x: Tensor, state: Any, *, steps: int, lengths: Tensor | None, reverse: bool, start: int
) -> tuple[Tensor, Any]:
    """`cell.output` of every step, and the final state."""
    T, B = x.shape[:2]
    cell = inference.cell
    output = inference.kernel.advised(state[0].new_empty((T, B, cell.output_size)))
    states: Sequence[Tensor] = state
    begins = range(0, T, steps)
    for a in reversed(begins) if reverse else begins:
        b = min(a + steps, T)
        own = None if lengths is None else lengths - a  # a kernel takes those below 0 as ended, or not yet begun
        trajectory, states = inference.run(x[a:b], states, start + (T - b if reverse else a), Walk.of(own, reverse))
        output[a:b] = cell.output(type(state)(*trajectory))
    return output, type(state)(*states)
