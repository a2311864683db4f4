"""One step of a program in Triton where its units are divided among the programs of a grid.

A tile of a long vector has the columns of this program's units, `unit` of them: [ROWS, UNITS], and that of a table of k lines
[ROWS, k, UNITS]. Short values are as in `tiles.py`, the same in every program. `stages.py` says what is exchanged. A line of
the exchange belongs to one row; there are two of them, for even and odd steps, since a program may already store the values of
the next step while another one still reads those of this step.

A view that needs entries of other programs is computed entry by entry: from the index of an entry follows its index in the
value behind the view, down to a value that has been exchanged, and is loaded from there, or that this program has as a whole.

Dots that read the same vectors are one dot in the source, whose columns are the units of the first, of the second, and so on in
turns. The four gates of an LSTM keep four warps busy in this way.
"""

import math
import re
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from unfading.fuse.ir.program import REDUCTIONS, Block, Op, Program, Shape, Value, pieces_of
from unfading.fuse.triton.launch_settings import CHUNKS, STAGES
from unfading.fuse.triton.stages import REARRANGED, Stages
from unfading.fuse.triton.tile_shapes import LEAST, Tile, columns, dims, inner_index, padded, power_of_two, wide
from unfading.fuse.triton.tiles import Tiles, neutral, origin, reduced

MOST_JOINED = 4  # dots of divided vectors
LONGEST_ROW = 128  # columns of joined dots of short vectors
LONGEST = 512  # entries of a row vector that one dot takes
CHUNK = "(chunk + tl.arange(0, CHUNK))"  # the entries of a chunk
PADDING = 4 / 3  # of a piece of a row vector, at most, unless it is short


Factor = tuple[Value, Sequence[Block]]  # of one or more dots


class Index(NamedTuple):
    """Some entries of a value, and the stage in which they are read."""

    at: tuple[str, ...]  # along each axis: the name of a tile [1, total]
    total: str
    stage: int


