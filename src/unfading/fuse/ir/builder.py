"""The builder of programs: every value is made here, once, and in its simplest form.

Laws of the simplifications: they change no value beyond rounding, and they hold for NaN and infinity too (hence x * 0 is
left alone: only a structural zero, the gradient of something unused, swallows what it meets).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from unfading.fuse.ir.program import ELEMENTWISE, Block, Leaf, NotFusable, Shape, Value, broadcast, pieces_of

FOLDED: dict[str, Callable[..., float]] = {
    "neg": lambda a: -a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "recip": lambda a: 1 / a,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "tanh": math.tanh,
    "abs": abs,
}


class Builder:
    """Makes the values of one program."""

    def __init__(self) -> None:
        self.made: dict[Any, Value] = {}

    def _make(self, op: str, args: Sequence[Value] = (), attr: Any = None, shape: Shape = ()) -> Value:
        # A constant's sign and NaN are part of it, though 0.0 == -0.0.
        key = (op, tuple(arg.id for arg in args), repr(attr) if op == "const" else attr, shape)
        if key not in self.made:
            self.made[key] = Value(op, tuple(args), attr, shape, len(self.made))
        return self.made[key]

    def leaf(self, kind: str, index: int, start: int, stop: int) -> Value:
        return self._make("leaf", (), Leaf(kind, index, start, stop), (stop - start,))

    def const(self, number: float) -> Value:
        return self._make("const", (), float(number))

    def zero(self, shape: Shape) -> Value:
        """A structural zero."""
        return self.expand(self._make("zero"), shape)

    def map(self, op: str, *operands: Value | float, attr: float | None = None) -> Value:
        """An elementwise operation on values or numbers, broadcast as in torch."""
        args = [self.const(x) if isinstance(x, int | float) else x for x in operands]
        simple = self._simplified(op, args, attr)
        if simple is not None:
            return self.expand(simple, broadcast(simple.shape, *(arg.shape for arg in args)))
        shape = broadcast(*(arg.shape for arg in args))
        args = [arg if arg.op == "const" else self.const(c) if (c := arg.constant) is not None else arg for arg in args]
        if all(arg.op in ("const", "zero") for arg in args):  # numbers alone have no shape
            return self.expand(self._make(op, args, attr, ()), shape)
        args = [arg if arg.op in ("const", "zero") else self.expand(arg, shape) for arg in args]
        joined = next((arg for arg in args if arg.op == "cat"), None)
        if joined is not None:
            axis = joined.attr
            parts = []
            for a, b, _ in pieces_of(joined.args, axis):
                cut = (x if x.op in ("const", "zero") else self.slice(x, axis, a, b) for x in args)
                parts.append(self.expand(self.map(op, *cut, attr=attr), shape[:axis] + (b - a,) + shape[axis + 1 :]))
            return self.cat(parts, axis)
        if op in ("add", "mul") and args[0].op != "const" and args[1].id < args[0].id:
            args.reverse()
        return self._make(op, args, attr, shape)

    def _simplified(self, op: str, args: list[Value], attr: float | None) -> Value | None:
        c = [arg.constant for arg in args]
        zero = [arg.is_zero for arg in args]
        if any(zero):
            found = self._with_zero(op, args, zero)
            if found is not None:
                return found
        if op in FOLDED and None not in c:
            try:
                return self.const(FOLDED[op](*c))
            except (ArithmeticError, ValueError):
                return None
        if op == "neg" and args[0].op == "neg":
            return args[0].args[0]
        if op == "add":
            return self._sum_of(args, c)
        if op == "sub":
            if c[1] == 0.0:
                return args[0]
            if args[1].op == "neg":
                return self.map("add", args[0], args[1].args[0])
        if op == "mul":
            return self._product_of(args, c)
        if op == "div":
            if c[1] is not None and c[1] != 0.0 and math.isfinite(1 / c[1]):
                return self.map("mul", args[0], 1 / c[1])
            if c[0] == 1.0:
                return self.map("recip", args[1])
        if op == "power":
            return self._power_of(args[0], attr)
        if op == "stop" and (c[0] is not None or args[0].op == "stop"):
            return args[0]
        if op == "where" and args[1] is args[2]:
            return args[1]
        return None

    def _with_zero(self, op: str, args: list[Value], zero: list[bool]) -> Value | None:
        if op == "add":
            return args[1] if zero[0] else args[0]
        if op == "sub":
            return self.map("neg", args[1]) if zero[0] else args[0]
        if op in ("mul", "neg", "stop", "copy") or (op == "div" and zero[0]) or (op == "where" and zero[1] and zero[2]):
            return next(arg for arg, is_zero in zip(args, zero, strict=True) if is_zero)
        return None

    def _sum_of(self, args: list[Value], c: list[float | None]) -> Value | None:
        for i in (0, 1):
            if c[i] == 0.0:
                return args[1 - i]
            if args[i].op == "neg":
                return self.map("sub", args[1 - i], args[i].args[0])
        return self.map("mul", 2.0, args[0]) if args[0] is args[1] else None

    def _product_of(self, args: list[Value], c: list[float | None]) -> Value | None:
        for i in (0, 1):
            other, factor = args[1 - i], c[i]
            if factor == 1.0:
                return other
            if factor == -1.0:
                return self.map("neg", other)
            if factor is not None and other.op == "mul" and (inner := other.args[0].constant) is not None:
                return self.map("mul", factor * inner, other.args[1])
        if c[1] is not None:  # the number stands first
            return self.map("mul", c[1], args[0])
        return None

    def _power_of(self, x: Value, exponent: float | None) -> Value | None:
        assert exponent is not None
        special = {1.0: lambda: x, 0.5: lambda: self.map("sqrt", x), -1.0: lambda: self.map("recip", x)}
        if exponent in special:
            return special[exponent]()
        if exponent != int(exponent) or not 2 <= exponent <= 16:
            return None
        n, square, out = int(exponent), x, None
        while n:
            if n & 1:
                out = square if out is None else self.map("mul", out, square)
            n >>= 1
            if n:
                square = self.map("mul", square, square)
        return out

    def expand(self, x: Value, shape: Shape) -> Value:
        if x.shape == shape:
            return x
        return self.expand(x.args[0], shape) if x.op == "expand" else self._make("expand", (x,), None, shape)

    def reshape(self, x: Value, shape: Shape) -> Value:
        if x.op == "reshape":
            return self.reshape(x.args[0], shape)
        if x.shape == shape:
            return x
        if x.op == "expand" and x.args[0].size == 1:
            return self.expand(self.reshape(x.args[0], ()), shape)
        return self._make("reshape", (x,), None, shape)

    def permute(self, x: Value, axes: tuple[int, ...]) -> Value:
        """As torch.permute."""
        if axes == tuple(range(len(axes))):
            return x
        if x.op == "permute":
            return self.permute(x.args[0], tuple(x.attr[axis] for axis in axes))
        return self._make("permute", (x,), axes, tuple(x.shape[axis] for axis in axes))

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """Entries start..stop along an axis."""
        if (start, stop) == (0, x.shape[axis]):
            return x
        shape = x.shape[:axis] + (stop - start,) + x.shape[axis + 1 :]
        if start == stop:
            return self.zero(shape)
        if x.op == "leaf":
            leaf = x.attr
            return self.leaf(leaf.kind, leaf.index, leaf.start + start, leaf.start + stop)
        if x.op in ELEMENTWISE:
            args = (arg if arg.op in ("const", "zero") else self.slice(arg, axis, start, stop) for arg in x.args)
            return self.map(x.op, *args, attr=x.attr)
        if x.op == "dot":
            parts = zip(x.args, x.attr, strict=True)
            return self.dot([(v, block.columns(start, stop)) for v, block in parts])
        if x.op == "expand":
            inner = x.args[0]
            own = axis - (len(x.shape) - len(inner.shape))
            if own >= 0 and inner.shape[own] != 1:
                inner = self.slice(inner, own, start, stop)
            return self.expand(inner, shape)
        if x.op == "cat" and x.attr == axis:
            pieces = [
                self.slice(piece, axis, max(start - a, 0), min(stop, b) - a)
                for a, b, piece in pieces_of(x.args, axis)
                if a < stop and start < b
            ]
            return self.cat(pieces, axis)
        if x.op == "reshape" and axis == 0 and len(x.args[0].shape) == 1:  # rows of what was unflattened
            row = x.size // x.shape[0]
            return self.reshape(self.slice(x.args[0], 0, start * row, stop * row), shape)
        if x.op == "slice" and x.attr[0] == axis:
            return self.slice(x.args[0], axis, x.attr[1] + start, x.attr[1] + stop)
        return self._make("slice", (x,), (axis, start, stop), shape)

    def cat(self, pieces: Sequence[Value], axis: int) -> Value:
        flat: list[Value] = []
        for piece in pieces:
            flat.extend(piece.args if piece.op == "cat" and piece.attr == axis else [piece])
        if len(flat) == 1:
            return flat[0]
        if all(piece.is_zero for piece in flat):
            shape = flat[0].shape
            return self.zero(shape[:axis] + (sum(piece.shape[axis] for piece in flat),) + shape[axis + 1 :])
        shape = flat[0].shape[:axis] + (sum(piece.shape[axis] for piece in flat),) + flat[0].shape[axis + 1 :]
        return self._make("cat", flat, axis, shape)

    def dot(self, parts: Sequence[tuple[Value, Block]]) -> Value:
        """sum_i v_i M_i over row vectors v_i and blocks M_i."""
        args: list[Value] = []
        blocks: list[Block] = []
        for v, block in parts:
            if len(v.shape) != 1:
                raise NotFusable(f"a product of a recurrent matrix with a value of shape {v.shape}")
            for a, b, piece in pieces_of(v.args if v.op == "cat" else (v,), 0):
                if not piece.is_zero:
                    args.append(piece)
                    blocks.append(block.rows(a, b))
        if not args or not blocks[0].width:
            return self.zero((parts[0][1].width,))
        factors = [arg.args[0].constant if arg.op == "mul" else None for arg in args]
        if factors[0] is not None and len(set(factors)) == 1:  # c v M = c (v M): one pass less, and v may be stored already
            plain = [(arg.args[1], block) for arg, block in zip(args, blocks, strict=True)]
            return self.map("mul", factors[0], self.dot(plain))
        return self._make("dot", args, tuple(blocks), (blocks[0].width,))

    def reduce(self, op: str, x: Value, axes: Sequence[int]) -> Value:
        """sum or amax over axes, which stay with size 1."""
        over = tuple(sorted(axis for axis in axes if x.shape[axis] != 1))
        shape = tuple(1 if axis in over else size for axis, size in enumerate(x.shape))
        if not over:
            return x
        if x.is_zero:
            return self.zero(shape)
        if op == "sum" and x.op == "cat" and x.attr in over:
            total = self.zero(shape)
            for piece in x.args:
                total = self.map("add", total, self.reduce("sum", piece, over))
            return total
        if x.op == "expand":  # along a broadcast axis a sum is a multiple
            inner = self.reshape(x.args[0], (1,) * (len(x.shape) - len(x.args[0].shape)) + x.args[0].shape)
            free = [axis for axis in over if inner.shape[axis] == 1]
            if free:
                count = math.prod(x.shape[axis] for axis in free)
                kept = self.expand(inner, tuple(1 if axis in free else size for axis, size in enumerate(x.shape)))
                rest = self.reduce(op, kept, [axis for axis in over if axis not in free])
                return self.map("mul", float(count), rest) if op == "sum" else rest
        return self._make(op, (x,), over, shape)

    def rebuilt(self, value: Value, args: Sequence[Value]) -> Value:
        """The same operation on other arguments."""
        if value.op in ELEMENTWISE:
            return self.map(value.op, *args, attr=value.attr)
        if value.op in ("expand", "reshape"):
            return self.expand(args[0], value.shape) if value.op == "expand" else self.reshape(args[0], value.shape)
        if value.op == "permute":
            return self.permute(args[0], value.attr)
        if value.op == "slice":
            return self.slice(args[0], *value.attr)
        if value.op == "cat":
            return self.cat(args, value.attr)
        if value.op == "dot":
            return self.dot(list(zip(args, value.attr, strict=True)))
        return self.reduce(value.op, args[0], value.attr)
