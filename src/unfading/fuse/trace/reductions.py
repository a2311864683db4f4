"""Rules for operations of torch that reduce over features: sums, means, norms, layer norm, softmax."""

import math

import torch
from torch import Tensor

from unfading.fuse.ir.program import Op
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace.values import Call, RowValue

ops = torch.ops.aten


def axes_of(call: Call, position: int, row: RowValue) -> list[int]:
    """The axes of the features that the argument `dim` names."""
    rank = len(row.value.shape) + row.lead
    dims = call.argument(position, "dim")
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    axes = [axis % rank - row.lead for axis in dims]
    if any(axis < 0 for axis in axes):
        raise NotFusable(f"{call.packet} runs over the batch; rows do not mix")
    return axes


def reduced(call: Call, op: Op, x: RowValue, axes: list[int], out: Tensor | None = None) -> RowValue:
    """A reduction in the shape that torch returned."""
    value = call.build.reduce(op, x.value, axes)
    return call.result(call.build.reshape(value, call.features(out)), out)


def total(call: Call) -> RowValue:
    x = call.row(0)
    return reduced(call, Op.SUM, x, axes_of(call, 1, x))


def mean(call: Call) -> RowValue:
    x = call.row(0)
    axes = axes_of(call, 1, x)
    count = math.prod(x.value.shape[axis] for axis in axes)
    return call.map(Op.MUL, reduced(call, Op.SUM, x, axes), 1 / count)


def largest(call: Call) -> RowValue:
    x = call.row(0)
    if call.packet is ops.amin:
        return call.map(Op.NEG, reduced(call, Op.AMAX, call.map(Op.NEG, x), axes_of(call, 1, x)))
    return reduced(call, Op.AMAX, x, axes_of(call, 1, x))


def norm(call: Call) -> RowValue:
    """(sum |x|^p)^(1/p), with gradient 0 where the norm is 0, as in torch."""
    x, order = call.row(0), float(call.argument(1, "ord", 2))
    axes = axes_of(call, 2, x)
    size = call.map(Op.ABS, x)
    if order == math.inf:
        return reduced(call, Op.AMAX, size, axes)
    if order < 1:  # below 1 the gradient has poles at 0, where torch returns 0
        raise NotFusable(f"a norm of order {order} is not supported; the order must be at least 1")
    total = reduced(call, Op.SUM, call.map(Op.POWER, size, attr=order), axes)
    return total if order == 1 else root(call, total, order)


def var_mean(call: Call) -> list[RowValue]:
    x = call.row(0)
    axes = axes_of(call, 1, x)
    count = math.prod(x.value.shape[axis] for axis in axes)
    correction = call.argument(2, "correction", 1)
    free = count - (1 if correction is None else float(correction))
    mean = RowValue(call.build.map(Op.MUL, call.build.reduce(Op.SUM, x.value, axes), 1 / count), x.lead)
    centred = call.map(Op.SUB, x, mean)
    out = call.out if isinstance(call.out, tuple) else (call.out, call.out)
    squares = reduced(call, Op.SUM, call.map(Op.MUL, centred, centred), axes, out[0])
    returned = call.result(call.build.reshape(mean.value, call.features(out[1])), out[1])
    return [call.map(Op.MUL, squares, 1 / free), returned]


def var(call: Call) -> RowValue:
    variance, _ = var_mean(call)
    return root(call, variance, 2.0) if call.packet is ops.std else variance


def root(call: Call, x: RowValue, order: float) -> RowValue:
    """x^(1/order), with gradient 0 where x is 0."""
    empty = call.map(Op.EQ, x, 0.0)
    return call.map(Op.WHERE, empty, 0.0, call.map(Op.POWER, call.map(Op.WHERE, empty, 1.0, x), attr=1 / order))


def layer_norm(call: Call) -> list[RowValue]:
    x, (shape, gain, shift, epsilon) = call.row(0), call.args[1:]
    axes = list(range(len(x.value.shape) - len(shape), len(x.value.shape)))
    count = math.prod(shape)
    b = call.build
    mean = RowValue(b.map(Op.MUL, b.reduce(Op.SUM, x.value, axes), 1 / count), x.lead)
    centred = call.map(Op.SUB, x, mean)
    variance = RowValue(b.map(Op.MUL, b.reduce(Op.SUM, b.map(Op.MUL, centred.value, centred.value), axes), 1 / count), x.lead)
    scale = call.map(Op.RECIP, call.map(Op.SQRT, call.map(Op.ADD, variance, epsilon)))
    y = call.map(Op.MUL, centred, scale)
    y = y if gain is None else call.map(Op.MUL, y, gain)
    return [y if shift is None else call.map(Op.ADD, y, shift), mean, scale]


def softmax(call: Call) -> RowValue:
    x = call.row(0)
    axis = call.axis(call.args[1], x)
    if axis < 0:
        raise NotFusable(f"{call.packet} runs over the batch; rows do not mix")
    b = call.build
    largest = RowValue(b.map(Op.STOP, b.reduce(Op.AMAX, x.value, [axis])), x.lead)
    centred = call.map(Op.SUB, x, largest)
    e = call.map(Op.EXP, centred)
    total = RowValue(b.reduce(Op.SUM, e.value, [axis]), x.lead)
    return call.map(Op.SUB, centred, call.map(Op.LOG, total)) if call.packet is ops._log_softmax else call.map(Op.DIV, e, total)
