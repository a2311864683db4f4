"""The program of one step: `trace` records it, `differentiate` reverses it, and the emitters turn it into kernels.

Every value belongs to one batch row, and its `shape` is the shape of the features alone. A parameter is a value that is the
same in every row. A program is a list of values and of stores:

    %4 = input0[0:64]                        a leaf: entries of an input, a state or a weight
    %7 = dot(%2 W0[0:64, 0:64]^T)            row vectors times blocks of recurrent matrices, summed
    %8 = tanh(%4 + %7)                       elementwise
    next0[0:] <- %8                          a store: entries of the state after the step

`Builder` creates values. Equal values are created once, and every value is simplified on creation: slices move down to the
leaves and into the rows of the matrices, and concatenations move up to the stores. The four gates of an LSTM, cut from one
product, therefore cost nothing.
"""

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple, TypeAlias

from unfading.fuse.refusal import NotFusable


class Op(StrEnum):
    """The operations of the language. The value of a member is its name in the text of a program."""

    LEAF = "leaf"  # entries of a tensor
    CONST = "const"  # a number
    ZERO = "zero"  # a structural zero: the gradient of something that is not used

    EXP = "exp"
    EXPM1 = "expm1"
    LOG = "log"
    LOG1P = "log1p"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    RELU = "relu"
    ABS = "abs"
    SQRT = "sqrt"
    SIGN = "sign"
    SIN = "sin"
    COS = "cos"
    ERF = "erf"
    NEG = "neg"
    RECIP = "recip"
    POWER = "power"  # with a constant exponent
    COPY = "copy"
    STOP = "stop"  # the value itself, without a gradient

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    MAX = "max"
    MIN = "min"
    GT = "gt"
    GE = "ge"
    LT = "lt"
    LE = "le"
    EQ = "eq"
    NE = "ne"
    WHERE = "where"
    WITH_GRADIENT = "with_gradient"  # the first argument, with the gradient of the second

    EXPAND = "expand"
    RESHAPE = "reshape"
    PERMUTE = "permute"
    SLICE = "slice"
    CAT = "cat"
    SUM = "sum"
    AMAX = "amax"
    DOT = "dot"


COMPARISONS = frozenset([Op.GT, Op.GE, Op.LT, Op.LE, Op.EQ, Op.NE])
# Elementwise functions of one argument that torch has under the same name.
FUNCTIONS = (
    *(Op.EXP, Op.EXPM1, Op.LOG, Op.LOG1P, Op.TANH, Op.SIGMOID, Op.RELU),
    *(Op.ABS, Op.SQRT, Op.SIGN, Op.SIN, Op.COS, Op.ERF, Op.NEG),
)
UNARY = frozenset([*FUNCTIONS, Op.RECIP, Op.POWER, Op.COPY, Op.STOP])
BINARY = frozenset([Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAX, Op.MIN]) | COMPARISONS
ELEMENTWISE = UNARY | BINARY | {Op.WHERE, Op.WITH_GRADIENT}
VIEWS = frozenset([Op.EXPAND, Op.RESHAPE, Op.PERMUTE, Op.SLICE])
REDUCTIONS = frozenset([Op.SUM, Op.AMAX])
NUMBERS = frozenset([Op.CONST, Op.ZERO])  # these have no shape of their own

