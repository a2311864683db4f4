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


def real_row(call: Call) -> RowValue:
    """The first argument, for an operation that torch does not have for bools and integers."""
    x = call.row(0)
    if x.dtype not in (call.dtype, None):
        raise NotFusable(f"{call.packet} of {x.dtype} is not supported")
    return x


def reduced(call: Call, op: Op, x: RowValue, axes: list[int], out: Tensor | None = None) -> RowValue:
    """A reduction in the shape that torch returned."""
    value = call.build.reduce(op, x.value, axes)
    return call.result(call.build.reshape(value, call.features(out)), out)


def total(call: Call) -> RowValue:
    x = call.row(0)
    if call.out.dtype == torch.bool:
        raise NotFusable(f"{call.packet} in torch.bool is not supported")
    return reduced(call, Op.SUM, x, axes_of(call, 1, x))


def mean(call: Call) -> RowValue:
    x = call.row(0)
    axes = axes_of(call, 1, x)
    count = math.prod(x.value.shape[axis] for axis in axes)
    return call.map(Op.DIV, reduced(call, Op.SUM, x, axes), count)


def largest(call: Call) -> RowValue:
    x = call.row(0)
    if call.packet is ops.amin:
        return call.map(Op.NEG, reduced(call, Op.AMAX, call.map(Op.NEG, x), axes_of(call, 1, x)))
    return reduced(call, Op.AMAX, x, axes_of(call, 1, x))


def norm(call: Call) -> RowValue:
    """(sum |x|^p)^(1/p), with gradient 0 where the norm is 0, as in torch."""
    x, order = real_row(call), float(call.argument(1, "ord", 2))
    axes = axes_of(call, 2, x)
    size = call.map(Op.ABS, x)
    if order == math.inf:
        return _largest_size(call, x, axes)
    if order < 1:  # below 1 the gradient has poles at 0, where torch returns 0
        raise NotFusable(f"a norm of order {order} is not supported; the order must be at least 1")
    if order > 1 and math.prod(x.value.shape[axis] for axis in axes) == 1:
        return _norm_of_one(call, x, order)
    total = reduced(call, Op.SUM, call.map(Op.POWER, size, attr=order), axes)
    return total if order == 1 else root(call, total, order)


def _norm_of_one(call: Call, x: RowValue, order: float) -> RowValue:
    """|x|: torch takes no power of a single entry, which might overflow. It does so in the gradient, unless the order is 2."""
    b, v = call.build, x.value
    size = b.map(Op.ABS, v)
    above = v if order == 2 else b.map(Op.MUL, v, b.map(Op.POWER, size, attr=order - 2))
    below = size if order == 2 else b.map(Op.POWER, size, attr=order - 1)
    part = b.map(Op.WHERE, b.map(Op.EQ, size, 0.0), 0.0, b.map(Op.DIV, above, below))
    value = b.map(Op.WITH_GRADIENT, size, b.map(Op.MUL, v, b.map(Op.STOP, part)))
    return call.result(b.reshape(value, call.features()))


def _largest_size(call: Call, x: RowValue, axes: list[int]) -> RowValue:
    """max |x|. The gradient is shared evenly by the entries that are largest; NaN is, and has the sign 0."""
    b, v = call.build, x.value
    size = b.map(Op.ABS, v)
    most = b.reduce(Op.AMAX, size, axes)
    both_nan = b.map(Op.MUL, b.map(Op.NE, v, v), b.map(Op.NE, most, most))
    largest = b.map(Op.MAX, b.map(Op.EQ, size, most), both_nan)
    part = b.map(Op.DIV, b.map(Op.MUL, b.map(Op.SIGN, v), largest), b.reduce(Op.SUM, largest, axes))
    carrier = b.reduce(Op.SUM, b.map(Op.MUL, v, b.map(Op.STOP, part)), axes)
    value = b.map(Op.WITH_GRADIENT, most, carrier)
    return call.result(b.reshape(value, call.features()))


