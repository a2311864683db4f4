"""Matrices that are the transpose of another one, in parts and up to sign, as blocks of it: each parameter is stored once.

The matrix alpha I - A A^T + B C^T - C B^T of the stable incremental RNN has the factors

    left = [-A, B, -C]        right = [A, C, B]^T

The columns of `left` are rows of `right`, or their negatives. The product with `right` becomes three, with A^T, C^T and B^T,
and the one with `left` a sum over the same blocks, transposed. `Arrays.add_matrix` finds that they are stored already.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unfading.export.int8 import block_entries
from unfading.export.rebuild import rebuilt
from unfading.export.stage import Array, Stage
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.passes import join_dots
from unfading.fuse.ir.program import Block, Op, Value

LEAST = 64  # entries of a run: the further products of each take about as many bytes of code


class MatchingRows(NamedTuple):
    """Consecutive rows of one matrix, which are consecutive columns of another one, or their negatives."""

    start: int  # among the rows
    column: int
    length: int
    negative: bool


class SharedBlock(NamedTuple):
    """A block whose rows, as `block_entries` gives them, are all columns of another block."""

    block: Block
    of: Block
    runs: tuple[MatchingRows, ...]


def share_transposes(stage: Stage) -> Stage:
    """The same stage, in which a matrix whose rows are columns of another one, or their negatives, consists of its blocks."""
    while (shared := _first_shared(stage)) is not None:
        stage = _rewritten(stage, shared)
    return stage


def _first_shared(stage: Stage) -> SharedBlock | None:
    blocks = stage.program.blocks()
    for of in blocks:
        columns = {key: (i, negative) for i, (key, negative) in enumerate(map(_key, block_entries(stage, of).T))}
        for block in blocks:
            same_tensor = block.weight == of.weight  # nothing would be saved, or it is rewritten already
            if same_tensor or block.width != of.length or block.length > of.width:
                continue
            runs = _runs(block_entries(stage, block), columns)
            if runs is not None and block.length * block.width >= LEAST * len(runs):
                return SharedBlock(block, of, runs)
    return None


def _key(row: Array) -> tuple[bytes, bool]:
    """The entries of a vector up to its sign, and whether they are negated for that."""
    entries = row[np.flatnonzero(row)[:1]]
    negative = bool(entries.size and entries[0] < 0)
    return ((-row if negative else row) + 0.0).tobytes(), negative


def _runs(rows: Array, columns: dict[bytes, tuple[int, bool]]) -> tuple[MatchingRows, ...] | None:
    runs: list[MatchingRows] = []
    for i, (key, negative) in enumerate(map(_key, rows)):
        if key not in columns:
            return None
        column, of_negative = columns[key]
        last = runs[-1] if runs else None
        flipped = negative != of_negative
        if last is not None and (last.column + last.length, last.negative) == (column, flipped):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(MatchingRows(i, column, 1, flipped))
    return tuple(runs)


def _rewritten(stage: Stage, shared: SharedBlock) -> Stage:
    b = Builder()
    ends = sorted({0, shared.of.width, *(end for run in shared.runs for end in (run.column, run.column + run.length))})
    new: dict[int, Value] = {}
    for value in stage.program.values():
        result = rebuilt(b, value, new)
        if value.op is Op.DOT and shared.block in value.blocks:
            parts = zip((new[arg.id] for arg in value.args), value.blocks, strict=True)
            result = b.dot([part for v, block in parts for part in _parts(b, v, block, shared)])
        if value.op is Op.DOT and shared.of in value.blocks:
            result = b.cat([b.slice(result, 0, start, stop) for start, stop in pairwise(ends)], 0)
        new[value.id] = result
    stores = tuple(store._replace(value=new[store.value.id]) for store in stage.program.stores)
    return stage.with_program(join_dots(b, stage.program._replace(stores=stores)), stage.weights)


def _parts(b: Builder, v: Value, block: Block, shared: SharedBlock) -> Sequence[tuple[Value, Block]]:
    """The factors of a dot in the place of one with the block that is shared."""
    if block != shared.block:
        return [(v, block)]
    parts = []
    for run in shared.runs:
        entries = b.slice(v, 0, run.start, run.start + run.length)
        of = shared.of.columns(run.column, run.column + run.length)
        parts.append((b.map(Op.NEG, entries) if run.negative else entries, of._replace(transposed=not of.transposed)))
    return parts
