"""Matrices in int8: W = scale Q, with scale = max |W| / 127 for each matrix, or block of one that a product uses."""

import numpy as np
from numpy.typing import NDArray

from unfading.export.stage import Array, Stage
from unfading.fuse.ir.program import Block

Integers = NDArray[np.int64]


def block_entries(stage: Stage, block: Block) -> Array:
    """The entries of a block as [length, width], so that row i belongs to entry i of the vector."""
    part = stage.weights[block.weight][block.r0 : block.r1, block.c0 : block.c1]
    return part if block.transposed else part.T


def int8_of(matrix: Array) -> tuple[Integers, float]:
    """A matrix as int8 entries and their scale."""
    largest = float(np.abs(matrix).max(initial=0.0))
    scale = largest / 127 if largest else 1.0
    return np.round(matrix / scale).astype(np.int64), scale