def var_mean(call: Call) -> list[RowValue]:
    x = real_row(call)
    axes = axes_of(call, 1, x)
    mean, centred = _centred(call, x, axes)
    out = call.out if isinstance(call.out, tuple) else (call.out, call.out)
    squares = reduced(call, Op.SUM, call.map(Op.MUL, centred, centred), axes, out[0])
    returned = call.result(call.build.reshape(mean.value, call.features(out[1])), out[1])
    return [call.map(Op.DIV, squares, _freedom(call, x, axes)), returned]


def var(call: Call) -> RowValue:
    return var_mean(call)[0]


def std(call: Call) -> RowValue:
    """The root of the variance. torch sums float32 in double, where no square overflows: here x is scaled before."""
    x = real_row(call)
    axes = axes_of(call, 1, x)
    if call.dtype == torch.float64:
        return root(call, var_mean(call)[0], 2.0)
    _, centred = _centred(call, x, axes)
    b = call.build
    most = b.map(Op.STOP, b.reduce(Op.AMAX, b.map(Op.ABS, centred.value), axes))
    size = RowValue(b.map(Op.WHERE, b.map(Op.GT, most, 0.0), most, 1.0), x.lead)
    scaled = call.map(Op.DIV, centred, size)
    variance = RowValue(b.reduce(Op.SUM, b.map(Op.MUL, scaled.value, scaled.value), axes), x.lead)
    result = call.map(Op.MUL, root(call, call.map(Op.DIV, variance, _freedom(call, x, axes)), 2.0), size)
    return call.result(b.reshape(result.value, call.features()))


def _centred(call: Call, x: RowValue, axes: list[int]) -> tuple[RowValue, RowValue]:
    """The mean over axes, which remain with size 1, and x without it."""
    count = math.prod(x.value.shape[axis] for axis in axes)
    mean = RowValue(call.build.map(Op.DIV, call.build.reduce(Op.SUM, x.value, axes), count), x.lead)
    return mean, call.map(Op.SUB, x, mean)


def _freedom(call: Call, x: RowValue, axes: list[int]) -> float:
    """What the sum of squares is divided by."""
    correction = call.argument(2, "correction", 1)
    return max(math.prod(x.value.shape[axis] for axis in axes) - (1 if correction is None else float(correction)), 0.0)


def root(call: Call, x: RowValue, order: float) -> RowValue:
    """x^(1/order), with gradient 0 where x is 0."""
    empty = call.map(Op.EQ, x, 0.0)
    return call.map(Op.WHERE, empty, 0.0, call.map(Op.POWER, call.map(Op.WHERE, empty, 1.0, x), attr=1 / order))


def layer_norm(call: Call) -> list[RowValue]:
    x, (shape, gain, shift, epsilon) = real_row(call), call.args[1:]
    axes = list(range(len(x.value.shape) - len(shape), len(x.value.shape)))
    b = call.build
    mean, centred = _centred(call, x, axes)
    squares = b.reduce(Op.SUM, b.map(Op.MUL, centred.value, centred.value), axes)
    variance = RowValue(b.map(Op.DIV, squares, math.prod(shape)), x.lead)
    # NaN where the variance overflows, as in torch, and not 0.
    variance = call.map(Op.ADD, variance, call.map(Op.STOP, call.map(Op.SUB, variance, variance)))
    scale = call.map(Op.RECIP, call.map(Op.SQRT, call.map(Op.ADD, variance, epsilon)))
    y = call.map(Op.MUL, centred, scale)
    y = y if gain is None else call.map(Op.MUL, y, gain)
    return [y if shift is None else call.map(Op.ADD, y, shift), mean, scale]


def softmax(call: Call) -> RowValue:
    x = real_row(call)
    axis = call.axis(call.args[1], x)
    if axis < 0:
        raise NotFusable(f"{call.packet} runs over the batch; rows do not mix")
    b = call.build
    largest = RowValue(b.map(Op.STOP, b.reduce(Op.AMAX, x.value, [axis])), x.lead)
    centred = call.map(Op.SUB, x, largest)
    e = call.map(Op.EXP, centred)
    total = RowValue(b.reduce(Op.SUM, e.value, [axis]), x.lead)
    return call.map(Op.SUB, centred, call.map(Op.LOG, total)) if call.packet is ops._log_softmax else call.map(Op.DIV, e, total)
