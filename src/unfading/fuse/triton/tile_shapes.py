"""Shapes of tiles, and expressions that reshape a tile.

A value of shape (n,) is a tile [ROWS, N] with N the next power of two and at least 16, as a dot requires. In a value of several
axes each axis is padded to its next power of two. An axis of size 1 stays 1.
"""

import math
from typing import NamedTuple

from unfading.fuse.ir.program import Op, Shape, Value

LEAST = 16  # that a dot accepts along an axis


class Tile(NamedTuple):
    """A value in the source: the name of a variable or a number, and whether it has one row per batch row."""

    text: str
    rows: bool
    is_number: bool = False  # and so has no shape


def padded(shape: Shape) -> Shape:
    """The axes of a tile after its rows."""
    if len(shape) < 2:
        return (wide(math.prod(shape)),)
    return tuple(power_of_two(n) for n in shape)


def wide(n: int) -> int:
    """The padded size of n entries in a row."""
    return 1 if n == 1 else max(LEAST, power_of_two(n))


def columns(size: int) -> str:
    """The name of the indices of a row's entries, [1, size]. `emit.py` defines those that a kernel uses."""
    return f"col{size}"


def reshaped(tile: Tile, before: Shape, after: Shape) -> str | None:
    """A tile in another shape; None where padding between the entries would have to move."""
    own, to = [tuple(power_of_two(n) for n in shape) or (1,) for shape in (before, after)]
    tight = math.prod(own) == math.prod(before) and math.prod(to) == math.prod(after)
    if not tight and [n for n in before if n != 1] != [n for n in after if n != 1]:
        return None
    text, have, want = tile.text, padded(before), padded(after)
    if have == want:
        return text
    if have != own:  # a row of fewer than 16 entries: its first ones are the first line of a table
        lines = (have[0] // own[0], own[0])
        first = f"tl.where({along(lines, 0)} == 0, tl.reshape({text}, {dims(tile, lines)}), 0.0)"
        text = f"tl.sum({first}, axis=1)"
    if to == want:
        return f"tl.reshape({text}, {dims(tile, want)})"
    lines = (want[0] // to[0], to[0])  # the other way round: the row, repeated
    return f"tl.reshape(tl.broadcast_to(tl.reshape({text}, {dims(tile, (1, to[0]))}), {dims(tile, lines)}), {dims(tile, want)})"


def inner_index(value: Value) -> list[str]:
    """The index of entry i0, i1, ... of a view in the value behind it."""
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


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
