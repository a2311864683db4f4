"""What a tensor stands for while a step is traced: a value of each row, a view of a recurrent matrix, or nothing known."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import COMPARISONS, VIEWS, Block, Op, Shape, Value, in_order
from unfading.fuse.refusal import NotFusable


class Example(NamedTuple):
    """The sequence on which a cell is traced. No feature size equals its sizes, so the size of an axis tells what it is."""

    time: int  # T, steps
    batch: int  # B, rows
    start: int  # index of the first step

    @property
    def row_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The axes that may precede the features."""
        return (), (self.batch,), (self.time * self.batch,), (self.time, self.batch)

    @property
    def sizes(self) -> dict[int, str]:
        """The sizes of these axes, with their names."""
        return {self.batch: "B", self.time: "T", self.time * self.batch: "T B"}

    def row_axes(self, shape: Sequence[int]) -> int:
        """How many axes in front of the features stand for rows: [B, ...] and [T B, ...] have one, [T, B, ...] has two."""
        if tuple(shape[:2]) == (self.time, self.batch):
            return 2
        return int(len(shape) > 0 and shape[0] in (self.batch, self.time * self.batch))


# Every cell is traced on both. A number that depends on their sizes or their start makes two programs. The sizes are primes in
# the one, and divisible by all numbers up to 12 and 16 in the other.
EXAMPLES = (Example(7_919, 1_000_003, 0), Example(27_720, 720_720, 104_729))


class RowValue(NamedTuple):
    """A value of each row, and how many axes its tensor has in front of the features; 0 for a parameter.

    A program computes in one precision. A bool is 0 or 1 in it, and a small integer is a whole number (`largest_whole`). A
    tensor of any other type must be a constant.
    """

    value: Value
    lead: int
    dtype: torch.dtype | None = None  # of the tensor; the recorder sets it
    number: Tensor | None = None  # of a constant: the number in the tensor's own type, without axes

    @property
    def batched(self) -> bool:
        return self.lead > 0


class Moved(NamedTuple):
    """A value of each row whose tensor has the batch axis at another place than the first: for batched products."""

    value: Value
    at: int  # the axis of the tensor that is the batch


class MatrixView(NamedTuple):
    """W[r0:r1, c0:c1] of weight number `index`, or its transpose: a dot uses it without a copy."""

    index: int  # type: ignore[assignment]
    flat: Value
    shape: Shape
    r0: int
    r1: int
    c0: int
    c1: int
    transposed: bool = False
    stopped: bool = False  # without a gradient

    def t(self) -> "MatrixView":
        return self._replace(transposed=not self.transposed)

    def cut(self, axis: int, start: int, stop: int) -> "MatrixView":
        if (axis == 0) != self.transposed:
            return self._replace(r0=self.r0 + start, r1=self.r0 + stop)
        return self._replace(c0=self.c0 + start, c1=self.c0 + stop)

    def block(self) -> Block:
        """The block of a dot v @ self."""
        return Block(self.index, self.r0, self.r1, self.c0, self.c1, transposed=not self.transposed)

    def entries(self, b: Builder) -> Value:
        """The matrix as an ordinary value, for elementwise operations."""
        whole = b.reshape(self.flat, self.shape)
        cut = b.slice(b.slice(whole, 0, self.r0, self.r1), 1, self.c0, self.c1)
        cut = b.map(Op.STOP, cut) if self.stopped else cut
        return b.permute(cut, (1, 0)) if self.transposed else cut


class Kernels(NamedTuple):
    """Rows r0..r1 of weight number `index`, the kernels of a convolution."""

    index: int  # type: ignore[assignment]
    r0: int
    r1: int


class Opaque(NamedTuple):
    """The result of an unsupported operation: an error is raised only if the program depends on it."""

    reason: str


Traced: TypeAlias = RowValue | Moved | MatrixView | Kernels | Opaque


