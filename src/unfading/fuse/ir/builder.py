"""The builder of programs: it creates every value, once, and in its simplest form.

Two laws hold for all simplifications. They change no value, not even in its last bit, and they are valid for NaN, infinity and
both zeros. Therefore x * 0 and x + 0 are left alone: only a structural zero, the gradient of something unused, absorbs what it
is multiplied with. A factor is joined with another or taken for a divisor only where that is exact. A program does not know its
precision: numbers are joined only where float32 can hold them (`_is_plain`). Two rules change the rounding: a sum of equal
terms is a product, and a constant of moderate size moves out of a dot.
"""

import math
from collections.abc import Callable, Hashable, Sequence

from unfading.fuse.ir.program import (
    ELEMENTWISE,
    NUMBERS,
    Attribute,
    Block,
    Leaf,
    Op,
    Shape,
    Slice,
    TensorKind,
    Value,
    broadcast,
    pieces_of,
)
from unfading.fuse.refusal import NotFusable


class Builder:
    """Creates the values of one program."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}

    def _value(self, op: Op, args: Sequence[Value] = (), attr: Attribute = None, shape: Shape = ()) -> Value:
        """The value of an operation, as it stands; one object for all that are equal."""
        # The sign of a zero and NaN are part of a constant, though 0.0 == -0.0.
        key = (op, tuple(arg.id for arg in args), repr(attr) if op is Op.CONST else attr, shape)
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = Value(op, tuple(args), attr, shape, len(self._values))
        return value

    def leaf(self, kind: TensorKind, index: int, start: int, stop: int) -> Value:
        """Entries start..stop of a tensor."""
        return self._value(Op.LEAF, (), Leaf(kind, index, start, stop), (stop - start,))

    def const(self, number: float) -> Value:
        return self._value(Op.CONST, (), float(number))

    def zero(self, shape: Shape) -> Value:
        """A structural zero."""
        return self.expand(self._value(Op.ZERO), shape)

    def map(self, op: Op, *operands: Value | float, attr: float | None = None) -> Value:
        """An elementwise operation on values or numbers, broadcast as in torch."""
        args = [self.const(x) if isinstance(x, int | float) else x for x in operands]
        simple = _simplified(self, op, args, attr)
        if simple is not None:
            return self.expand(simple, broadcast(simple.shape, *(arg.shape for arg in args)))
        shape = broadcast(*(arg.shape for arg in args))
        args = [arg if arg.constant is None else self.const(arg.constant) for arg in args]
        if all(arg.op in NUMBERS for arg in args):
            return self.expand(self._value(op, args, attr, ()), shape)
        args = [arg if arg.op in NUMBERS else self.expand(arg, shape) for arg in args]
        joined = next((arg for arg in args if arg.op is Op.CAT), None)
        if joined is not None:
            return self._map_pieces(op, args, attr, joined, shape)
        if op in (Op.ADD, Op.MUL) and args[0].op is not Op.CONST and args[1].id < args[0].id:
            args.reverse()
        return self._value(op, args, attr, shape)

    def _map_pieces(self, op: Op, args: Sequence[Value], attr: float | None, joined: Value, shape: Shape) -> Value:
        """An elementwise operation on a concatenation is the concatenation of that operation on each piece."""
        axis, parts = joined.axis, []
        for start, stop, _ in pieces_of(joined.args, axis):
            cut = (arg if arg.op in NUMBERS else self.slice(arg, axis, start, stop) for arg in args)
            part = self.map(op, *cut, attr=attr)
            parts.append(self.expand(part, shape[:axis] + (stop - start,) + shape[axis + 1 :]))
        return self.cat(parts, axis)

    def expand(self, x: Value, shape: Shape) -> Value:
        """As torch.Tensor.expand; axes may be added in front."""
        if x.shape == shape:
            return x
        return self.expand(x.args[0], shape) if x.op is Op.EXPAND else self._value(Op.EXPAND, (x,), None, shape)

    def reshape(self, x: Value, shape: Shape) -> Value:
        """As torch.reshape."""
        if x.op is Op.RESHAPE:
            return self.reshape(x.args[0], shape)
        if x.shape == shape:
            return x
        if x.op is Op.EXPAND and x.args[0].size == 1:
            return self.expand(self.reshape(x.args[0], ()), shape)
        if x.op is Op.CAT and x.axis == 0 and shape == (x.size,):
            return self.cat([self.reshape(piece, (piece.size,)) for piece in x.args], 0)
        return self._value(Op.RESHAPE, (x,), None, shape)

    def permute(self, x: Value, axes: tuple[int, ...]) -> Value:
        """As torch.permute."""
        if axes == tuple(range(len(axes))):
            return x
        if x.op is Op.PERMUTE:
            return self.permute(x.args[0], tuple(x.axes[axis] for axis in axes))
        return self._value(Op.PERMUTE, (x,), axes, tuple(x.shape[axis] for axis in axes))

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """Entries start..stop along an axis."""
        if (start, stop) == (0, x.shape[axis]):
            return x
        shape = x.shape[:axis] + (stop - start,) + x.shape[axis + 1 :]
        if start == stop:
            return self.zero(shape)
        cut = Slice(axis, start, stop)
        rule = _SLICES.get(x.op)
        moved = None if rule is None else rule(self, x, cut, shape)
        return self._value(Op.SLICE, (x,), cut, shape) if moved is None else moved

    def cat(self, pieces: Sequence[Value], axis: int) -> Value:
        """As torch.cat."""
        flat: list[Value] = []
        for piece in pieces:
            flat.extend(piece.args if piece.op is Op.CAT and piece.axis == axis else [piece])
        if len(flat) == 1:
            return flat[0]
        shape = flat[0].shape[:axis] + (sum(piece.shape[axis] for piece in flat),) + flat[0].shape[axis + 1 :]
        return self.zero(shape) if all(piece.is_zero for piece in flat) else self._value(Op.CAT, flat, axis, shape)

    def dot(self, parts: Sequence[tuple[Value, Block]]) -> Value:
        """sum_i v_i M_i over row vectors v_i and blocks M_i."""
        args: list[Value] = []
        blocks: list[Block] = []
        for v, block in parts:
            if len(v.shape) != 1:
                raise NotFusable(f"a recurrent matrix is multiplied with a value of shape {v.shape}; a vector is needed")
            for start, stop, piece in pieces_of(v.args if v.op is Op.CAT else (v,), 0):
                if not piece.is_zero:
                    args.append(piece)
                    blocks.append(block.rows(start, stop))
        if not args or not blocks[0].width:
            return self.zero((parts[0][1].width,))
        numbers = [arg.args[0].constant if arg.op is Op.MUL else None for arg in args]
        if numbers[0] is not None and len(set(numbers)) == 1 and 1e-3 < abs(numbers[0]) < 1e3:
            # c v M = c (v M): one pass less, and v may be stored already.
            plain = [(arg.args[1], block) for arg, block in zip(args, blocks, strict=True)]
            return self.map(Op.MUL, numbers[0], self.dot(plain))
        return self._value(Op.DOT, args, tuple(blocks), (blocks[0].width,))

    def reduce(self, op: Op, x: Value, axes: Sequence[int]) -> Value:
        """The sum or the maximum (amax) over axes, which remain with size 1."""
        over = tuple(sorted(axis for axis in axes if x.shape[axis] != 1))
        shape = tuple(1 if axis in over else size for axis, size in enumerate(x.shape))
        if not over:
            return x
        if x.is_zero:
            return self.zero(shape)
        if op is Op.SUM and x.op is Op.CAT and x.axis in over:
            total = self.zero(shape)
            for piece in x.args:
                total = self.map(Op.ADD, total, self.reduce(Op.SUM, piece, over))
            return total
        if x.op is Op.EXPAND:  # along a broadcast axis a sum is a multiple
            inner = self.reshape(x.args[0], (1,) * (len(x.shape) - len(x.args[0].shape)) + x.args[0].shape)
            free = [axis for axis in over if inner.shape[axis] == 1]
            if free:
                count = math.prod(x.shape[axis] for axis in free)
                single = self.expand(inner, tuple(1 if axis in free else size for axis, size in enumerate(x.shape)))
                rest = self.reduce(op, single, [axis for axis in over if axis not in free])
                return self.map(Op.MUL, float(count), rest) if op is Op.SUM else rest
        return self._value(op, (x,), over, shape)

    def rebuilt(self, value: Value, args: Sequence[Value]) -> Value:
        """The same operation on other arguments."""
        if value.op in ELEMENTWISE:
            return self.map(value.op, *args, attr=value.number if value.op is Op.POWER else None)
        if value.op is Op.EXPAND:
            return self.expand(args[0], value.shape)
        if value.op is Op.RESHAPE:
            return self.reshape(args[0], value.shape)
        if value.op is Op.PERMUTE:
            return self.permute(args[0], value.axes)
        if value.op is Op.SLICE:
            return self.slice(args[0], *value.slice)
        if value.op is Op.CAT:
            return self.cat(args, value.axis)
        if value.op is Op.DOT:
            return self.dot(list(zip(args, value.blocks, strict=True)))
        return self.reduce(value.op, args[0], value.axes)


# -- simplifications of elementwise operations ------------------------------------------------------------------------------

# Numbers that float32 holds without an overflow and without loss of digits.
_LEAST, _MOST = 2.0**-126, 2.0**127


def _is_plain(number: float) -> bool:
    return number == 0.0 or _LEAST <= abs(number) <= _MOST


def _is_power_of_two(number: float) -> bool:
    return abs(math.frexp(number)[0]) == 0.5


_FOLDED: dict[Op, Callable[..., float]] = {
    Op.NEG: lambda a: -a,
    Op.ADD: lambda a, b: a + b,
    Op.SUB: lambda a, b: a - b,
    Op.MUL: lambda a, b: a * b,
    Op.DIV: lambda a, b: a / b,
    Op.RECIP: lambda a: 1 / a,
    Op.SQRT: math.sqrt,
    Op.EXP: math.exp,
    Op.TANH: math.tanh,
    Op.ABS: abs,
}


def _simplified(b: Builder, op: Op, args: Sequence[Value], attr: float | None) -> Value | None:
    """A simpler value that equals the operation, or None."""
    zeros = [arg.is_zero for arg in args]
    if any(zeros):
        value = _with_zeros(b, op, args, zeros)
        if value is not None:
            return value
    numbers = [arg.constant for arg in args]
    if op in _FOLDED and None not in numbers:
        try:
            number = _FOLDED[op](*numbers)
        except (ArithmeticError, ValueError):
            return None
        return b.const(number) if all(map(_is_plain, (*numbers, number))) else None  # type: ignore[arg-type]
    if op is Op.POWER:
        assert attr is not None
        return _power(b, args[0], attr)
    rule = _SIMPLIFICATIONS.get(op)
    return None if rule is None else rule(b, args, numbers)


def _with_zeros(b: Builder, op: Op, args: Sequence[Value], zeros: list[bool]) -> Value | None:
    """Operations on structural zeros."""
    if op is Op.ADD:
        return args[1] if zeros[0] else args[0]
    if op is Op.SUB:
        return b.map(Op.NEG, args[1]) if zeros[0] else args[0]
    absorbed = op in (Op.MUL, Op.NEG, Op.STOP, Op.COPY)
    if absorbed or (op is Op.DIV and zeros[0]) or (op is Op.WHERE and zeros[1] and zeros[2]):
        return args[zeros.index(True)]
    return None


def _power(b: Builder, x: Value, exponent: float) -> Value | None:
    if exponent == 1.0:
        return x
    if exponent == 0.5:
        return b.map(Op.SQRT, x)
    if exponent == -1.0:
        return b.map(Op.RECIP, x)
    if not math.isfinite(exponent):
        return None
    if exponent != int(exponent) or not 2 <= exponent <= 16:
        return None
    return _whole_power(b, x, int(exponent))


def _whole_power(b: Builder, x: Value, exponent: int) -> Value:
    """x^n by repeated squaring."""
    power, square = None, x
    while True:
        if exponent % 2:
            power = square if power is None else b.map(Op.MUL, power, square)
        exponent //= 2
        if not exponent:
            assert power is not None
            return power
        square = b.map(Op.MUL, square, square)


# Each rule takes the arguments of an operation, and the numbers that they are where that is known.
_Numbers = Sequence[float | None]


def _negated(b: Builder, args: Sequence[Value], numbers: _Numbers) -> Value | None:
    return args[0].args[0] if args[0].op is Op.NEG else None


def _added(b: Builder, args: Sequence[Value], numbers: _Numbers) -> Value | None:
    for number, x, other in zip(numbers, args, reversed(args), strict=True):
        if number == 0.0 and math.copysign(1.0, number) < 0:  # 0.0 + -0.0 is 0.0
            return other
        if x.op is Op.NEG:
            return b.map(Op.SUB, other, x.args[0])
    return b.map(Op.MUL, 2.0, args[0]) if args[0] is args[1] else None


def _subtracted(b: Builder, args: Sequence[Value], numbers: _Numbers) -> Value | None:
    if numbers[1] == 0.0 and math.copysign(1.0, numbers[1]) > 0:
        return args[0]
    return b.map(Op.ADD, args[0], args[1].args[0]) if args[1].op is Op.NEG else None


def _multiplied(b: Builder, args: Sequence[Value], numbers: _Numbers) -> Value | None:
    for number, other in zip(numbers, reversed(args), strict=True):
        if number is None:
            continue
        if number == 1.0:
            return other
        if number == -1.0:
            return b.map(Op.NEG, other)
        if other.op is Op.MUL and (inner := other.args[0].constant) is not None and _joins(number, inner):
            return b.map(Op.MUL, number * inner, other.args[1])
    if numbers[1] is not None:  # a number comes first
        return b.map(Op.MUL, numbers[1], args[0])
    return None


def _joins(one: float, other: float) -> bool:
    """Whether one (other x) is (one other) x: nothing is rounded, and both factors enlarge x or both make it smaller."""
    exact = _is_power_of_two(one) or _is_power_of_two(other)
    alike = (abs(one) >= 1) == (abs(other) >= 1)
    return exact and alike and _is_plain(one * other) and _is_plain(one) and _is_plain(other)


def _divided(b: Builder, args: Sequence[Value], numbers: _Numbers) -> Value | None:
    divisor = numbers[1]
    if divisor and _is_power_of_two(divisor) and _is_plain(divisor) and _is_plain(1 / divisor):
        return b.map(Op.MUL, args[0], 1 / divisor)
    return b.map(Op.RECIP, args[1]) if numbers[0] == 1.0 else None


def _stopped(b: Builder, args: Sequence[Value], numbers: _Numbers) -> Value | None:
    return args[0] if numbers[0] is not None or args[0].op is Op.STOP else None


def _chosen(b: Builder, args: Sequence[Value], numbers: _Numbers) -> Value | None:
    return args[1] if args[1] is args[2] else None


_SIMPLIFICATIONS: dict[Op, Callable[[Builder, Sequence[Value], _Numbers], Value | None]] = {
    Op.NEG: _negated,
    Op.ADD: _added,
    Op.SUB: _subtracted,
    Op.MUL: _multiplied,
    Op.DIV: _divided,
    Op.STOP: _stopped,
    Op.WHERE: _chosen,
}


# -- slices of operations, as operations on slices ----------------------------------------------------------------------------


def _slice_of_leaf(b: Builder, x: Value, cut: Slice, shape: Shape) -> Value:
    kind, index, start, _ = x.leaf
    return b.leaf(kind, index, start + cut.start, start + cut.stop)


def _slice_of_map(b: Builder, x: Value, cut: Slice, shape: Shape) -> Value:
    return b.rebuilt(x, [arg if arg.op in NUMBERS else b.slice(arg, *cut) for arg in x.args])


def _slice_of_dot(b: Builder, x: Value, cut: Slice, shape: Shape) -> Value:
    return b.dot([(v, block.columns(cut.start, cut.stop)) for v, block in x.factors])


def _slice_of_expand(b: Builder, x: Value, cut: Slice, shape: Shape) -> Value:
    inner = x.args[0]
    axis = cut.axis - (len(x.shape) - len(inner.shape))
    if axis >= 0 and inner.shape[axis] != 1:
        inner = b.slice(inner, axis, cut.start, cut.stop)
    return b.expand(inner, shape)


def _slice_of_cat(b: Builder, x: Value, cut: Slice, shape: Shape) -> Value | None:
    if x.axis != cut.axis:
        return None
    pieces = [
        b.slice(piece, cut.axis, max(cut.start - first, 0), min(cut.stop, last) - first)
        for first, last, piece in pieces_of(x.args, cut.axis)
        if first < cut.stop and cut.start < last
    ]
    return b.cat(pieces, cut.axis)


def _slice_of_reshape(b: Builder, x: Value, cut: Slice, shape: Shape) -> Value | None:
    if cut.axis != 0 or len(x.args[0].shape) != 1:
        return None
    row = x.size // x.shape[0]  # rows of what was a vector
    return b.reshape(b.slice(x.args[0], 0, cut.start * row, cut.stop * row), shape)


def _slice_of_slice(b: Builder, x: Value, cut: Slice, shape: Shape) -> Value | None:
    axis, start, _ = x.slice
    return b.slice(x.args[0], axis, start + cut.start, start + cut.stop) if axis == cut.axis else None


_SLICES: dict[Op, Callable[[Builder, Value, Slice, Shape], Value | None]] = {
    Op.LEAF: _slice_of_leaf,
    **dict.fromkeys(ELEMENTWISE, _slice_of_map),
    Op.DOT: _slice_of_dot,
    Op.EXPAND: _slice_of_expand,
    Op.CAT: _slice_of_cat,
    Op.RESHAPE: _slice_of_reshape,
    Op.SLICE: _slice_of_slice,
}