INFIX = {Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/"}
INFIX |= {Op.GT: ">", Op.GE: ">=", Op.LT: "<", Op.LE: "<=", Op.EQ: "==", Op.NE: "!="}


class TensorKind(StrEnum):
    """What a tensor is to the loop over time. A tensor is named by its kind and its index, as in `input0`."""

    INPUT = "input"
    STATE = "state"  # before the step
    WEIGHT = "weight"
    NEXT = "next"  # the state after the step
    INITIAL = "initial"  # the state before the first step
    FINAL = "final"  # the state after the last step
    SAVED = "saved"  # values of the forward pass, stored for the backward pass
    CARRY = "carry"  # the gradient of the state after the step
    SEQUENCE = "sequence"  # values of the backward pass, stored for the matrix products after the loop
    SLOPE = "slope"  # of the map from the state before a chunk of time to the state after it: slope s + offset
    OFFSET = "offset"
    PACKED = "packed"  # factors of those products without the steps that no row has

    D_INPUT = "dinput"
    D_STATE = "dstate"
    D_WEIGHT = "dweight"
    D_NEXT = "dnext"
    D_INITIAL = "dinitial"
    D_FINAL = "dfinal"

    @property
    def gradient(self) -> "TensorKind":
        """The kind of this tensor's gradient."""
        return TensorKind(f"d{self}")

    @property
    def primal(self) -> "TensorKind":
        """The kind of the tensor that this is the gradient of."""
        return TensorKind(self.removeprefix("d"))


class InputKind(StrEnum):
    """Which axes an input of the loop has."""

    SEQUENCE = "sequence"  # [T, B, n]
    SHARED = "shared"  # [T, 1, n]: the same for all batch rows
    CONSTANT = "constant"  # [1, B, n]: the same at all steps


Shape: TypeAlias = tuple[int, ...]
TensorId: TypeAlias = tuple[TensorKind, int]


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
        """The size of the row vector that is multiplied with it."""
        return self.r1 - self.r0 if self.transposed else self.c1 - self.c0

    @property
    def width(self) -> int:
        """The size of the product."""
        return self.c1 - self.c0 if self.transposed else self.r1 - self.r0

    def columns(self, start: int, stop: int) -> "Block":
        """The block that gives these entries of the product."""
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
    """Attribute of a leaf: entries start..stop of tensor `index` of a kind."""

    kind: TensorKind
    index: int  # type: ignore[assignment]
    start: int
    stop: int


class Slice(NamedTuple):
    """Attribute of a slice: entries start..stop along an axis."""

    axis: int
    start: int
    stop: int

    def __str__(self) -> str:
        return str(tuple(self))


# What an operation has beside its arguments: a leaf its Leaf, a constant its number, a power its exponent, a slice its Slice,
# a dot a Block per argument, a concatenation its axis, a permutation and a reduction their axes; the others nothing.
Attribute: TypeAlias = Leaf | Slice | tuple[Block, ...] | tuple[int, ...] | int | float | None


class Value:
    """One value of a program. A Builder creates it; values are compared by identity.

    Attributes:
        constant: the number that every entry of this value is, where that is known.
        is_zero: whether this is a structural zero: the gradient of something unused, not a number that happens to be 0.
    """

    __slots__ = ("args", "attr", "constant", "id", "is_zero", "op", "shape")

    def __init__(self, op: Op, args: tuple["Value", ...], attr: Attribute, shape: Shape, number: int):
        self.op, self.args, self.attr, self.shape, self.id = op, args, attr, shape, number
        self.constant: float | None = None
        self.is_zero: bool = op is Op.ZERO
        if op is Op.EXPAND:
            self.constant, self.is_zero = args[0].constant, args[0].is_zero
        elif op is Op.CONST:
            self.constant = self.number

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def leaf(self) -> Leaf:
        """The attribute of a leaf."""
        assert isinstance(self.attr, Leaf)
        return self.attr

    @property
    def number(self) -> float:
        """The number of a constant, the exponent of a power."""
        assert isinstance(self.attr, float)
        return self.attr

    @property
    def slice(self) -> Slice:
        """The attribute of a slice."""
        assert isinstance(self.attr, Slice)
        return self.attr

    @property
    def axis(self) -> int:
        """The axis of a concatenation."""
        assert isinstance(self.attr, int)
        return self.attr

    @property
    def axes(self) -> tuple[int, ...]:
        """The order of axes of a permutation; the axes of a reduction."""
        assert isinstance(self.attr, tuple)
        return self.attr  # type: ignore[return-value]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of a dot, one per argument."""
        assert isinstance(self.attr, tuple)
        return self.attr  # type: ignore[return-value]

    @property
    def factors(self) -> list[tuple["Value", Block]]:
        """The row vectors of a dot, each with its block."""
        return list(zip(self.args, self.blocks, strict=True))

    def __str__(self) -> str:
        return f"%{self.id} = {_text(self)}"


class Store(NamedTuple):
    """Where a value is stored: entries from `start` on of tensor `index` of a kind.

    A forward program stores next and saved; a reverse program stores dinput, dstate, dweight and sequence.
    """

    kind: TensorKind
    index: int  # type: ignore[assignment]
    start: int
    value: Value


class Program(NamedTuple):
    """The stores of one step, with the sizes of the tensors that it reads and writes."""

    stores: tuple[Store, ...]
    widths: dict[TensorId, int]  # the full width of every tensor, by kind and index
    kinds: tuple[InputKind, ...]  # one per input

    def values(self) -> list[Value]:
        """All values that the stores need, each after its arguments."""
        return in_order(store.value for store in self.stores)

    def blocks(self) -> list[Block]:
        """The blocks of recurrent matrices in use, each once."""
        return list(dict.fromkeys(block for value in self.values() if value.op is Op.DOT for block in value.blocks))

    def reads(self, kind: TensorKind) -> set[int]:
        """The indices of the tensors of a kind that are read."""
        return {value.leaf.index for value in self.values() if value.op is Op.LEAF and value.leaf.kind == kind}

    def key(self) -> str:
        """A hash of the program and of its tensors, the same in every process."""
        widths = sorted(((str(kind), index), width) for (kind, index), width in self.widths.items())
        text = f"{self}\n{widths}\n{tuple(map(str, self.kinds))}"
        return sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [str(value) for value in self.values() if value.op not in NUMBERS]
        lines += [f"{s.kind}{s.index}[{s.start}:] <- %{s.value.id}" for s in self.stores]
        return "\n".join(lines)


def in_order(roots: Iterable[Value]) -> list[Value]:
    """The roots and everything they are computed from, arguments first."""
    visited: set[int] = set()
    order: list[Value] = []
    for root in roots:
        stack = [(root, False)]
        while stack:
            value, complete = stack.pop()
            if complete:
                order.append(value)
            elif value.id not in visited:
                visited.add(value.id)
                stack.append((value, True))
                stack += [(arg, False) for arg in reversed(value.args) if arg.id not in visited]
    return order


def broadcast(*shapes: Shape) -> Shape:
    """The common shape, by the rules of torch."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    out = []
    for sizes in zip(*padded, strict=True):
        several = {size for size in sizes if size != 1}
        if len(several) > 1:
            raise NotFusable(f"shapes {', '.join(map(str, shapes))} do not broadcast")
        out.append(several.pop() if several else 1)
    return tuple(out)


def pieces_of(pieces: Sequence[Value], axis: int) -> list[tuple[int, int, Value]]:
    """(start, stop, piece) of each piece of a concatenation along the axis."""
    out, start = [], 0
    for piece in pieces:
        out.append((start, start + piece.shape[axis], piece))
        start += piece.shape[axis]
    return out


def _text(value: Value) -> str:
    """The right-hand side of a line of the program."""
    names = [repr(arg.attr) if arg.op is Op.CONST else "0" if arg.op is Op.ZERO else f"%{arg.id}" for arg in value.args]
    if value.op is Op.LEAF:
        leaf = value.leaf
        return f"{leaf.kind}{leaf.index}[{leaf.start}:{leaf.stop}]"
    if value.op is Op.DOT:
        return "dot(" + " + ".join(f"{name} {block}" for name, block in zip(names, value.blocks, strict=True)) + ")"
    if value.op in INFIX:
        return f"{names[0]} {INFIX[value.op]} {names[1]}"
    detail = "" if value.attr is None else f", {value.attr}"
    shape = f" : {value.shape}" if value.op in VIEWS or value.op in REDUCTIONS or len(value.shape) != 1 else ""
    return f"{value.op}({', '.join(names)}{detail}){shape}"