class Call(NamedTuple):
    """One operation of torch: its arguments as traced values, and the tensors without data that it took and returned."""

    build: Builder
    packet: Any
    args: Any
    kwargs: dict[str, Any]
    tensors: Any  # the arguments as torch has them
    out: Any
    dtype: torch.dtype  # of the program
    example: Example
    columns: Sequence[int]  # of each weight, as a matrix

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that may be given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def row(self, position: int) -> RowValue:
        """An argument as a value of each row."""
        x = as_row(self.build, self.args[position])
        if not isinstance(x, RowValue):
            raise NotFusable(f"{self.packet} of {x!r} is not supported")
        return x

    def features(self, out: Tensor | None = None) -> Shape:
        """The axes of the result that do not stand for rows."""
        shape = tuple((self.out if out is None else out).shape)
        return shape[self.example.row_axes(shape) :]

    def result(self, value: Value, out: Tensor | None = None) -> RowValue:
        """A value as the tensor that torch returned."""
        return RowValue(value, self.example.row_axes((self.out if out is None else out).shape))

    def constant(self, number: Tensor) -> RowValue:
        """A number, in its own type, as the tensor that torch returned."""
        value = self.build.expand(self.build.const(float(number.to(self.dtype))), self.features())
        return self.result(value)._replace(number=number.reshape(()))

    def map(self, op: Op, *operands: Any, attr: float | None = None) -> RowValue:
        """An elementwise operation on traced values and numbers."""
        rows = [as_row(self.build, x) for x in operands]
        lead = max((x.lead for x in rows if isinstance(x, RowValue)), default=0)
        rank = max((len(x.value.shape) + x.lead for x in rows if isinstance(x, RowValue)), default=0)
        values: list[Value | float] = []
        for x in rows:
            if not isinstance(x, RowValue):
                values.append(float(x))
            elif x.lead:
                values.append(x.value)
            else:
                values.append(without_row_axes(self.build, x.value, len(x.value.shape) - (rank - lead)))
        return RowValue(self.build.map(op, *values, attr=attr), lead)

    def shaped(self, row: RowValue) -> RowValue:
        """A value expanded to the shape that torch returned."""
        return self.result(self.build.expand(row.value, self.features()))

    def axis(self, axis: int, row: RowValue) -> int:
        """An axis of the tensor as an axis of the features; negative for one that stands for rows."""
        rank = len(row.value.shape) + row.lead
        return axis % rank - row.lead


def is_integer(dtype: torch.dtype | None) -> bool:
    """Whether a type is an integer that a program can compute with: one that no small whole number overflows."""
    return dtype in (torch.int32, torch.int64)


def largest_whole(value: Value) -> float:
    """The largest size that a value can have, where it is a whole number in every entry; infinity where that is not known."""
    bounds: dict[int, float] = {}
    for v in in_order([value]):
        sizes = [bounds[arg.id] for arg in v.args]
        if v.op is Op.CONST:
            bound = abs(v.number) if v.number.is_integer() else math.inf
        elif v.op in COMPARISONS or v.op is Op.SIGN:
            bound = 1.0
        elif v.op in (Op.ADD, Op.SUB):
            bound = sum(sizes)
        elif v.op is Op.MUL:
            bound = sizes[0] * sizes[1]
        elif v.op is Op.WHERE:
            bound = max(sizes[1:])
        elif v.op is Op.SUM:
            bound = sizes[0] * (v.args[0].size // max(v.size, 1))
        elif v.op in VIEWS or v.op in (Op.CAT, Op.AMAX, Op.MAX, Op.MIN, Op.NEG, Op.ABS, Op.RELU, Op.STOP):
            bound = max(sizes)
        else:
            bound = math.inf
        bounds[v.id] = bound
    return bounds[value.id]


def as_row(build: Builder, x: Any) -> Any:
    """A matrix as an ordinary value; everything else as it is."""
    if isinstance(x, Moved):
        raise NotFusable("the batch is not the first axis of a tensor, which only views and batched products may take")
    if isinstance(x, Kernels):
        raise NotFusable("the kernels of a convolution are changed inside the step; do it in weights(), once per call")
    return RowValue(x.entries(build), 0) if isinstance(x, MatrixView) else x


def without_row_axes(build: Builder, value: Value, count: int) -> Value:
    """A parameter's value without its first `count` axes, which have size 1 and stand for rows."""
    if count <= 0:
        return value
    if any(size != 1 for size in value.shape[:count]):
        raise NotFusable(f"a parameter of shape {value.shape} is broadcast along the batch; rows do not mix")
    return build.reshape(value, value.shape[count:])
