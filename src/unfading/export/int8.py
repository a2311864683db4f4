"""Matrices in int8: W = scale Q, with scale = max |W| / 127 for each matrix, or block of one that a product uses."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from unfading.export.rebuild import rebuilt
from unfading.export.stage import Array, Stage
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Block, Op, TensorKind, Value

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
