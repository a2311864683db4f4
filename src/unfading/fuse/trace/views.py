"""Operations of torch that only move entries, in the language of programs: views, slices and concatenations."""

import math
from typing import Any

import torch

from unfading.fuse.ir.program import NotFusable
from unfading.fuse.trace.values import BATCH, TIME, Call, Matrix, Row, lead, without_rows

ops = torch.ops.aten


def reshape(call: Call) -> Any:
    x = call.args[0]
    if isinstance(x, Matrix) and tuple(call.out.shape) == (x.r1 - x.r0, x.c1 - x.c0) and not x.turned:
        return x
    row = call.row(0)
    if row.batched != (lead(call.out.shape) > 0) or math.prod(call.features()) != row.value.size:
        raise NotFusable(f"{call.packet} mixes rows with features")
    return call.made(call.build.reshape(row.value, call.features()))


def expand(call: Call) -> Row:
    row = call.row(0)
    if row.lead and lead(call.out.shape) != row.lead:
        raise NotFusable("an axis put in front of the rows")
    value = without_rows(call.build, row.value, len(row.value.shape) - len(call.features()))
    return call.made(call.build.expand(value, call.features()))


def permute(call: Call) -> Any:
    x = call.args[0]
    rank = 2 if isinstance(x, Matrix) else len(x.value.shape) + x.lead
    if call.packet is ops.permute:
        axes = [axis % rank for axis in call.args[1]]
    else:
        axes = list(range(rank))
        a, b = (0, 1) if call.packet is ops.t else (call.args[1] % rank, call.args[2] % rank)
        if rank > 1:
            axes[a], axes[b] = axes[b], axes[a]
    if isinstance(x, Matrix):
        return x.t() if axes == [1, 0] else x
    if axes[: x.lead] != list(range(x.lead)):
        raise NotFusable(f"{call.packet} moves the rows")
    return Row(call.build.permute(x.value, tuple(axis - x.lead for axis in axes[x.lead :])), x.lead)


def cut(call: Call, x: Any, axis: int, start: int, stop: int) -> Any:
    if isinstance(x, Matrix):
        return x.cut(axis % 2, start, stop)
    own = call.axis(axis, x)
    if own < 0:
        if (start, stop) == (0, extent(x, axis)):
            return x
        raise NotFusable(f"{call.packet} along the rows")
    return Row(call.build.slice(x.value, own, start, stop), x.lead)


def extent(x: Any, axis: int) -> int:
    if isinstance(x, Matrix):
        return (x.c1 - x.c0) if (axis % 2 == 1) != x.turned else (x.r1 - x.r0)
    shape = ((), (BATCH,), (TIME, BATCH))[x.lead] + x.value.shape
    return shape[axis]


def sliced(call: Call) -> Any:
    x, axis = call.args[0], call.argument(1, "dim", 0)
    size = extent(x, axis)
    start, stop, step = call.argument(2, "start") or 0, call.argument(3, "end"), call.argument(4, "step", 1)
    if step != 1:
        raise NotFusable("a slice with a stride")
    start, stop, _ = slice(start, stop).indices(size)
    return cut(call, x, axis, start, max(start, stop))


def select(call: Call) -> Row:
    x, axis, index = call.args
    size = extent(x, axis)
    piece = cut(call, x, axis, index % size, index % size + 1)
    row = Row(piece.entries(call.build), 0) if isinstance(piece, Matrix) else piece
    return call.made(call.build.reshape(row.value, call.features()))


def split(call: Call) -> list[Any]:
    x, axis = call.args[0], call.argument(2, "dim", 0)
    out, start = [], 0
    for piece in call.out:
        size = piece.shape[axis]
        out.append(cut(call, x, axis, start, start + size))
        start += size
    return out


def unbind(call: Call) -> list[Row]:
    x, axis = call.row(0), call.argument(1, "dim", 0)
    rows = [cut(call, x, axis, i, i + 1) for i in range(len(call.out))]
    return [call.made(call.build.reshape(row.value, call.features(out)), out) for row, out in zip(rows, call.out, strict=True)]


def cat(call: Call) -> Row:
    rows = [Row(x.entries(call.build), 0) if isinstance(x, Matrix) else x for x in call.args[0]]
    axis = call.argument(1, "dim", 0) % len(call.out.shape) - lead(call.out.shape)
    if axis < 0:
        raise NotFusable("torch.cat along the rows")
    if len({row.lead for row in rows}) > 1:
        raise NotFusable("torch.cat of a parameter with a value of each row; expand the parameter first")
    return call.made(call.build.cat([row.value for row in rows if row.value.size], axis))


def stack(call: Call) -> Row:
    rows = [Row(x.entries(call.build), 0) if isinstance(x, Matrix) else x for x in call.args[0]]
    axis = call.argument(1, "dim", 0) % len(call.out.shape) - lead(call.out.shape)
    if axis < 0 or len({row.lead for row in rows}) > 1:
        raise NotFusable("torch.stack along the rows, or of parameters with values")
    shapes = [row.value.shape[:axis] + (1,) + row.value.shape[axis:] for row in rows]
    pieces = [call.build.reshape(row.value, shape) for row, shape in zip(rows, shapes, strict=True)]
    return call.made(call.build.cat(pieces, axis))
