"""Which blocks of a weight a matrix is made of, after any views of the weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from unfading.fuse.ir.program import VIEWS, Block, Op, TensorKind, Value
from unfading.fuse.refusal import NotFusable


def blocks_of(matrix: Value, columns: Sequence[int]) -> list[Block]:
    """The blocks of which a matrix [n, m] is made, from left to right, as a dot v @ matrix takes them.

    Args:
        matrix: views of a weight; NotFusable for another value.
        columns: of each weight, as a matrix.
    """
    base = matrix
    while base.op in VIEWS:
        base = base.args[0]
    if base.op is not Op.LEAF or base.leaf.kind is not TensorKind.WEIGHT:
        raise NotFusable(
            "a matrix that the step itself computes is multiplied with a vector; compute it in weights(), once per call"
        )
    own = columns[base.leaf.index]
    entries = _positions(matrix)
    first, n = entries[0].tolist(), entries.shape[0]
    # Down the matrix, either along a row of the weight, and then to the right along its rows, or the other way round.
    along = n == 1 or int(entries[1, 0]) == first[0] + 1
    stride = own if along else 1
    starts = [j for j, position in enumerate(first) if j == 0 or position != first[j - 1] + stride]
    blocks = []
    for start, stop in zip(starts, [*starts[1:], len(first)], strict=True):
        r0, c0 = divmod(first[start], own)
        rows, width = (stop - start, n) if along else (n, stop - start)
        block = Block(base.leaf.index, r0, r0 + rows, c0, c0 + width, transposed=not along)
        grid = _numbers(r0, r0 + rows)[:, None] * own + _numbers(c0, c0 + width)
        if c0 + width > own or not torch.equal(grid.T if along else grid, entries[:, start:stop]):
            raise NotFusable("a matrix that is multiplied with a vector is not made of blocks of a weight [n, m]")
        blocks.append(block)
    return blocks


def _positions(value: Value) -> Tensor:
    """For each entry of a view of a weight, its position in the weight."""
    if value.op is Op.LEAF:
        return _numbers(value.leaf.start, value.leaf.stop)
    x = _positions(value.args[0])
    if value.op is Op.EXPAND:
        return x.expand(value.shape)
    if value.op is Op.RESHAPE:
        return x.reshape(value.shape)
    if value.op is Op.PERMUTE:
        return x.permute(value.axes)
    axis, start, stop = value.slice
    return x.narrow(axis, start, stop - start)


def _numbers(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, device="cpu")
