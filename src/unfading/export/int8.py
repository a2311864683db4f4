"""Matrices in int8: W = scale Q, with one scale for each matrix, or block of one that a product uses.

The scale is max |W| / 127. Where a smaller divisor n makes W = scale Q exact, with scale = max |W| / n, it is taken: a model
that was trained with rounded matrices keeps its weights, also where a block lacks the largest entry of its matrix.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from unfading.export.rebuild import rebuilt
from unfading.export.stage import Array, Stage
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Block, Op, TensorKind, Value

Integers = NDArray[np.int64]

LARGEST = 127
ROUNDING = 1e-4  # float32 has multiples of the scale up to 127 with errors of 1e-5


def block_entries(stage: Stage, block: Block) -> Array:
    """The entries of a block as [length, width], so that row i belongs to entry i of the vector."""
    part = stage.weights[block.weight][block.r0 : block.r1, block.c0 : block.c1]
    return part if block.transposed else part.T


def int8_of(matrix: Array) -> tuple[Integers, float]:
    """A matrix as int8 entries and their scale."""
    largest = float(np.abs(matrix).max(initial=0.0))
    if not largest:
        return np.zeros(matrix.shape, np.int64), 1.0
    exact = (n for n in range(LARGEST, 0, -1) if _is_rounded(matrix, largest / n))
    scale = largest / next(exact, LARGEST)
    return np.round(matrix / scale).astype(np.int64), scale


def _is_rounded(matrix: Array, scale: float) -> bool:
    """Whether all entries are multiples of the scale, up to the rounding of float32."""
    multiples = matrix / scale
    return bool((np.abs(multiples - np.round(multiples)) <= ROUNDING).all())


def with_int8(stage: Stage) -> Stage:
    """The same stage in floats, with the matrices and tables that C stores in int8 rounded to it."""
    b, weights = Builder(), list(stage.weights)
    blocks: dict[Block, Block] = {}
    for block in stage.program.blocks():  # a matrix each: two blocks of one weight may overlap, and have scales of their own
        entries, scale = int8_of(block_entries(stage, block))
        blocks[block] = Block(len(weights), 0, block.length, 0, block.width, transposed=True)
        weights.append(np.asarray(entries * scale, np.float64))
    new: dict[int, Value] = {}
    for value in stage.program.values():
        new[value.id] = rebuilt(b, value, new)
        if value.op is Op.DOT:
            new[value.id] = b.dot([(new[arg.id], blocks[block]) for arg, block in zip(value.args, value.blocks, strict=True)])
    stores = tuple(store._replace(value=new[store.value.id]) for store in stage.program.stores)
    widths = {**stage.program.widths, **{(TensorKind.WEIGHT, i): weight.size for i, weight in enumerate(weights)}}
    rounded_tables = {
        i: np.multiply(*int8_of(table)) if i in stage.short_tables else table for i, table in stage.tables.items()
    }
    program = stage.program._replace(stores=stores, widths=widths)
    return replace(stage, program=program, weights=tuple(weights), tables=rounded_tables)
