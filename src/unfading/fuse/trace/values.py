"""What tensors stand for while a step is traced: rows of values, views of recurrent matrices, and calls on them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Block, NotFusable, Shape, Value

# Rows of the example, and its steps: primes that are no feature sizes, so that every axis tells by its size what it is.
BATCH = 1_000_003
TIME = 7_919


def lead(shape: Sequence[int]) -> int:
    """How many axes in front of the features stand for rows: [B, ...] and [T B, ...] have one, [T, B, ...] two."""
    if tuple(shape[:2]) == (TIME, BATCH):
        return 2
    return int(len(shape) > 0 and shape[0] in (BATCH, TIME * BATCH))


class Row(NamedTuple):
    """A value, and how many axes the tensor it stands for has in front of the value's own; 0 for a parameter's."""

    value: Value
    lead: int

    @property
    def batched(self) -> bool:
        return self.lead > 0


class Opaque(NamedTuple):
    """What the language has no word for, where that is allowed: it must not come into the step."""

    reason: str


class Matrix(NamedTuple):
    """W[r0:r1, c0:c1] of weight number `index`, or its transpose: what a dot can use as it is."""

    index: int  # type: ignore[assignment]
    flat: Value
    shape: Shape
    r0: int
    r1: int
    c0: int
    c1: int
    turned: bool = False

    def t(self) -> "Matrix":
        return self._replace(turned=not self.turned)

    def cut(self, axis: int, start: int, stop: int) -> "Matrix":
        if (axis == 0) != self.turned:
            return self._replace(r0=self.r0 + start, r1=self.r0 + stop)
        return self._replace(c0=self.c0 + start, c1=self.c0 + stop)

    def block(self) -> Block:
        """As v @ self uses it."""
        return Block(self.index, self.r0, self.r1, self.c0, self.c1, transposed=not self.turned)

    def entries(self, b: Builder) -> Value:
        """As an ordinary value, for elementwise work."""
        whole = b.reshape(self.flat, self.shape)
        cut = b.slice(b.slice(whole, 0, self.r0, self.r1), 1, self.c0, self.c1)
        return b.permute(cut, (1, 0)) if self.turned else cut


class Call(NamedTuple):
    """One operation: its arguments as rows and matrices, and the tensors without data that it made."""

    build: Builder
    packet: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    dtype: torch.dtype

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def row(self, position: int) -> Row:
        x = self.args[position]
        if isinstance(x, Matrix):
            return Row(x.entries(self.build), 0)
        if not isinstance(x, Row):
            raise NotFusable(f"{self.packet} of {x!r}")
        return x

    def features(self, out: Tensor | None = None) -> Shape:
        """Of what was made, the axes that are no rows."""
        shape = tuple((self.out if out is None else out).shape)
        return shape[lead(shape) :]

    def made(self, value: Value, out: Tensor | None = None) -> Row:
        """A value as the tensor that was made."""
        shape = tuple((self.out if out is None else out).shape)
        return Row(value, lead(shape))

    def map(self, op: str, *operands: Any, attr: float | None = None) -> Row:
        """An elementwise operation on rows and numbers, with the shape torch gave it."""
        rows = [Row(x.entries(self.build), 0) if isinstance(x, Matrix) else x for x in operands]
        axes = max((x.lead for x in rows if isinstance(x, Row)), default=0)
        rank = max((len(x.value.shape) + x.lead for x in rows if isinstance(x, Row)), default=0)
        values: list[Value | float] = []
        for x in rows:
            if not isinstance(x, Row):
                values.append(float(x))
                continue
            value = x.value if x.lead else without_rows(self.build, x.value, len(x.value.shape) - (rank - axes))
            values.append(value)
        return Row(self.build.map(op, *values, attr=attr), axes)

    def shaped(self, row: Row) -> Row:
        return self.made(self.build.expand(row.value, self.features()))

    def axis(self, axis: int, row: Row) -> int:
        """An axis of the tensor as one of the row's features; negative for one of the rows."""
        rank = len(row.value.shape) + row.lead
        return axis % rank - row.lead


def without_rows(build: Builder, value: Value, axes: int) -> Value:
    """A parameter's value without its leading axes of size 1, which stand for rows."""
    if axes <= 0:
        return value
    if any(size != 1 for size in value.shape[:axes]):
        raise NotFusable(f"a parameter of shape {value.shape} goes along the rows")
    return build.reshape(value, value.shape[axes:])
