"""The program of one step: what `trace` writes, `differentiate` reverses, and the emitters turn into kernels.

Every value belongs to one row of the batch; its `shape` is that of the features alone. A parameter is a value that happens
to be the same in every row. A program is a list of values and of stores:

    %4 = input0[0:64]                        a leaf: a piece of an input, a state, a weight
    %7 = dot(%2 W0[0:64, 0:64]^T)            row vectors times blocks of recurrent matrices, summed
    %8 = tanh(%4 + %7)                       elementwise
    next0[0:] <- %8                          a store: a piece of the state after the step

`Builder` makes values. Equal ones are made once, and all are simplified as they are made: slices go down to the leaves and
into the rows of the matrices, concatenations come up to the stores, so that the four gates of an LSTM, cut from one product,
cost nothing.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

FUNCTIONS = ("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "relu", "abs", "sqrt", "sign", "sin", "cos", "erf")
UNARY = frozenset([*FUNCTIONS, "neg", "recip", "power", "copy", "stop"])
BINARY = frozenset(["add", "sub", "mul", "div", "max", "min", "gt", "ge", "lt", "le", "eq", "ne"])
ELEMENTWISE = UNARY | BINARY | {"where"}
VIEWS = frozenset(["expand", "reshape", "permute", "slice"])
REDUCTIONS = frozenset(["sum", "amax"])

Shape = tuple[int, ...]


class NotFusable(Exception):
    """The step uses something the program language has no word for; the text says what, and where."""


class Block(NamedTuple):
    """A block of a recurrent matrix as a dot uses it: W[r0:r1, c0:c1]^T, or, transposed, W[r0:r1, c0:c1] itself."""

    weight: int
    r0: int
    r1: int
    c0: int
    c1: int
    transposed: bool = False

    @property
    def length(self) -> int:
        """Of the row vector it is multiplied with."""
        return self.r1 - self.r0 if self.transposed else self.c1 - self.c0

    @property
    def width(self) -> int:
        """Of the product."""
        return self.c1 - self.c0 if self.transposed else self.r1 - self.r0

    def columns(self, start: int, stop: int) -> "Block":
        """The block that makes these entries of the product."""
        if self.transposed:
            return self._replace(c0=self.c0 + start, c1=self.c0 + stop)
        return self._replace(r0=self.r0 + start, r1=self.r0 + stop)

    def rows(self, start: int, stop: int) -> "Block":
        """The block that reads these entries of the row vector."""
        if self.transposed:
            return self._replace(r0=self.r0 + start, r1=self.r0 + stop)
        return self._replace(c0=self.c0 + start, c1=self.c0 + stop)

    def __str__(self) -> str:
        return f"W{self.weight}[{self.r0}:{self.r1}, {self.c0}:{self.c1}]" + ("" if self.transposed else "^T")


class Leaf(NamedTuple):
    """Entries start..stop of tensor `index` of a kind: input, state, weight; in a reverse program also next, saved, carry."""

    kind: str
    index: int  # type: ignore[assignment]
    start: int
    stop: int


class Value:
    """One value of a program. Made by a Builder, compared by identity."""

    __slots__ = ("args", "attr", "id", "op", "shape")

    def __init__(self, op: str, args: tuple["Value", ...], attr: Any, shape: Shape, number: int):
        self.op, self.args, self.attr, self.shape, self.id = op, args, attr, shape, number

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def constant(self) -> float | None:
        """The number this value is in every entry, where that is known."""
        if self.op == "const":
            return float(self.attr)
        return self.args[0].constant if self.op == "expand" else None

    @property
    def is_zero(self) -> bool:
        """Whether this is a structural zero: the gradient of what was never used, and no number that came out as 0."""
        return self.op == "zero" or (self.op == "expand" and self.args[0].is_zero)

    def __str__(self) -> str:
        return f"%{self.id} = {_written(self)}"


class Store(NamedTuple):
    """Where a value goes: `kind` next or saved; in a reverse program dinput, dstate, dweight or sequence."""

    kind: str
    index: int  # type: ignore[assignment]
    start: int
    value: Value


class Program(NamedTuple):
    """Stores; the full width of every tensor read or written, widths[kind, index]; and the kind of each input."""

    stores: tuple[Store, ...]
    widths: dict[tuple[str, int], int]
    kinds: tuple[str, ...]  # of each input: sequence [T, B, n], shared [T, 1, n] or constant [1, B, n]

    def values(self) -> list[Value]:
        """Everything the stores need, each after what it is made of."""
        return in_order(store.value for store in self.stores)

    def blocks(self) -> list[Block]:
        """The blocks of recurrent matrices that are used, each once."""
        return list(dict.fromkeys(block for value in self.values() if value.op == "dot" for block in value.attr))

    def reads(self, kind: str) -> set[int]:
        """The tensors of a kind that are read."""
        return {value.attr.index for value in self.values() if value.op == "leaf" and value.attr.kind == kind}

    def __str__(self) -> str:
        lines = [str(value) for value in self.values() if value.op not in ("const", "zero")]
        lines += [f"{s.kind}{s.index}[{s.start}:] <- %{s.value.id}" for s in self.stores]
        return "\n".join(lines)


def in_order(roots: Iterable[Value]) -> list[Value]:
    """The roots and all they are made of, arguments first."""
    seen: set[int] = set()
    order: list[Value] = []
    for root in roots:
        stack = [(root, False)]
        while stack:
            value, complete = stack.pop()
            if complete:
                order.append(value)
            elif value.id not in seen:
                seen.add(value.id)
                stack.append((value, True))
                stack.extend((arg, False) for arg in reversed(value.args))
    return order


def broadcast(*shapes: Shape) -> Shape:
    """The common shape, by the rules of torch."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    out = []
    for sizes in zip(*padded, strict=True):
        several = {size for size in sizes if size != 1}
        if len(several) > 1:
            raise NotFusable(f"shapes {', '.join(map(str, shapes))} do not broadcast")
        out.append(several.pop() if several else 1)
    return tuple(out)


def _written(value: Value) -> str:
    names = [repr(arg.attr) if arg.op == "const" else "0" if arg.op == "zero" else f"%{arg.id}" for arg in value.args]
    if value.op == "leaf":
        leaf = value.attr
        return f"{leaf.kind}{leaf.index}[{leaf.start}:{leaf.stop}]"
    if value.op == "dot":
        return "dot(" + " + ".join(f"{name} {block}" for name, block in zip(names, value.attr, strict=True)) + ")"
    infix = {
        "add": "+",
        "sub": "-",
        "mul": "*",
        "div": "/",
        "gt": ">",
        "ge": ">=",
        "lt": "<",
        "le": "<=",
        "eq": "==",
        "ne": "!=",
    }
    if value.op in infix:
        return f"{names[0]} {infix[value.op]} {names[1]}"
    detail = "" if value.attr is None else f", {value.attr}"
    shape = f" : {value.shape}" if value.op in VIEWS or value.op in REDUCTIONS or len(value.shape) != 1 else ""
    return f"{value.op}({', '.join(names)}{detail}){shape}"


def pieces_of(pieces: Sequence[Value], axis: int) -> list[tuple[int, int, Value]]:
    """(start, stop, piece) of each along the axis."""
    out, start = [], 0
    for piece in pieces:
        out.append((start, start + piece.shape[axis], piece))
        start += piece.shape[axis]
    return out
