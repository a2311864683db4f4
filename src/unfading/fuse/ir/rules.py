"""The derivative of every operation of the language, one rule each.

A rule takes the builder of the reverse program, the value y = op(x), its arguments x and its result y as the reverse program
reads them, and the gradient d of y. It returns the gradient of each argument, or None where there is none.
"""

import math
from collections.abc import Callable, Sequence

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import COMPARISONS, Op, Value, pieces_of

Adjoints = Sequence[Value | None]
Rule = Callable[[Builder, Value, Sequence[Value], Value, Value], Adjoints]


def _unary(derivative: Callable[[Builder, Value, Value, Value], Value]) -> Rule:
    """A rule from `derivative(b, x, y, dy)`."""
    return lambda b, value, x, y, d: [derivative(b, x[0], y, d)]


def _both(d_first: Callable[..., Value], d_second: Callable[..., Value]) -> Rule:
    """A rule for y = f(a, c) from `d(b, a, c, y, dy)` for each argument."""
    return lambda b, value, x, y, d: [d_first(b, *x, y, d), d_second(b, *x, y, d)]


def _larger(loses: Op) -> Rule:
    """max and min: the gradient goes to the larger (smaller) one, half to each where both are equal, whole to each at NaN."""

    def part(b: Builder, mine: Value, other: Value, d: Value) -> Value:
        shared = b.map(Op.WHERE, b.map(Op.EQ, mine, other), b.map(Op.MUL, 0.5, d), d)
        return b.map(Op.WHERE, b.map(loses, mine, other), 0.0, shared)

    return _both(lambda b, a, c, y, d: part(b, a, c, d), lambda b, a, c, y, d: part(b, c, a, d))


def _power(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    exponent = value.number
    return [b.map(Op.MUL, d, b.map(Op.MUL, exponent, b.map(Op.POWER, x[0], attr=exponent - 1)))]


def _spread(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    """amax: shared evenly by all entries that are largest.

    The maximum is computed again from x as the reverse program has it: a saved one may differ in the last bit.
    """
    largest = b.map(Op.EQ, x[0], b.expand(b.reduce(Op.AMAX, x[0], value.axes), x[0].shape))
    count = b.reduce(Op.SUM, largest, value.axes)
    return [b.map(Op.MUL, largest, b.map(Op.DIV, d, count))]


def _expand(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    own = x[0].shape
    front = len(value.shape) - len(own)
    axes = [i for i, size in enumerate(value.shape) if i < front or (own[i - front] == 1 and size != 1)]
    return [b.reshape(b.reduce(Op.SUM, d, axes), own)]


def _permute(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    return [b.permute(d, tuple(sorted(range(len(value.axes)), key=value.axes.__getitem__)))]


def _slice(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    axis, start, stop = value.slice
    shape = x[0].shape

    def zeros(n: int) -> list[Value]:
        return [b.zero(shape[:axis] + (n,) + shape[axis + 1 :])] if n else []

    return [b.cat([*zeros(start), d, *zeros(shape[axis] - stop)], axis)]


def _cat(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    return [b.slice(d, value.axis, start, stop) for start, stop, _ in pieces_of(x, value.axis)]


def _no_gradient(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    return [None] * len(x)


RULES: dict[Op, Rule] = {
    Op.NEG: _unary(lambda b, x, y, d: b.map(Op.NEG, d)),
    Op.COPY: _unary(lambda b, x, y, d: d),
    Op.EXP: _unary(lambda b, x, y, d: b.map(Op.MUL, d, y)),
    Op.EXPM1: _unary(lambda b, x, y, d: b.map(Op.MUL, d, b.map(Op.ADD, y, 1.0))),
    Op.LOG: _unary(lambda b, x, y, d: b.map(Op.DIV, d, x)),
    Op.LOG1P: _unary(lambda b, x, y, d: b.map(Op.DIV, d, b.map(Op.ADD, x, 1.0))),
    Op.TANH: _unary(lambda b, x, y, d: b.map(Op.MUL, d, b.map(Op.SUB, 1.0, b.map(Op.MUL, y, y)))),
    Op.SIGMOID: _unary(lambda b, x, y, d: b.map(Op.MUL, d, b.map(Op.MUL, y, b.map(Op.SUB, 1.0, y)))),
    Op.RELU: _unary(lambda b, x, y, d: b.map(Op.WHERE, b.map(Op.LE, y, 0.0), 0.0, d)),  # d at NaN
    Op.ABS: _unary(lambda b, x, y, d: b.map(Op.MUL, d, b.map(Op.SIGN, x))),
    Op.SQRT: _unary(lambda b, x, y, d: b.map(Op.DIV, b.map(Op.MUL, 0.5, d), y)),
    Op.RECIP: _unary(lambda b, x, y, d: b.map(Op.NEG, b.map(Op.MUL, d, b.map(Op.MUL, y, y)))),
    Op.SIN: _unary(lambda b, x, y, d: b.map(Op.MUL, d, b.map(Op.COS, x))),
    Op.COS: _unary(lambda b, x, y, d: b.map(Op.NEG, b.map(Op.MUL, d, b.map(Op.SIN, x)))),
    Op.ERF: _unary(
        lambda b, x, y, d: b.map(
            Op.MUL, 2 / math.sqrt(math.pi), b.map(Op.MUL, d, b.map(Op.EXP, b.map(Op.NEG, b.map(Op.MUL, x, x))))
        )
    ),
    Op.POWER: _power,
    Op.ADD: _both(lambda b, a, c, y, d: d, lambda b, a, c, y, d: d),
    Op.SUB: _both(lambda b, a, c, y, d: d, lambda b, a, c, y, d: b.map(Op.NEG, d)),
    Op.MUL: _both(lambda b, a, c, y, d: b.map(Op.MUL, d, c), lambda b, a, c, y, d: b.map(Op.MUL, d, a)),
    Op.DIV: _both(
        lambda b, a, c, y, d: b.map(Op.DIV, d, c),
        lambda b, a, c, y, d: b.map(Op.NEG, b.map(Op.MUL, d, b.map(Op.DIV, y, c))),
    ),
    Op.MAX: _larger(Op.LT),
    Op.MIN: _larger(Op.GT),
    Op.WHERE: lambda b, value, x, y, d: [None, b.map(Op.WHERE, x[0], d, 0.0), b.map(Op.WHERE, x[0], 0.0, d)],
    Op.WITH_GRADIENT: lambda b, value, x, y, d: [None, d],
    **dict.fromkeys((*COMPARISONS, Op.SIGN, Op.STOP), _no_gradient),
    Op.AMAX: _spread,
    Op.SUM: lambda b, value, x, y, d: [b.expand(d, x[0].shape)],
    Op.EXPAND: _expand,
    Op.RESHAPE: lambda b, value, x, y, d: [b.reshape(d, x[0].shape)],
    Op.PERMUTE: _permute,
    Op.SLICE: _slice,
    Op.CAT: _cat,
}
