"""Rules for operations of torch that only move entries: views, slices and concatenations."""

import math
from itertools import accumulate, pairwise
from typing import Any

import torch

from unfading.fuse.ir.program import Value
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace.values import Call, MatrixView, Moved, RowValue, as_row, without_row_axes

ops = torch.ops.aten


def reshape(call: Call) -> Any:
    x = call.args[0]
    if isinstance(x, MatrixView) and tuple(call.out.shape) == (x.r1 - x.r0, x.c1 - x.c0) and not x.transposed:
        return x
    if isinstance(x, Moved):
        return _reshape_moved(call, x)
    row = call.row(0)
    if row.batched != (call.example.row_axes(call.out.shape) > 0) or math.prod(call.features()) != row.value.size:
        raise NotFusable(f"{call.packet} mixes rows of the batch with features")
    return call.result(call.build.reshape(row.value, call.features()))


def _reshape_moved(call: Call, x: Moved) -> Any:
    shape, rows = tuple(call.out.shape), call.tensors[0].shape[x.at]  # no feature size equals the number of rows
    at = shape.index(rows) if rows in shape else 0
    before, after = shape[:at], shape[at + 1 :]
    if rows not in shape or math.prod(before) != math.prod(x.value.shape[: x.at]):
        raise NotFusable(f"{call.packet} mixes rows of the batch with features")
    return _with_batch_at(call.build.reshape(x.value, before + after), at)


def _with_batch_at(value: Value, at: int) -> RowValue | Moved:
    return Moved(value, at) if at else RowValue(value, 1)


def expand(call: Call) -> Any:
    if isinstance(call.args[0], Moved) and call.out.shape == call.tensors[0].shape:
        return call.args[0]
    row = call.row(0)
    if row.lead and call.example.row_axes(call.out.shape) != row.lead:
        raise NotFusable("an axis is added in front of the batch")
    value = without_row_axes(call.build, row.value, len(row.value.shape) - len(call.features()))
    return call.result(call.build.expand(value, call.features()))


def permute(call: Call) -> Any:
    x = call.args[0]
    lead = 1 if isinstance(x, Moved) else 0 if isinstance(x, MatrixView) else x.lead
    rank = 2 if isinstance(x, MatrixView) else len(x.value.shape) + lead
    if call.packet is ops.permute:
        axes = [axis % rank for axis in call.args[1]]
    else:
        axes = list(range(rank))
        a, b = (0, 1) if call.packet is ops.t else (call.args[1] % rank, call.args[2] % rank)
        if rank > 1:
            axes[a], axes[b] = axes[b], axes[a]
    if isinstance(x, MatrixView):
        return x.t() if axes == [1, 0] else x
    if lead == 1:
        at = x.at if isinstance(x, Moved) else 0
        value = call.build.permute(x.value, tuple(axis - (axis > at) for axis in axes if axis != at))
        return _with_batch_at(value, axes.index(at))
    if axes[: x.lead] != list(range(x.lead)):
        raise NotFusable(f"{call.packet} moves the batch axis")
    return RowValue(call.build.permute(x.value, tuple(axis - x.lead for axis in axes[x.lead :])), x.lead)


def cut(call: Call, x: Any, axis: int, start: int, stop: int) -> Any:
    """Entries start..stop along an axis of the tensor."""
    if isinstance(x, MatrixView):
        return x.cut(axis % 2, start, stop)
    x = as_row(call.build, x)
    own = call.axis(axis, x)
    if own < 0:
        if (start, stop) == (0, extent(call, x, axis)):
            return x
        raise NotFusable(f"{call.packet} cuts the batch; rows do not mix")
    return RowValue(call.build.slice(x.value, own, start, stop), x.lead)


def extent(call: Call, x: Any, axis: int) -> int:
    """The size of an axis of the tensor."""
    if isinstance(x, MatrixView):
        return (x.c1 - x.c0) if (axis % 2 == 1) != x.transposed else (x.r1 - x.r0)
    x = as_row(call.build, x)
    example = call.example
    shape = ((), (example.batch,), (example.time, example.batch))[x.lead] + x.value.shape
    return shape[axis]


def sliced(call: Call) -> Any:
    x, axis = call.args[0], call.argument(1, "dim", 0)
    size = extent(call, x, axis)
    start, stop, step = call.argument(2, "start") or 0, call.argument(3, "end"), call.argument(4, "step", 1)
    if step != 1:
        raise NotFusable("a slice with a stride is not supported")
    start, stop, _ = slice(start, stop).indices(size)
    return cut(call, x, axis, start, max(start, stop))


def select(call: Call) -> RowValue:
    x, axis, index = call.args
    size = extent(call, x, axis)
    piece = cut(call, x, axis, index % size, index % size + 1)
    row = as_row(call.build, piece)
    return call.result(call.build.reshape(row.value, call.features()))


def split(call: Call) -> list[Any]:
    x, axis = call.args[0], call.argument(2, "dim", 0)
    stops = list(accumulate(piece.shape[axis] for piece in call.out))
    return [cut(call, x, axis, start, stop) for start, stop in pairwise([0, *stops])]


def unbind(call: Call) -> list[RowValue]:
    x, axis = call.row(0), call.argument(1, "dim", 0)
    rows = [cut(call, x, axis, i, i + 1) for i in range(len(call.out))]
    return [
        call.result(call.build.reshape(row.value, call.features(out)), out) for row, out in zip(rows, call.out, strict=True)
    ]


def cat(call: Call) -> RowValue:
    rows = [as_row(call.build, x) for x in call.args[0]]
    axis = call.argument(1, "dim", 0) % len(call.out.shape) - call.example.row_axes(call.out.shape)
    if axis < 0:
        raise NotFusable("torch.cat along the batch; rows do not mix")
    if len({row.lead for row in rows}) > 1:
        raise NotFusable("torch.cat of a parameter with a batched value; expand the parameter to the batch first")
    return call.result(call.build.cat([row.value for row in rows if row.value.size], axis))


def stack(call: Call) -> RowValue:
    rows = [as_row(call.build, x) for x in call.args[0]]
    axis = call.argument(1, "dim", 0) % len(call.out.shape) - call.example.row_axes(call.out.shape)
    if axis < 0:
        raise NotFusable("torch.stack along the batch; rows do not mix")
    if len({row.lead for row in rows}) > 1:
        raise NotFusable("torch.stack of a parameter with a batched value; expand the parameter to the batch first")
    shapes = [row.value.shape[:axis] + (1,) + row.value.shape[axis:] for row in rows]
    pieces = [call.build.reshape(row.value, shape) for row, shape in zip(rows, shapes, strict=True)]
    return call.result(call.build.cat(pieces, axis))
