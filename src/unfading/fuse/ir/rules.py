"""The derivative of every operation of the language, one rule each.

A rule is called with the builder of the reverse program, the value y = op(x), the arguments x and y as the reverse program
has them, and the gradient d of y; it returns the gradient of each argument, None for nothing.
"""

from collections.abc import Callable, Sequence

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Value

Adjoints = Sequence[Value | None]
Rule = Callable[[Builder, Value, Sequence[Value], Value, Value], Adjoints]


def _unary(derivative: Callable[[Builder, Value, Value, Value], Value]) -> Rule:
    """A rule from `derivative(b, x, y, dy)`."""
    return lambda b, value, x, y, d: [derivative(b, x[0], y, d)]


def _both(d_first: Callable[..., Value], d_second: Callable[..., Value]) -> Rule:
    """A rule for y = f(a, c) from `d(b, a, c, y, dy)` for each argument."""
    return lambda b, value, x, y, d: [d_first(b, *x, y, d), d_second(b, *x, y, d)]


def _larger(sign: str) -> Rule:
    """max and min: the whole to the larger, half to each where both are equal."""

    def part(b: Builder, mine: Value, other: Value, d: Value) -> Value:
        return b.map("where", b.map(sign, mine, other), d, b.map("where", b.map("eq", mine, other), b.map("mul", 0.5, d), 0.0))

    return _both(lambda b, a, c, y, d: part(b, a, c, d), lambda b, a, c, y, d: part(b, c, a, d))


def _spread(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    """amax: shared evenly by all that are largest, as the reverse has them: what was saved may differ in the last bit."""
    largest = b.map("eq", x[0], b.expand(b.reduce("amax", x[0], value.attr), x[0].shape))
    count = b.reduce("sum", largest, value.attr)
    return [b.map("mul", largest, b.map("div", d, count))]


def _expand(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    own = x[0].shape
    front = len(value.shape) - len(own)
    axes = [i for i, size in enumerate(value.shape) if i < front or (own[i - front] == 1 and size != 1)]
    return [b.reshape(b.reduce("sum", d, axes), own)]


def _permute(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    return [b.permute(d, tuple(sorted(range(len(value.attr)), key=value.attr.__getitem__)))]


def _slice(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    axis, start, stop = value.attr
    shape = x[0].shape

    def zeros(n: int) -> list[Value]:
        return [b.zero(shape[:axis] + (n,) + shape[axis + 1 :])] if n else []

    return [b.cat([*zeros(start), d, *zeros(shape[axis] - stop)], axis)]


def _cat(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    out, start = [], 0
    for piece in x:
        stop = start + piece.shape[value.attr]
        out.append(b.slice(d, value.attr, start, stop))
        start = stop
    return out


def _nothing(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    return [None] * len(x)


RULES: dict[str, Rule] = {
    "neg": _unary(lambda b, x, y, d: b.map("neg", d)),
    "copy": _unary(lambda b, x, y, d: d),
    "exp": _unary(lambda b, x, y, d: b.map("mul", d, y)),
    "expm1": _unary(lambda b, x, y, d: b.map("mul", d, b.map("add", y, 1.0))),
    "log": _unary(lambda b, x, y, d: b.map("div", d, x)),
    "log1p": _unary(lambda b, x, y, d: b.map("div", d, b.map("add", x, 1.0))),
    "tanh": _unary(lambda b, x, y, d: b.map("mul", d, b.map("sub", 1.0, b.map("mul", y, y)))),
    "sigmoid": _unary(lambda b, x, y, d: b.map("mul", d, b.map("mul", y, b.map("sub", 1.0, y)))),
    "relu": _unary(lambda b, x, y, d: b.map("where", b.map("gt", y, 0.0), d, 0.0)),
    "abs": _unary(lambda b, x, y, d: b.map("mul", d, b.map("sign", x))),
    "sqrt": _unary(lambda b, x, y, d: b.map("div", b.map("mul", 0.5, d), y)),
    "recip": _unary(lambda b, x, y, d: b.map("neg", b.map("mul", d, b.map("mul", y, y)))),
    "sin": _unary(lambda b, x, y, d: b.map("mul", d, b.map("cos", x))),
    "cos": _unary(lambda b, x, y, d: b.map("neg", b.map("mul", d, b.map("sin", x)))),
    "erf": _unary(
        lambda b, x, y, d: b.map("mul", 1.1283791670955126, b.map("mul", d, b.map("exp", b.map("neg", b.map("mul", x, x)))))
    ),
    "power": lambda b, value, x, y, d: [b.map("mul", d, b.map("mul", value.attr, b.map("power", x[0], attr=value.attr - 1)))],
    "add": _both(lambda b, a, c, y, d: d, lambda b, a, c, y, d: d),
    "sub": _both(lambda b, a, c, y, d: d, lambda b, a, c, y, d: b.map("neg", d)),
    "mul": _both(lambda b, a, c, y, d: b.map("mul", d, c), lambda b, a, c, y, d: b.map("mul", d, a)),
    "div": _both(
        lambda b, a, c, y, d: b.map("div", d, c),
        lambda b, a, c, y, d: b.map("neg", b.map("div", b.map("mul", d, y), c)),
    ),
    "max": _larger("gt"),
    "min": _larger("lt"),
    "where": lambda b, value, x, y, d: [None, b.map("where", x[0], d, 0.0), b.map("where", x[0], 0.0, d)],
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "sign", "stop"), _nothing),
    "amax": _spread,
    "sum": lambda b, value, x, y, d: [b.expand(d, x[0].shape)],
    "expand": _expand,
    "reshape": lambda b, value, x, y, d: [b.reshape(d, x[0].shape)],
    "permute": _permute,
    "slice": _slice,
    "cat": _cat,
}
