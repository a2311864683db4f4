"""Running a compiled step where no gradient is wanted: weights packed once, and nothing stored but what is returned.

A long sequence is run in pieces of time that stay in the cache: the states of a piece's steps live in memory that the next
piece uses again. The first touch of fresh memory costs more than the arithmetic.
"""

from typing import Any

from torch import Tensor

from unfading.cells.base import Cell
from unfading.cells.wrap import WrapperCell
from unfading.fuse.bind import check, gather_inputs, gather_weights
from unfading.fuse.c.kernel import Walk
from unfading.fuse.ir.program import InputKind
from unfading.fuse.plan import Plan, kernel
from unfading.lengths import zero_past

PIECE = 1 << 21  # bytes of inputs and states in one piece


class Inference:
    """A compiled step with its weights, packed for as long as this lives."""

    def __init__(self, found: Plan, cell: Cell, weights: Any):
        self.plan, self.cell = found, cell
        self.kernel = kernel(found.key, found.signature.dtype)
        self.weights = [leaf.detach().contiguous() for leaf in gather_weights(found, cell, weights)]
        self.packed = self.kernel.packed(self.kernel.infer, self.weights)
        # Whether the output is the first part of the state: then the kernel writes it where it is to be.
        self.direct = type(cell).output is Cell.output and cell.output_size == found.signature.states[0]

    def outputs(self, x: Tensor, state: Any, *, lengths: Tensor | None, reverse: bool, start: int) -> tuple[Tensor, Any]:
        """`cell.output` of every step, and the final state."""
        T, B = x.shape[:2]
        cell, states = self.cell, list(state)
        steps = self._steps(B) if self._can_be_cut(lengths, reverse=reverse) else T
        walk = Walk.of(lengths, reverse)
        output = self.kernel.blank(state[0], (T, B, cell.output_size), walk)
        begins = range(0, T, steps)
        for a in reversed(begins) if reverse else begins:
            b = min(a + steps, T)
            inputs = gather_inputs(self.plan, cell, x[a:b], start + (T - b if reverse else a), {})
            check(self.plan, cell, [*inputs, *states, *self.weights])
            trajectory, states, _ = self.kernel.forward(
                inputs, states, self.weights, walk.of_piece(a), keep=False, packed=self.packed,
                first=output[a:b] if self.direct else None,
            )  # fmt: skip
            if not self.direct:
                made = cell.output(type(state)(*trajectory))
                if made.shape[-1] != cell.output_size:
                    return made, type(state)(*states)  # the layer says what is wrong with it
                output[a:b] = made
        if lengths is not None and not self.direct:
            output = zero_past(output, lengths)
        return output, type(state)(*states)

    def _steps(self, batch: int) -> int:
        """How many steps of a sequence make up one piece."""
        signature = self.plan.signature
        width = sum(n for n, kind in zip(signature.inputs, signature.kinds, strict=True) if kind == InputKind.SEQUENCE)
        return max(1, PIECE // (batch * (width + sum(signature.states)) * signature.dtype.itemsize))

    def _can_be_cut(self, lengths: Tensor | None, *, reverse: bool) -> bool:
        """Whether pieces of time make the whole: not where one draw of noise serves all of it; and backwards only where the
        number of a step does not matter, for there pieces are numbered in the order they are run."""
        cell = self.cell
        drawn = isinstance(cell, WrapperCell) and cell.noisy
        numbered = not self.plan.with_project or (cell.shared and lengths is not None)
        return not drawn and not cell.constant and not (reverse and numbered)
