"""One step of a program in Triton where its units are divided among the programs of a grid.

A tile of a long vector has the columns of this program's units, `unit` of them: [ROWS, UNITS]. All other values are as in
`tiles.py`, the same in every program. `stages.py` says what is exchanged. A line of the exchange belongs to one row; there are
two of them, for even and odd steps, since a program may already store the values of the next step while another one still reads
those of this step.

Dots that read the same vectors are one dot in the source, whose columns are the units of the first, of the second, and so on in
turns. The four gates of an LSTM keep four warps busy in this way.
"""

from collections.abc import Sequence
from itertools import count

from unfading.fuse.ir.program import Block, Op, Program, Value
from unfading.fuse.triton.stages import Stages
from unfading.fuse.triton.tile_shapes import LEAST, Tile, columns, wide
from unfading.fuse.triton.tiles import Tiles, neutral, origin, reduced

MOST_JOINED = 4  # dots of divided vectors
LONGEST_ROW = 128  # columns of joined dots of short vectors
LONGEST = 512  # entries of a row vector that one dot takes
PADDING = 4 / 3  # of a piece of a row vector, at most, unless it is short


class SplitTiles(Tiles):
    """Writes the lines of a step, stage by stage."""

    def __init__(self, program: Program, blocks: dict[Block, str]):
        super().__init__(program, blocks)
        self.skipped = frozenset(value.id for late in self.late.values() for value in late.between)
        self.stages = Stages(program, self.skipped)
        self.parts: dict[int, Tile] = {}  # the tiles of divided values
        self.dividing = False  # whether the lines being written are those of a divided value
        self.matrix_sizes: list[tuple[int, int, bool]] = []  # length, width, and whether the width is that of each unit
        self.read = 0  # entries of the row vectors of all dots
        self._matrices: dict[tuple[tuple[Block, ...], bool], str] = {}
        self._numbers = count()
        self._columns: dict[int, str] = {}  # of a joined product, by the id of the dot that they are
        self._pieces: dict[tuple[int, int, int], str] = {}
        self._read = {arg.id for value in self.stages.order for arg in value.args}
        self._sums = [value for values in self.stages.partial.values() for value in values]

    # -- where a value is -------------------------------------------------------------------------------------------------

    def tile(self, value: Value) -> Tile:
        """A value as the lines being written need it: this program's units, or the whole of it."""
        if value.size == 1 or not (self.dividing or self.stages.is_divided(value)):
            return self.tiles[value.id]
        if self.dividing:
            if value.id not in self.parts:
                self.parts[value.id] = self._part(value)
            return self.parts[value.id]
        if value.id not in self.tiles:
            self.tiles[value.id] = Tile(self._piece(value, 0, value.size), True)
        return self.tiles[value.id]

    def full(self, value: Value) -> str:
        if not self.dividing:
            return super().full(value)
        tile = self.tile(value)
        if tile.rows and value.size > 1:
            return tile.text
        return f"tl.full((ROWS, UNITS), {tile.text}, tl.float32)" if tile.is_number else _over_units(tile)

    def set_leaf(self, value: Value, tile: Tile) -> None:
        """Use a variable for a leaf."""
        (self.parts if self.stages.is_divided(value) else self.tiles)[value.id] = tile

    def has(self, value: Value) -> bool:
        return value.id in self.parts or value.id in self.tiles

    def _part(self, value: Value) -> Tile:
        """This program's units of a value that is whole."""
        self.dividing = False
        tile = self._flat(value)
        self.dividing = True
        if tile.is_number:
            return tile
        index = f"tl.broadcast_to(tl.minimum(unit, {value.size - 1}), ({'ROWS' if tile.rows else 1}, UNITS))"
        name = f"part{value.id}"
        self.lines.append(f"{name} = tl.gather({tile.text}, {index}, 1)")
        return Tile(name, tile.rows)

    # -- the lines of a stage ---------------------------------------------------------------------------------------------

    def write_stage(self, stage: int) -> list[str]:
        """The lines of the values of one stage."""
        self.lines = []
        late = []
        for value in self.stages.order:
            if self.stages.of[value.id] != stage or value.id in self.skipped or self.has(value):
                continue
            if value.op is Op.DOT and value.size == 1 and value.id not in self._read:
                late.append(value)  # so that it reads what other dots have loaded for themselves
            else:
                self._write(value)
        for value in late:
            self._write(value)
        return self.lines

    def _write(self, value: Value) -> None:
        self.dividing = self.stages.is_divided(value)
        tile = self._new_tile(value)
        (self.parts if self.dividing else self.tiles)[value.id] = tile
        self.dividing = False

    def write_exchange(self, stage: int) -> list[str]:
        """The stores of what is exchanged after a stage."""
        self.lines = []
        self._load_states(stage)
        self.dividing = True
        for value in self.stages.exchanged.get(stage, []):
            self.lines.append(exchange_store(self.stages.places[value.id], value.size, self.full(value)))
        for value in self.stages.partial.get(stage, []):
            x = value.args[0]
            own = reduced(value.op, f"tl.where(unit < {x.size}, {self.full(x)}, {neutral(value.op)})", 1)
            self.lines.append(f"tl.store({_here('step')} + {self._place_of_sum(value)} + part, {own})")
        self.dividing = False
        return self.lines

    def _load_states(self, stage: int) -> None:
        """Load the states that a later stage reads whole and whose next values are exchanged after this one.

        After that exchange another program may go on to the next step, and store in the same place.
        """
        for value in self.stages.order:
            for arg in value.args if self.stages.of[value.id] > stage else ():
                carrier = self.stages.carriers.get(arg.id)
                if carrier is None or self.stages.of[carrier.id] != stage:
                    continue
                if value.op is Op.DOT:
                    for start, stop in self._cut(arg):
                        self._piece(arg, start, stop)
                elif not self.stages.is_divided(value):
                    self.tile(arg)

    def _new_tile(self, value: Value) -> Tile:
        if self.stages.is_partial(value):
            load = f"tl.load({_here('step')} + {self._place_of_sum(value)} + every, mask=every < tl.num_programs(0) + row * 0"
            parts = f'{load}, other={neutral(value.op)}, cache_modifier=".cg")'
            return self._named(value, reduced(value.op, parts, 1), True)
        if self.dividing and value.op is Op.EXPAND:
            tile = self.tiles[value.args[0].id]
            return tile if tile.is_number else self._named(value, _over_units(tile), True)
        return super()._new_tile(value)

    def _place_of_sum(self, value: Value) -> str:
        return f"{self.stages.width} + {self._sums.index(value)} * PARTS"

    # -- dots -------------------------------------------------------------------------------------------------------------

    def _dot(self, value: Value) -> Tile:
        if value.size == 1:
            return self._dot_to_one(value)
        if value.id not in self._columns:
            self._write_group(self._group(value))
        total = self._columns.pop(value.id)
        for v, block in value.factors:
            if v.size == 1:
                term = f"{self._broadcast(self.tiles[v.id], (1,))} * {self._row(block)}"
                total = f"{term} + {total}" if total else term
        return self._named(value, total, True)

    def _group(self, value: Value) -> list[Value]:
        """The dots of a stage that read the same vectors as a value."""

        def key(dot: Value) -> tuple[object, ...]:
            divided = self.stages.is_divided(dot)
            return (self.stages.of[dot.id], divided, divided or wide(dot.size), [v.id for v, _ in _vectors(dot)])

        same = [dot for dot in self.stages.order if dot.op is Op.DOT and dot.size > 1 and key(dot) == key(value)]
        start = same.index(value)
        most = MOST_JOINED if self.dividing else max(LONGEST_ROW // wide(value.size), 1)
        return same[start : start + most]

    def _write_group(self, dots: Sequence[Value]) -> None:
        """One product for several dots, and the columns of each."""
        total, turns = "None", 1 << (len(dots) - 1).bit_length()
        name, width = f"joined{dots[0].id}", "UNITS" if self.dividing else str(wide(dots[0].size))
        # One piece is loaded at a time: each takes room on chip while it is used.
        for k, (v, _) in enumerate(_vectors(dots[0])):
            for start, stop in self._cut(v):
                matrix = self._matrix(tuple(_vectors(dot)[k][1].rows(start, stop) for dot in dots), turns)
                self.lines.append(f"{name} = product({self._piece(v, start, stop)}, {matrix}, {total}, PRECISION)")
                total = name
        columns_of = [""] * turns if total == "None" else self._in_turns(name, width, turns)
        self._columns |= dict(zip((dot.id for dot in dots), columns_of, strict=False))

    def _in_turns(self, name: str, width: str, turns: int) -> list[str]:
        """The columns of each dot. Column n * turns + k is column n of dot k, so each bit of k is an axis of its own."""
        bits, parts = turns.bit_length() - 1, [name]
        if bits:
            self.lines.append(f"{name} = tl.reshape({name}, (ROWS, {width}{', 2' * bits}))")
        for _ in range(bits):
            for part in parts:
                self.lines.append(f"{part}_0, {part}_1 = tl.split({part})")
            parts = [f"{part}_{bit}" for bit in (0, 1) for part in parts]
        return parts

    def _dot_to_one(self, value: Value) -> Tile:
        total = ""
        for v, block in value.factors:
            if v.size == 1:
                terms = [f"{self._broadcast(self.tiles[v.id], (1,))} * {self._row(block)}"]
            else:
                terms = []
                for start, stop in self._cut(v):
                    row = self._row(block.rows(start, stop))
                    terms.append(f"tl.sum({self._piece(v, start, stop)} * {row}, axis=1, keep_dims=True)")
            total = " + ".join([*terms, total] if total else terms)
        return self._named(value, total, True)

    def _cut(self, v: Value) -> list[tuple[int, int]]:
        return pieces(v.size) if self.stages.is_divided(v) else [(0, v.size)]

    def _piece(self, v: Value, start: int, stop: int) -> str:
        """Entries of a vector with zeros in the padding, from the exchange or from its tile."""
        if not self.stages.is_divided(v):
            dividing, self.dividing = self.dividing, False
            text = self._masked(super().full(v), (v.size,), "0.0")
            self.dividing = dividing
            return text
        if (v.id, start, stop) not in self._pieces:
            name = f"all{v.id}_{start}_{stop}"
            carrier = self.stages.carriers.get(v.id)
            step, place = ("step", v.id) if carrier is None else ("step + 1", carrier.id)
            self.lines.append(f"{name} = {_exchange_load(self.stages.places[place] + start, stop - start, step)}")
            self._pieces[v.id, start, stop] = name
        return self._pieces[v.id, start, stop]

    def _matrix(self, blocks: tuple[Block, ...], turns: int) -> str:
        """A matrix on chip: the columns of this program's units in each block, in turns; or the whole of a narrow block."""
        K = _long(blocks[0].length)
        self.read += K
        if (blocks, self.dividing) in self._matrices:
            return self._matrices[blocks, self.dividing]
        name, down = f"M{next(self._numbers)}", f"tl.arange(0, {K})[:, None]"
        N, first = ("UNITS", "part * UNITS") if self.dividing else (str(wide(blocks[0].width)), "0")
        column = f"tl.arange(0, {N} * {turns})[None, :]"
        self.before.append(f"turn_of, unit_of = {column} % {turns}, {first} + {column} // {turns}")
        loads = []
        for k, block in enumerate(blocks):
            W, r0, c0 = origin(block)
            mask = f"({down} < {block.length}) & (unit_of < {block.width})" + (f" & (turn_of == {k})" if turns > 1 else "")
            at = f"{W} + model * {W}_model + ({r0} + unit_of) * {W}_ROW + {c0} + {down}"
            loads.append(f"tl.load({at}, mask={mask}, other=0.0)")
        self.before.append(f"{name} = factor({' + '.join(loads)}, PRECISION)")
        self.matrix_sizes.append((K, turns if self.dividing else turns * wide(blocks[0].width), self.dividing))
        self._matrices[blocks, self.dividing] = name
        return name

    def _row(self, block: Block) -> str:
        """A single row or column of a matrix, as a row."""
        W, r0, c0 = origin(block)
        name = f"M{next(self._numbers)}"
        if block.length > 1:
            at, right, n = f"{W}_ROW * {r0} + {c0} +", columns(_long(block.length)), block.length
        else:
            right = "unit" if self.dividing else columns(wide(block.width))
            at, n = f"{c0} + {W}_ROW * ({r0} +", block.width
        close = ")" if block.length == 1 else ""
        self.before.append(f"{name} = tl.load({W} + model * {W}_model + {at} {right}{close}, mask={right} < {n}, other=0.0)")
        return name


def pieces(n: int) -> list[tuple[int, int]]:
    """Cut n entries into pieces, so that each needs little padding to a power of two."""
    out, start = [], 0
    while start < n:
        rest = n - start
        size = _long(rest)
        while size > LONGEST or (size > LEAST and size > PADDING * rest):
            size //= 2
        out.append((start, min(start + size, n)))
        start += size
    return out


def exchange_store(place: int, size: int, text: str, step: str = "step") -> str:
    """Store this program's units of a value for the others."""
    return f"tl.store({_here(step)} + {place} + unit, {text}, mask=(unit < {size}))"


def _exchange_load(place: int, size: int, step: str) -> str:
    """Entries that all programs have stored. They are read from the L2 cache, past the one of this multiprocessor."""
    along, n = columns(_long(size)), _long(size)
    mask = "" if n == size else f", mask=({along} < {size}), other=0.0"
    return f'tl.load({_here(step)} + {place} + {along}{mask}, cache_modifier=".cg")'


def _long(n: int) -> int:
    """The padded size of n entries of a row vector that a dot reads."""
    return max(LEAST, wide(n))


def _here(step: str) -> str:
    """The line of each row in the exchange of a step."""
    return f"exchange + ({step}) % 2 * apart + slot * EXCHANGE_ROW"


def _over_units(tile: Tile) -> str:
    return f"tl.broadcast_to({tile.text}, (ROWS, UNITS))"


def _vectors(dot: Value) -> list[tuple[Value, Block]]:
    """The factors of a dot that need a matrix."""
    return [(v, block) for v, block in dot.factors if v.size > 1]
