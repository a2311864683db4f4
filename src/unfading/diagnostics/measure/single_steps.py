"""Refuse measurements that project single steps, or parts of a sequence, of a cell whose projection needs the whole of it."""

from unfading.cells.base import Cell
from unfading.cells.wrap import innermost
from unfading.fuse.locality import locality


def check_single_steps(cell: Cell, steps: int, *, reverse: bool = False) -> None:
    """Raise ValueError unless the projection of a sequence is that of its steps, one by one.

    Args:
        cell: the cell that is measured.
        steps: of the sequence.
        reverse: whether it is run from its last step to its first.
    """
    refusal = locality(cell, steps, reverse=reverse).refusal
    if refusal is not None:
        raise ValueError(f"{type(innermost(cell)).__name__} cannot be measured at single steps: {refusal}.")
