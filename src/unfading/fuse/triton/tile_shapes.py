"""Shapes of tiles, and texts that take a tile from one shape to another.

A value of shape (n,) is a tile [ROWS, N], N the next power of two and at least 16, for that is what a dot takes; a value of
several axes has each of them at its next power of two; an axis of size 1 stays 1.
"""

import math
from typing import NamedTuple

from unfading.fuse.ir.program import Op, Shape, Value

LEAST = 16  # what a dot takes along every axis


class Tile(NamedTuple):
    """A value as it is written: the name of a variable or a number, and whether it has a row for each of the batch."""

    text: str
    rows: bool
    is_number: bool = False  # which has no shape of its own


def padded(shape: Shape) -> Shape:
    """The axes of a tile after its rows."""
    if len(shape) < 2:
        return (wide(math.prod(shape)),)
    return tuple(_power_of_two(n) for n in shape)


def wide(n: int) -> int:
    """The padded size of n entries in a row."""
    return 1 if n == 1 else max(LEAST, _power_of_two(n))


def columns(size: int) -> str:
    """The numbers of the entries of a row, [1, size]; a frame defines what a kernel uses of them."""
    return f"col{size}"


def reshaped(tile: Tile, before: Shape, after: Shape) -> str | None:
    """A tile in another shape; None where entries would have to change places within a row, for padding is in between."""
    own, to = [tuple(_power_of_two(n) for n in shape) or (1,) for shape in (before, after)]
    tight = math.prod(own) == math.prod(before) and math.prod(to) == math.prod(after)
    if not tight and [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    text, have, want = tile.text, padded(before), padded(after)
    if have == want:
        return text
    if have != own:  # a row of fewer than 16 entries: its first ones, as the first line of a table
        lines = (have[0] // own[0], own[0])
        first = f"tl.where({along(lines, 0)} == 0, tl.reshape({text}, {dims(tile, lines)}), 0.0)"
        text = f"tl.sum({first}, axis=1)"
    if to == want:
        return f"tl.reshape({text}, {dims(tile, want)})"
    lines = (want[0] // to[0], to[0])  # and back: a row of them, repeated
    return f"tl.reshape(tl.broadcast_to(tl.reshape({text}, {dims(tile, (1, to[0]))}), {dims(tile, lines)}), {dims(tile, want)})"


def inner_index(value: Value) -> list[str]:
    """Where an entry i0, i1, ... of a view lies in what it looks at."""
    x, index = value.args[0], indices(value.shape)
    if value.op is Op.EXPAND:
        own = index[len(value.shape) - len(x.shape) :]
        return ["0" if n == 1 else at for n, at in zip(x.shape, own, strict=True)]
    if value.op is Op.SLICE:
        axis, start, _ = value.slice
        return [f"{at} + {start}" if k == axis else at for k, at in enumerate(index)]
    flat, stride = [], 1
    for n, at in zip(reversed(value.shape), reversed(index), strict=True):
        flat.append(f"{at} * {stride}")
        stride *= n
    entry, out, stride = " + ".join(flat) or "0", [], 1
    for n in reversed(x.shape):
        out.append(f"({entry}) // {stride} % {n}")
        stride *= n
    return out[::-1]


def indices(shape: Shape) -> list[str]:
    return [f"i{axis}" for axis in range(len(shape))]


def along(sizes: Shape, axis: int) -> str:
    if len(sizes) == 1:
        return columns(sizes[0])
    places = ", ".join(["None", *(":" if k == axis else "None" for k in range(len(sizes)))])
    return f"tl.arange(0, {sizes[axis]})[{places}]"


def dims(tile: Tile, sizes: Shape) -> str:
    return f"({'ROWS' if tile.rows else '1'}, {', '.join(map(str, sizes))})"


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
