"""One step of a program in Triton: every value is a tile of registers, its rows those of the batch.

The padding of a tile has undefined contents: it is masked where it would be summed or multiplied with a matrix, and is never
stored. A value that is the same in every row, such as a parameter, has one row and is broadcast where needed.

The surrounding kernel (`emit.py`) defines `row` as [ROWS, 1]. Names in capitals are compile-time constants.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from unfading.fuse.ir.program import ELEMENTWISE, NUMBERS, VIEWS, Block, Op, Program, Shape, Store, TensorKind, Value, pieces_of
from unfading.fuse.triton.language import EXPRESSIONS, SLOPES, number, power
from unfading.fuse.triton.tile_shapes import Tile, along, columns, dims, indices, inner_index, padded, reshaped, wide


class Tiles:
    """Writes the lines of a step."""

    def __init__(self, program: Program, blocks: dict[Block, str]):
        self.program, self.blocks = program, blocks
        matrices = [block for block in blocks if not is_vector(block)]
        self.stays = {block: f"RESIDENT > {k}" for k, block in enumerate(matrices)}  # whether each of them stays on chip
        self.before: list[str] = []  # the loop: what does not change from step to step
        self.lines: list[str] = []
        self.tiles: dict[int, Tile] = {}  # by value; the frame adds the leaves
        self.late = late_sums(program)  # sums over features that can wait until after the loop

    def write(self) -> None:
        """Write all values that have no tile yet."""
        skipped = {value.id for summed in self.late.values() for value in summed.between}
        for value in self.program.values():
            if value.id not in self.tiles and value.id not in skipped:
                self.tiles[value.id] = self._new_tile(value)

    def set_leaf(self, value: Value, tile: Tile) -> None:
        """Use a variable for a leaf."""
        self.tiles[value.id] = tile

    def has(self, value: Value) -> bool:
        """Whether a value has a tile."""
        return value.id in self.tiles

    def tile(self, value: Value) -> Tile:
        return self.tiles[value.id]

    def full(self, value: Value) -> str:
        """A value as [ROWS, N], flat and with all its rows."""
        tile = self._flat(value)
        return self._broadcast(tile, padded((value.size,)))

    # -- one value --------------------------------------------------------------------------------------------------------

    def _new_tile(self, value: Value) -> Tile:
        if value.op in NUMBERS:
            return Tile(number(value.number if value.op is Op.CONST else 0.0), False, True)
        if value.op in ELEMENTWISE:
            return self._elementwise(value)
        if value.op is Op.DOT:
            return self._dot(value)
        if value.op in VIEWS:
            return self._view(value)
        if value.op is Op.CAT:
            return self._cat(value)
        return self._reduction(value)

    def _named(self, value: Value, expression: str, rows: bool) -> Tile:
        self.lines.append(f"v{value.id} = {expression}")
        return Tile(f"v{value.id}", rows)

    def _elementwise(self, value: Value) -> Tile:
        slope = _slope(value)
        if slope is not None:
            name, d, y = slope
            return self._named(value, SLOPES[name].format(self.tile(d).text, self.tile(y).text), True)
        tile = self._elementwise_of(value, [self.tile(arg) for arg in value.args])
        return self._named(value, tile.text, tile.rows)

    def _elementwise_of(self, value: Value, args: Sequence[Tile]) -> Tile:
        texts = [tile.text for tile in args]
        if all(tile.is_number for tile in args):  # functions take tiles
            texts = [f"tl.full((1, 1), {text}, tl.float32)" for text in texts]
        text = power(texts[0], value.number) if value.op is Op.POWER else EXPRESSIONS[value.op].format(*texts)
        return Tile(text, any(tile.rows for tile in args))

    def _dot(self, value: Value) -> Tile:
        """Each part is added to the sum of those before it, in the accumulator of the dot where there is one."""
        total = ""
        for v, block in value.factors:
            matrix = self.blocks[block]
            if not is_vector(block):
                self.lines += [f"if not {self.stays[block]}:", f"    {matrix} = {load_of(block)}"]
            x = self._masked(self.full(v), (v.size,), "0.0")
            if v.size == 1:
                total = f"{x} * {matrix}" + (f" + {total}" if total else "")
            elif value.size == 1:
                total = f"tl.sum({x} * {matrix}, axis=1, keep_dims=True)" + (f" + {total}" if total else "")
            else:
                total = f"product({x}, {matrix}, {total or 'None'}, PRECISION)"
            self.lines.append(f"v{value.id} = {total}")
            total = f"v{value.id}"
        return Tile(total, True)

    def _reduction(self, value: Value) -> Tile:
        x = value.args[0]
        tile = self.tile(x)
        text = self._masked(tile.text, x.shape, neutral(value.op))
        for axis in value.axes:
            text = reduced(value.op, text, axis + 1)
        return self._named(value, text, tile.rows)

    def _masked(self, text: str, shape: Shape, other: str) -> str:
        """With `other` in the padding."""
        sizes = padded(shape)
        tests = [f"({along(sizes, axis)} < {n})" for axis, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size]
        return f"tl.where({' & '.join(tests)}, {text}, {other})" if tests else text

    # -- views ------------------------------------------------------------------------------------------------------------

    def _view(self, value: Value) -> Tile:
        x = value.args[0]
        tile = self.tile(x)
        if tile.is_number:
            return tile
        if value.op is Op.RESHAPE:
            moved = reshaped(tile, x.shape, value.shape)
            if moved is not None:
                return tile if moved == tile.text else self._named(value, moved, tile.rows)
        if value.op is Op.PERMUTE:
            axes = ", ".join(str(axis + 1) for axis in value.axes)
            return self._named(value, f"tl.permute({tile.text}, (0, {axes}))", tile.rows)
        if value.op is Op.EXPAND:
            text = reshaped(tile, x.shape, (1,) * (len(value.shape) - len(x.shape)) + x.shape)
            return self._named(value, f"tl.broadcast_to({text}, {dims(tile, padded(value.shape))})", tile.rows)
        return self._named(value, self._gathered(f"index_{value.id}", value, x, inner_index(value)), tile.rows)

    def _flat(self, value: Value) -> Tile:
        """A value of several axes as one of one."""
        tile = self.tile(value)
        if tile.is_number:
            return tile
        moved = reshaped(tile, value.shape, (value.size,))
        if moved is not None:
            return Tile(moved, tile.rows)
        flat = Value(Op.RESHAPE, (value,), None, (value.size,), value.id)
        return Tile(self._gathered(f"flat_{value.id}", flat, value, inner_index(flat)), tile.rows)

    def _cat(self, value: Value) -> Tile:
        text, rows = "0.0", any(self.tile(part).rows for part in value.args)
        sizes = padded(value.shape)
        for start, stop, part in pieces_of(value.args, value.axis):
            index = indices(value.shape)
            index[value.axis] = f"tl.minimum(tl.maximum({index[value.axis]} - {start}, 0), {stop - start - 1})"
            gathered = self.tile(part).text
            if not self.tile(part).is_number:
                gathered = self._gathered(f"index_{value.id}_{start}", value, part, index)
            axis = along(sizes, value.axis)
            text = f"tl.where(({axis} >= {start}) & ({axis} < {stop}), {gathered}, {text})"
        return self._named(value, text, rows)

    def joined(self, name: str, slices: Sequence[tuple[str, int, int]], start: int, stop: int) -> None:
        """Entries start..stop of a row that lies in the tiles of several slices (name, start, stop), under one name."""
        text, size = "0.0", wide(stop - start)
        for part, a, b in slices:
            if a < stop and start < b:
                index = f"tl.minimum(tl.maximum({columns(size)} + {start - a}, 0), {b - a - 1})"
                gathered = f"tl.gather({part}, tl.broadcast_to({index}, (ROWS, {size})), 1)"
                axis = columns(size)
                text = f"tl.where(({axis} >= {a - start}) & ({axis} < {b - start}), {gathered}, {text})"
        self.lines.append(f"{name} = {text}")

    def _gathered(self, name: str, value: Value, x: Value, index: list[str]) -> str:
        """The entries of x at an index, for every entry of `value`. The index is an expression in i0, i1, ... of `value`."""
        outer, inner, tile = padded(value.shape), padded(x.shape), self.tile(x)
        total = math.prod(outer)
        entry, stride = columns(total), total
        for axis, (n, size) in enumerate(zip(value.shape or (1,), outer, strict=True)):
            stride //= size
            self.before.append(f"i{axis} = tl.minimum({entry} // {stride} % {size}, {n - 1})")
        place, stride = [], 1
        for at, size in zip(reversed(index or ["0"]), reversed(inner), strict=True):
            place.append(f"({at}) * {stride}")
            stride *= size
        self.before.append(f"{name} = {entry} * 0 + {' + '.join(place)}")
        rows = "ROWS" if tile.rows else "1"
        source = tile.text if len(inner) == 1 else f"tl.reshape({tile.text}, ({rows}, {stride}))"
        gathered = f"tl.gather({source}, tl.broadcast_to({name}, ({rows}, {total})), 1)"
        return gathered if len(outer) == 1 else f"tl.reshape({gathered}, {dims(tile, outer)})"

    def _broadcast(self, tile: Tile, sizes: Shape) -> str:
        if tile.rows:
            return tile.text
        shape = dims(Tile("", True), sizes)
        return f"tl.full({shape}, {tile.text}, tl.float32)" if tile.is_number else f"tl.broadcast_to({tile.text}, {shape})"


def _slope(value: Value) -> tuple[str, Value, Value] | None:
    """The name of f, d and y, where a value is d f(y), y was loaded from memory and d was computed."""
    if value.op is not Op.MUL:
        return None
    for d, f in (value.args, value.args[::-1]):
        if _loaded(d):
            continue
        y = _one_less(f)
        if y is not None and _loaded(y):
            return "1 - y", d, y
        if y is not None and y.op is Op.MUL and y.args[0] is y.args[1] and _loaded(y.args[0]):
            return "1 - y y", d, y.args[0]
        if f.op is Op.MUL:
            for y, other in (f.args, f.args[::-1]):
                if _loaded(y) and _one_less(other) is y:
                    return "y (1 - y)", d, y
    return None


def _loaded(value: Value) -> bool:
    return value.op is Op.LEAF and value.leaf.kind != TensorKind.CARRY


def _one_less(value: Value) -> Value | None:
    """y, where a value is 1 - y."""
    return value.args[1] if value.op is Op.SUB and value.args[0].constant == 1.0 else None


class LateSum(NamedTuple):
    """A sum over features that only the gradient of a parameter reads. The summand is added up over time and summed once."""

    summand: Value
    between: tuple[Value, ...]  # values that need not be computed


def late_sums(program: Program) -> dict[Store, LateSum]:
    readers: dict[int, int] = {}
    for value in program.values():
        for arg in value.args:
            readers[arg.id] = readers.get(arg.id, 0) + 1
    for store in program.stores:
        readers[store.value.id] = readers.get(store.value.id, 0) + 1
    late = {}
    for store in program.stores:
        value, between = store.value, [store.value]
        while value.op is Op.RESHAPE and value.size == 1 and readers[value.id] == 1:
            value = value.args[0]
            between.append(value)
        once = store.kind == TensorKind.D_WEIGHT and value.op is Op.SUM and value.size == 1 and readers[value.id] == 1
        if once and len(value.args[0].shape) == 1:
            late[store] = LateSum(value.args[0], tuple(between))
    return late


def reduced(op: Op, text: str, axis: int) -> str:
    """The sum or the largest entry of a tile along an axis, which stays with size 1."""
    reduction = f"tl.sum({text}, axis={axis}" if op is Op.SUM else f"tl.reduce({text}, {axis}, larger"
    return f"{reduction}, keep_dims=True)"


def neutral(op: Op) -> str:
    """The number that changes no sum, or no largest entry."""
    return "0.0" if op is Op.SUM else 'float("-inf")'


def origin(block: Block) -> tuple[str, int, int]:
    """The name of the matrix that has the entries a dot sums over side by side, and the row and column of a block in it."""
    return (f"W{block.weight}_t", block.c0, block.r0) if block.transposed else (f"W{block.weight}", block.r0, block.c0)


def is_vector(block: Block) -> bool:
    """True for a single row or column, which always fits on chip."""
    return block.length == 1 or block.width == 1


def load_of(block: Block) -> str:
    """A load of a block of a matrix as [length, width], from memory in which its columns are contiguous.

    The entries that a dot sums over are then adjacent, and are loaded in whole vectors.
    """
    name, r0, c0 = origin(block)
    K, N = wide(block.length), wide(block.width)
    if block.width == 1 and block.length > 1:  # a row, to be multiplied entry by entry
        down, right = "0", columns(K)
        mask = f"{columns(K)} < {block.length}"
    else:
        down, right = f"tl.arange(0, {K})[:, None]", f"{columns(N)} * {name}_ROW"
        mask = f"(tl.arange(0, {K})[:, None] < {block.length}) & ({columns(N)} < {block.width})"
    load = f"tl.load({name} + (model * {name}_model + {r0}) * {name}_ROW + {c0} + {down} + {right}, mask={mask}, other=0.0)"
    return load if is_vector(block) else f"factor({load}, PRECISION)"
