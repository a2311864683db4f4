"""Operations of torch that reduce over features, in the language of programs: sums, means, norms, layer norm, softmax."""

import math

import torch
from torch import Tensor

from unfading.fuse.ir.program import NotFusable
from unfading.fuse.trace.values import Call, Row

ops = torch.ops.aten


def axes_of(call: Call, position: int, row: Row) -> list[int]:
    rank = len(row.value.shape) + row.lead
    dims = call.argument(position, "dim")
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    axes = [axis % rank - row.lead for axis in dims]
    if any(axis < 0 for axis in axes):
        raise NotFusable(f"{call.packet} over the batch; rows do not mix")
    return axes


def reduced(call: Call, op: str, x: Row, axes: list[int], out: Tensor | None = None) -> Row:
    value = call.build.reduce(op, x.value, axes)
    return call.made(call.build.reshape(value, call.features(out)), out)


def total(call: Call) -> Row:
    x = call.row(0)
    return reduced(call, "sum", x, axes_of(call, 1, x))


def mean(call: Call) -> Row:
    x = call.row(0)
    axes = axes_of(call, 1, x)
    count = math.prod(x.value.shape[axis] for axis in axes)
    return call.map("mul", reduced(call, "sum", x, axes), 1 / count)


def largest(call: Call) -> Row:
    x = call.row(0)
    if call.packet is ops.amin:
        return call.map("neg", reduced(call, "amax", call.map("neg", x), axes_of(call, 1, x)))
    return reduced(call, "amax", x, axes_of(call, 1, x))


def norm(call: Call) -> Row:
    """(sum |x|^p)^(1/p), with gradient 0 where the norm is 0, as torch has it."""
    x, order = call.row(0), float(call.argument(1, "ord", 2))
    axes = axes_of(call, 2, x)
    size = call.map("abs", x)
    if order == math.inf:
        return reduced(call, "amax", size, axes)
    if order < 1:  # below 1 the gradient has poles at 0, which torch sets to 0
        raise NotFusable(f"a norm of order {order}")
    total = reduced(call, "sum", call.map("power", size, attr=order), axes)
    return total if order == 1 else root(call, total, order)


def var_mean(call: Call) -> list[Row]:
    x = call.row(0)
    axes = axes_of(call, 1, x)
    count = math.prod(x.value.shape[axis] for axis in axes)
    correction = call.argument(2, "correction", 1)
    free = count - (1 if correction is None else float(correction))
    mean = Row(call.build.map("mul", call.build.reduce("sum", x.value, axes), 1 / count), x.lead)
    apart = call.map("sub", x, mean)
    out = call.out if isinstance(call.out, tuple) else (call.out, call.out)
    squares = reduced(call, "sum", call.map("mul", apart, apart), axes, out[0])
    kept = call.made(call.build.reshape(mean.value, call.features(out[1])), out[1])
    return [call.map("mul", squares, 1 / free), kept]


def var(call: Call) -> Row:
    variance, _ = var_mean(call)
    return root(call, variance, 2.0) if call.packet is ops.std else variance


def root(call: Call, x: Row, order: float) -> Row:
    """x^(1/order), with gradient 0 where x is 0."""
    empty = call.map("eq", x, 0.0)
    return call.map("where", empty, 0.0, call.map("power", call.map("where", empty, 1.0, x), attr=1 / order))


def layer_norm(call: Call) -> list[Row]:
    x, (shape, gain, shift, epsilon) = call.row(0), call.args[1:]
    axes = list(range(len(x.value.shape) - len(shape), len(x.value.shape)))
    count = math.prod(shape)
    b = call.build
    mean = Row(b.map("mul", b.reduce("sum", x.value, axes), 1 / count), x.lead)
    apart = call.map("sub", x, mean)
    variance = Row(b.map("mul", b.reduce("sum", b.map("mul", apart.value, apart.value), axes), 1 / count), x.lead)
    scale = call.map("recip", call.map("sqrt", call.map("add", variance, epsilon)))
    y = call.map("mul", apart, scale)
    y = y if gain is None else call.map("mul", y, gain)
    return [y if shift is None else call.map("add", y, shift), mean, scale]


def softmax(call: Call) -> Row:
    x = call.row(0)
    axis = call.axis(call.args[1], x)
    if axis < 0:
        raise NotFusable("softmax over the batch; rows do not mix")
    b = call.build
    largest = Row(b.map("stop", b.reduce("amax", x.value, [axis])), x.lead)
    apart = call.map("sub", x, largest)
    e = call.map("exp", apart)
    total = Row(b.reduce("sum", e.value, [axis]), x.lead)
    return call.map("sub", apart, call.map("log", total)) if call.packet is ops._log_softmax else call.map("div", e, total)