class SplitTiles(Tiles):
    """Writes the lines of a step, stage by stage."""

    summed = False  # whether dots of divided vectors are sums of products that several programs have computed

    def __init__(self, program: Program, blocks: dict[Block, str], *, streamed: bool = False):
        super().__init__(program, blocks)
        self.streamed = streamed  # whether dots of divided vectors load their matrices at every step
        self.skipped = frozenset(value.id for late in self.late.values() for value in late.between)
        self.stages = Stages(program, self.skipped, summed=self.summed)
        self.parts: dict[int, Tile] = {}  # the tiles of divided values
        self.dividing = False  # whether the lines being written are those of a divided value
        self.matrix_sizes: list[tuple[int, int, bool]] = []  # length, width, and whether the width is that of each unit
        self.read = 0  # entries of the row vectors of all dots
        self._matrices: dict[tuple[tuple[Block, ...], bool], str] = {}
        self._numbers = count()
        self._columns: dict[int, str] = {}  # of a joined product, by the id of the dot that they are
        self._pieces: dict[tuple[int, int, int], str] = {}
        self._read = {arg.id for value in self.stages.order for arg in value.args}
        self._entries: set[str] = set()  # names of indices of the entries of divided tables
        self._at_index: dict[tuple[int, Index], Tile] = {}  # entries of a value, by its id and their index
        self._index_names: dict[tuple[str, str], str] = {}
        self._sums: dict[int, int] = {}  # the place of each sum
        self.partial = 0  # of all sums
        for value in (value for values in self.stages.partial.values() for value in values):
            self._sums[value.id] = self.partial
            self.partial += _sums(value)

    # -- where a value is -------------------------------------------------------------------------------------------------

    def tile(self, value: Value) -> Tile:
        """A value as the lines being written need it: this program's units, or the whole of it."""
        return (self.parts if self.dividing and value.size > 1 else self.tiles)[value.id]

    def full(self, value: Value) -> str:
        if not self.dividing:
            return super().full(value)
        if self.stages.is_spread(value):
            return self._share(value)
        tile, flat = self.tile(value), f"(ROWS, {self.entries(value.shape)})"
        if tile.is_number:
            return f"tl.full({flat}, {tile.text}, tl.float32)"
        rows = "ROWS" if tile.rows else "1"
        text = tile.text if len(value.shape) < 2 else f"tl.reshape({tile.text}, ({rows}, {self.entries(value.shape)}))"
        return text if tile.rows else f"tl.broadcast_to({text}, {flat})"

    def entries(self, shape: Shape) -> str:
        """The number of entries of a divided or spread value in one program."""
        return share(math.prod(shape)) if self.stages.spreads(shape) else f"{math.prod(map(power_of_two, shape[:-1]))} * UNITS"

    def entry(self, shape: Shape) -> str:
        """The name of the indices of these entries, [1, all of them]; past the end of the value for padding."""
        if len(shape) == 1:
            return "unit"
        name = f"entry{'_'.join(map(str, shape))}"
        if name not in self._entries:
            self._entries.add(name)
            if self.stages.spreads(shape):
                text = f"part * {self.entries(shape)} + tl.arange(0, {self.entries(shape)})[None, :]"
            else:
                index = _axes(shape, _sizes(shape, True))
                inside = " & ".join(f"({at} < {n})" for at, n in zip(index, shape, strict=True))
                text = f"tl.where({inside}, {_place(index, shape)}, {math.prod(shape)})"
            self.before.append(f"{name} = {text}")
        return name

    def set_leaf(self, value: Value, tile: Tile) -> None:
        """Use a variable for a leaf."""
        (self.parts if self.stages.is_divided(value) else self.tiles)[value.id] = tile

    def has(self, value: Value) -> bool:
        return value.id in self.parts or value.id in self.tiles

    # -- the lines of a stage ---------------------------------------------------------------------------------------------

    def write_stage(self, stage: int) -> list[str]:
        """The lines of the values of one stage."""
        self.lines = []
        late = []
        for value in self.stages.order:
            if self.stages.of[value.id] != stage or value.id in self.skipped or self.has(value) or self.stages.is_spread(value):
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
            place, along = self.stages.places[value.id], self.entry(value.shape)
            self.lines.append(exchange_store(place, along, value.size, self.full(value)))
        for value in self.stages.partial.get(stage, []):
            x, n = value.args[0], _sums(value)
            own = self.full(x)
            if len(x.shape) > 1:
                own = f"tl.reshape({own}, (ROWS, {', '.join(_sizes(x.shape, True))}))"
            own = f"tl.reshape({self._reduced(value, own)}, (ROWS, {n}))"
            self.lines.append(f"tl.store({_here('step')} + {self._place_of_sum(value)} + {columns(n)} * PARTS + part, {own})")
        for value in self.stages.shared.get(stage, []):
            own = self._share_of_sums(value)
            along = f"(part * {share(value.size)} + tl.arange(0, {share(value.size)})[None, :])"
            self.lines.append(exchange_store(self.stages.places[value.id], along, value.size, own))
        self.dividing = False
        return self.lines

    def _load_states(self, stage: int) -> None:
        """Load the states that the dots of a later stage read and whose next values are exchanged after this one.

        After that exchange another program may go on to the next step, and store in the same place.
        """
        for value in self.stages.order:
            for arg in value.args if self.stages.of[value.id] > stage else ():
                carrier = self.stages.carriers.get(arg.id)
                if carrier is None or self.stages.of[carrier.id] != stage:
                    continue
                for start, stop in self._cut(arg) if value.op is Op.DOT else ():
                    self._piece(arg, start, stop)

    def _new_tile(self, value: Value) -> Tile:
        if self.stages.is_partial(value):
            return self._total(value)
        if value.op in REDUCTIONS and self.dividing:
            tile = self.tile(value.args[0])
            return self._named(value, self._reduced(value, tile.text), tile.rows)
        if self.stages.is_shared(value):
            return self._by_index(value)
        if value.op in REARRANGED:
            local = self._local_view(value) if self.dividing else None
            if local is not None:
                return local
            if self.dividing or any(self.stages.is_divided(x) or self.stages.is_spread(x) for x in value.args):
                return self._by_index(value)
        return super()._new_tile(value)

    def _total(self, value: Value) -> Tile:
        """A reduction of the reductions of all programs."""
        n = _sums(value)
        every = f"tl.arange(0, {n} * PARTS)[None, :]"
        there = f"mask={every} % PARTS < tl.num_programs(0) + row * 0, other={neutral(value.op)}"
        parts = f'tl.load({_here("step")} + {self._place_of_sum(value)} + {every}, {there}, cache_modifier=".cg")'
        if len(value.shape) == 1:
            return self._named(value, reduced(value.op, parts, 1), True)
        text = reduced(value.op, f"tl.reshape({parts}, (ROWS, {n}, PARTS))", 2)
        return self._named(value, f"tl.reshape({text}, {dims(Tile('', True), padded(value.shape))})", True)

    def _reduced(self, value: Value, text: str) -> str:
        """A reduction of the entries that this program has."""
        shape = value.args[0].shape
        tests = []
        for axis in value.axes:
            n, at = shape[axis], "".join(", :" if k == axis else ", None" for k in range(len(shape)))
            if axis == len(shape) - 1:
                tests.append(f"((part * UNITS + tl.arange(0, UNITS))[None{at}] < {n})")
            elif n != power_of_two(n):
                tests.append(f"(tl.arange(0, {power_of_two(n)})[None{at}] < {n})")
        text = f"tl.where({' & '.join(tests)}, {text}, {neutral(value.op)})" if tests else text
        for axis in value.axes:
            text = reduced(value.op, text, axis + 1)
        return text

    def _place_of_sum(self, value: Value) -> str:
        return f"{self.stages.width} + {self._sums[value.id]} * PARTS"

    # -- views ------------------------------------------------------------------------------------------------------------

    def _local_view(self, value: Value) -> Tile | None:
        """A view of entries that this program has; None where it needs others."""
        x = value.args[0]
        own = self.stages.is_local(value) or (value.op is Op.EXPAND and x.size > 1 and x.shape[-1] == value.shape[-1])
        if not own and not (value.op is Op.EXPAND and x.id in self.tiles and (x.size == 1 or x.shape[-1] == 1)):
            return None
        if own and x.id not in self.parts:  # every program has all of it
            self.parts[x.id] = self._by_index(x)
        tile = self.parts[x.id] if own else self.tiles[x.id]
        if tile.is_number:
            return tile
        rows, sizes = "ROWS" if tile.rows else "1", _sizes(value.shape, True)
        lead = (1,) * (len(value.shape) - len(x.shape)) + x.shape[:-1]
        before = [*map(str, map(power_of_two, lead[: len(value.shape) - 1])), "UNITS" if own else "1"]
        text = f"tl.reshape({tile.text}, ({', '.join([rows, *(sizes if value.op is Op.RESHAPE else before)])}))"
        if value.op is Op.EXPAND:
            text = f"tl.broadcast_to({text}, ({', '.join([rows, *sizes])}))"
        return self._named(value, text, tile.rows)

    def _by_index(self, value: Value) -> Tile:
        """A value with each entry computed from its index."""
        is_part = self.dividing and not self.stages.is_divided(value)
        sizes = _sizes(value.shape, self.dividing)
        clamped = [f"tl.minimum({at}, {n - 1})" for at, n in zip(_axes(value.shape, sizes), value.shape, strict=True)]
        index = self._index(clamped, " * ".join(sizes), self.stages.of[value.id])
        if is_part:
            tile = self._picked(value, index)
        else:
            tile = self._rearranged(value, index) if value.op in REARRANGED else self._exchanged(value, index)
        if tile.is_number:
            return tile
        text = (
            tile.text if len(sizes) == 1 else f"tl.reshape({tile.text}, ({', '.join(['ROWS' if tile.rows else '1', *sizes])}))"
        )
        name = f"part{value.id}" if is_part else f"v{value.id}"
        self.lines.append(f"{name} = {text}")
        return Tile(name, tile.rows)

    def _share(self, value: Value) -> str:
        """This program's share of a spread value."""
        last = f"tl.minimum({self.entry(value.shape)}, {value.size - 1})"
        index = self._index(_along_axes(last, value.shape), self.entries(value.shape), self.stages.of[value.id])
        return self._broadcast_to(self._at(value, index), index.total)

    def _share_of_sums(self, value: Value) -> str:
        """This program's share of the sums of a spread value along some axes."""
        x, own = value.args[0], share(value.size)
        sizes = {axis: power_of_two(x.shape[axis]) for axis in value.axes}
        K = math.prod(sizes.values())
        entry = f"tl.arange(0, {own} * {K})[None, :]"
        texts = _along_axes(f"tl.minimum(part * {own} + {entry} // {K}, {value.size - 1})", value.shape)
        stride, tests = K, []
        for axis, size in sizes.items():
            stride //= size
            at = f"{entry} // {stride} % {size}"
            texts[axis] = f"tl.minimum({at}, {x.shape[axis] - 1})"
            tests += [f"({at} < {x.shape[axis]})"] if x.shape[axis] != size else []
        index = self._index(texts, f"{own} * {K}", self.stages.of[value.id] - 1)
        text = self._broadcast_to(self._at(x, index), index.total)
        if tests:
            text = f"tl.where({' & '.join(tests)}, {text}, {neutral(value.op)})"
        return f"tl.reshape({reduced(value.op, f'tl.reshape({text}, (ROWS, {own}, {K}))', 2)}, (ROWS, {own}))"

    def _broadcast_to(self, tile: Tile, total: str) -> str:
        if tile.is_number:
            return f"tl.full((ROWS, {total}), {tile.text}, tl.float32)"
        return tile.text if tile.rows else f"tl.broadcast_to({tile.text}, (ROWS, {total}))"

    def _at(self, x: Value, index: Index) -> Tile:
        """The entries of a value at an index, as a flat tile."""
        if (x.id, index) not in self._at_index:
            if not (self.stages.is_divided(x) or self.stages.is_spread(x)):
                tile = self._picked(x, index)
            elif self.stages.sources(x) == (x,):
                tile = self._exchanged(x, index)
            elif x.op in REARRANGED:
                tile = self._rearranged(x, index)
            else:
                tile = self._elementwise_of(x, [self._at(arg, index) for arg in x.args])
            if not tile.is_number:
                name = f"at{next(self._numbers)}"
                self.lines.append(f"{name} = {tile.text}")
                tile = Tile(name, tile.rows)
            self._at_index[x.id, index] = tile
        return self._at_index[x.id, index]

    def _picked(self, x: Value, index: Index) -> Tile:
        """From a value that every program has."""
        tile = self.tiles[x.id]
        if tile.is_number:
            return tile
        rows = "ROWS" if tile.rows else "1"
        if x.size == 1:
            return Tile(f"tl.broadcast_to({self._flat(x).text}, ({rows}, {index.total}))", tile.rows)
        inner = padded(x.shape)
        flat = tile.text if len(inner) == 1 else f"tl.reshape({tile.text}, ({rows}, {math.prod(inner)}))"
        place = self._index([_place(index.at, inner)], index.total, index.stage).at[0]
        return Tile(f"tl.gather({flat}, tl.broadcast_to({place}, ({rows}, {index.total})), 1)", tile.rows)

    def _exchanged(self, x: Value, index: Index) -> Tile:
        """From a value that has been exchanged."""
        carrier = self.stages.carriers.get(x.id) if index.stage == 0 else None
        step, place = ("step", x.id) if carrier is None else ("step + 1", carrier.id)
        at = self._index([_place(index.at, x.shape)], index.total, index.stage).at[0]
        return Tile(f'tl.load({_here(step)} + {self.stages.places[place]} + {at}, cache_modifier=".cg")', True)

    def _rearranged(self, x: Value, index: Index) -> Tile:
        """From the argument of a view, or the arguments of a concatenation."""
        if x.op is not Op.CAT:
            return self._at(x.args[0], self._index(_behind(x, index.at), index.total, index.stage))
        text, rows, at = "0.0", False, index.at[x.axis]
        for start, stop, piece in pieces_of(x.args, x.axis):
            inside = f"tl.minimum(tl.maximum({at} - {start}, 0), {stop - start - 1})"
            texts = [inside if axis == x.axis else other for axis, other in enumerate(index.at)]
            tile = self._at(piece, self._index(texts, index.total, index.stage))
            text, rows = f"tl.where(({at} >= {start}) & ({at} < {stop}), {tile.text}, {text})", rows or tile.rows
        return Tile(text, rows)

    def _index(self, texts: Sequence[str], total: str, stage: int) -> Index:
        """Give names to indices, which are the same at every step."""
        names = []
        for text in texts:
            if (total, text) not in self._index_names and not text.isidentifier():
                self._index_names[total, text] = f"at{next(self._numbers)}"
                self.before.append(f"{self._index_names[total, text]} = tl.arange(0, {total})[None, :] * 0 + {text}")
            names.append(self._index_names.get((total, text), text))
        return Index(tuple(names), total, stage)

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
            divided, vectors = self.stages.is_divided(dot), _vectors(dot)
            # A chunk of one matrix goes to its place on chip directly.
            matrices = [origin(block)[0] for v, block in vectors if self._is_streamed(v)]
            return (self.stages.of[dot.id], divided, divided or wide(dot.size), [v.id for v, _ in vectors], matrices)

        same = [dot for dot in self.stages.order if dot.op is Op.DOT and dot.size > 1 and key(dot) == key(value)]
        start = same.index(value)
        most = MOST_JOINED if self.dividing else max(LONGEST_ROW // wide(value.size), 1)
        return same[start : start + most]

    def joined_products(self) -> list[list[Value]]:
        """The dots of divided vectors, those together that are one dot in the source.

        Without dots of one entry. There are none where every program needs all entries of such a dot, or a sum over features.
        """
        dots = [dot for dot in self.stages.order if self.stages.is_product(dot) and dot.id not in self.skipped and dot.size > 1]
        if not all(map(self.stages.is_divided, dots)) or self.stages.partial or self.stages.shared:
            return []
        joined: list[list[Value]] = []
        self.dividing = True
        for dot in dots:
            if dot.id not in {other.id for together in joined for other in together}:
                joined.append(self._group(dot))
        self.dividing = False
        return joined

    def _write_group(self, dots: Sequence[Value]) -> None:
        """One product for several dots, and the columns of each."""
        total, turns = "None", turns_of(dots)
        name, width = f"joined{dots[0].id}", "UNITS" if self.dividing else str(wide(dots[0].size))
        # One piece is loaded at a time: each takes room on chip while it is used.
        for together in self._in_one_loop(joined_factors(dots)):
            v, blocks = together[0]
            if self._is_streamed(v):
                if total == "None":
                    self.lines.append(f"{name} = tl.zeros((ROWS, {width} * {turns}), tl.float32)")
                self.lines += self._streamed_product(name, together, turns)
                total = name
                continue
            for start, stop in self._cut(v):
                matrix = self._matrix(tuple(block.rows(start, stop) for block in blocks), turns)
                self.lines.append(f"{name} = product({self._piece(v, start, stop)}, {matrix}, {total}, PRECISION)")
                total = name
        self._set_columns(dots, "" if total == "None" else name, width)

    def _set_columns(self, dots: Sequence[Value], name: str, width: str) -> None:
        """Find the columns of each dot in the product of all of them; `name` is empty where there is none."""
        turns = turns_of(dots)
        columns_of = self._in_turns(name, width, turns) if name else [""] * turns
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
            elif self._is_streamed(v):
                terms = [self._streamed_dot_to_one(v, block)]
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
            name, along, size = f"all{v.id}_{start}_{stop}", columns(_long(stop - start)), stop - start
            mask = "inside" if _long(size) == size else f"inside & ({along} < {size})"
            self.lines.append(f"{name} = {self._exchange_load(v, self._place(v) + start, along, mask)}")
            self._pieces[v.id, start, stop] = name
        return self._pieces[v.id, start, stop]

    def _exchange_load(self, v: Value, place: int | str, along: str, mask: str) -> str:
        """Entries that all programs have stored. They are read from the L2 cache, past the one of this multiprocessor."""
        here = _here("step + 1" if v.id in self.stages.carriers else "step")
        return f'tl.load({here} + {place} + {along}, mask={mask}, other=0.0, cache_modifier=".cg")'

    def _place(self, v: Value) -> int:
        """The entry of a line of the exchange at which a vector begins."""
        return self.stages.places[self.stages.carriers.get(v.id, v).id]

    def _matrix(self, blocks: tuple[Block, ...], turns: int) -> str:
        """A matrix on chip: the columns of this program's units in each block, in turns; or the whole of a narrow block."""
        K = _long(blocks[0].length)
        self.read += K
        if (blocks, self.dividing) not in self._matrices:
            name, down = f"M{next(self._numbers)}", f"tl.arange(0, {K})[:, None]"
            rest = "" if blocks[0].length == K else f" & ({down} < {blocks[0].length})"
            self.before.append(f"{name} = factor({self._matrix_load(blocks, turns, down, rest)}, PRECISION)")
            self.matrix_sizes.append((K, turns if self.dividing else turns * wide(blocks[0].width), self.dividing))
            self._matrices[blocks, self.dividing] = name
        return self._matrices[blocks, self.dividing]

    def _matrix_load(self, blocks: Sequence[Block], turns: int, down: str, rest: str) -> str:
        """Rows `down` of a matrix, of which column n * turns + k is column n of block k; `rest` is the mask of its rows."""
        number = next(self._numbers)
        N, first = self._columns_on_chip(blocks[0])
        column = f"tl.arange(0, {N} * {turns})[None, :]"
        self.before.append(f"turn_of, unit_of = {column} % {turns}, {first} + {column} // {turns}")
        loads = []
        origins = [origin(block) for block in blocks]
        for W in dict.fromkeys(W for W, _, _ in origins):
            own = [k for k, other in enumerate(origins) if other[0] == W]
            r0, c0 = (_in_turns(own, [str(origins[k][axis]) for k in own]) for axis in (1, 2))
            some = "" if len(own) == turns else f" & ({' | '.join(f'(turn_of == {k})' for k in own)})"
            self.before.append(f"from{number}_{W} = ({r0} + unit_of) * {W}_ROW + {c0}")
            self.before.append(f"of{number}_{W} = (unit_of < {_in_turns(own, [str(blocks[k].width) for k in own])}){some}")
            at = f"{W} + model * {W}_model * {W}_ROW + from{number}_{W} + {down}"
            loads.append(f"tl.load({at}, mask=of{number}_{W}{rest}, other=0.0)")
        return " + ".join(loads)

    def _columns_on_chip(self, block: Block) -> tuple[str, str]:
        """The number of columns of a block that this program has, and the first of them."""
        return ("UNITS", "part * UNITS") if self.dividing else (str(wide(block.width)), "0")

    # -- matrices that do not fit on chip ---------------------------------------------------------------------------------

    def _is_streamed(self, v: Value) -> bool:
        """Whether a dot reads a vector and the matrix in chunks. A vector that is on chip already is read there."""
        return self.streamed and self.stages.is_divided(v) and (v.id, *self._cut(v)[0]) not in self._pieces

    def _in_one_loop(self, factors: Sequence[Factor]) -> list[list[Factor]]:
        """The factors, those side by side that one loop over chunks can read: they differ only in where they begin."""

        def key(factor: Factor) -> object:
            v, blocks = factor
            (W, r0, c0), *others = (origin(block) for block in blocks)
            if not self._is_streamed(v) or any(other[0] != W for other in others):
                return object()  # equal to no other
            apart = [(r - r0, c - c0) for _, r, c in others]
            return W, v.id in self.stages.carriers, v.size, apart, [block.width for block in blocks]

        groups: list[list[Factor]] = []
        for factor in factors:
            if groups and key(groups[-1][0]) == key(factor):
                groups[-1].append(factor)
            else:
                groups.append([factor])
        return groups

    def _streamed_product(self, name: str, factors: Sequence[Factor], turns: int) -> list[str]:
        """Add products of vectors and matrices, a chunk at a time."""
        v, blocks = factors[0]
        self.read += len(factors) * _long(v.size)
        W, r0, c0 = origin(blocks[0])
        starts = [f"{r - r0} * {W}_ROW + {c - c0}" for _, r, c in (origin(others[0]) for _, others in factors)]
        matrix = self._matrix_load(blocks, turns, f"start + {CHUNK}[:, None]", _rest(v, "[:, None]"))
        product = f"{name} = product({self._chunk(v)}, factor({matrix}, PRECISION), {name}, PRECISION)"
        return self._in_chunks([v for v, _ in factors], [f"start = {_by_factor(starts, v)}", product])

    def _streamed_dot_to_one(self, v: Value, block: Block) -> str:
        W, r0, c0 = origin(block)
        name, along = f"one{next(self._numbers)}", f"{CHUNK}[None, :]"
        at = f"{W} + (model * {W}_model + {r0}) * {W}_ROW + {c0} + {along}"
        row = f"tl.load({at}, mask={along} < {v.size}, other=0.0)"
        self.lines.append(f"{name} = tl.zeros((ROWS, 1), tl.float32)")
        self.lines += self._in_chunks([v], [f"{name} += tl.sum({self._chunk(v)} * {row}, axis=1, keep_dims=True)"])
        return name

    def _in_chunks(self, vectors: Sequence[Value], lines: Sequence[str]) -> list[str]:
        """Lines for every chunk of some vectors of the same size. The next chunks are loaded before they end."""
        size = _whole_chunks(vectors[0])
        place = _by_factor([str(self._place(v)) for v in vectors], vectors[0])
        loop = f"for entry in tl.range(0, {len(vectors)} * {size}, CHUNK, num_stages={STAGES}):"
        return [loop, *(f"    {line}" for line in (f"chunk, place_of = entry % {size}, {place}", *lines))]

    def _chunk(self, v: Value) -> str:
        return self._exchange_load(v, "place_of", f"{CHUNK}[None, :]", f"inside{_rest(v, '[None, :]')}")

    def _row(self, block: Block) -> str:
        """A single row or column of a matrix, as a row."""
        W, r0, c0 = origin(block)
        name = f"M{next(self._numbers)}"
        if block.length > 1:
            right, n = columns(_long(block.length)), block.length
            at = f"(model * {W}_model + {r0}) * {W}_ROW + {c0} + {right}"
        else:
            right, n = "unit" if self.dividing else columns(wide(block.width)), block.width
            at = f"(model * {W}_model + {r0} + {right}) * {W}_ROW + {c0}"
        self.before.append(f"{name} = tl.load({W} + {at}, mask={right} < {n}, other=0.0)")
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


def exchange_store(place: int, along: str, size: int, text: str, step: str = "step") -> str:
    """Store this program's entries of a value for the others."""
    return f"tl.store({_here(step)} + {place} + {along}, {text}, mask=({along} < {size}))"


def _long(n: int) -> int:
    """The padded size of n entries of a row vector that a dot reads."""
    return max(LEAST, wide(n))


def _here(step: str) -> str:
    """The line of each row in the exchange of a step."""
    return f"exchange + ({step}) % 2 * apart + slot * EXCHANGE_ROW"


def share(n: int) -> str:
    """The number of n entries that each program computes, so that all of them together compute all."""
    return f"(({2 * power_of_two(n)} + PARTS - 1) // PARTS)"


def _sums(value: Value) -> int:
    """The number of sums of a reduction of a table, padded."""
    return math.prod(padded(value.shape))


def _sizes(shape: Shape, divided: bool) -> list[str]:
    """The axes of a tile."""
    return [*(str(power_of_two(n)) for n in shape[:-1]), "UNITS"] if divided else [str(n) for n in padded(shape)]


def _axes(shape: Shape, sizes: Sequence[str]) -> list[str]:
    """The index along each axis of the entries of a flat tile."""
    entry, out = f"tl.arange(0, {' * '.join(sizes)})[None, :]", []
    for axis in range(len(shape)):
        at = f"{entry} // ({' * '.join(['1', *sizes[axis + 1 :]])}) % {sizes[axis]}"
        out.append(f"(part * UNITS + {at})" if sizes[axis] == "UNITS" else f"({at})")
    return out


def _place(index: Sequence[str], shape: Shape) -> str:
    """The place of an entry in a flat table."""
    out, stride = [], 1
    for at, n in zip(reversed(index), reversed(shape), strict=True):
        out.append(f"{at} * {stride}")
        stride *= n
    return " + ".join(out) or "0"


def _behind(view: Value, index: Sequence[str]) -> list[str]:
    """The index of an entry of a view in the value behind it."""
    if view.op is Op.PERMUTE:
        return [index[view.axes.index(axis)] for axis in range(len(index))]
    return [re.sub(r"\bi(\d+)\b", lambda at: index[int(at[1])], text) for text in inner_index(view)]


def _along_axes(entry: str, shape: Shape) -> list[str]:
    """The index along each axis of an entry of a flat table."""
    out, stride = [], math.prod(shape)
    for n in shape:
        stride //= n
        out.append(f"{entry} // {stride} % {n}")
    return out


def _whole_chunks(v: Value) -> str:
    return f"(({v.size} + CHUNK - 1) // CHUNK * CHUNK)"


def _rest(v: Value, axes: str) -> str:
    """The mask of the entries of a chunk that a vector has, after another mask."""
    return "" if v.size % max(CHUNKS) == 0 else f" & ({CHUNK}{axes} < {v.size})"


def _by_factor(texts: Sequence[str], v: Value) -> str:
    """The text of the factor that a chunk belongs to."""
    text = texts[-1]
    for k, other in reversed([*enumerate(texts[:-1], 1)]):
        text = f"tl.where(entry < {k} * {_whole_chunks(v)}, {other}, {text})"
    return text


def _in_turns(turns: Sequence[int], texts: Sequence[str]) -> str:
    """The text of the turn of each column."""
    text = texts[-1]
    for k, other in zip(turns[-2::-1], texts[-2::-1], strict=True):
        text = text if text == other else f"tl.where(turn_of == {k}, {other}, {text})"
    return text


def turns_of(dots: Sequence[Value]) -> int:
    """The columns for each unit in the product of several dots: a power of two."""
    return 1 << (len(dots) - 1).bit_length()


def joined_factors(dots: Sequence[Value]) -> list[Factor]:
    """The row vectors of dots that read the same ones, each with its matrices."""
    return [(v, [_vectors(dot)[k][1] for dot in dots]) for k, (v, _) in enumerate(_vectors(dots[0]))]


def _vectors(dot: Value) -> list[tuple[Value, Block]]:
    """The factors of a dot that need a matrix."""
    return [(v, block) for v, block in dot.factors if v.size > 1]
