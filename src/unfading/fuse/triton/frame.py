"""What stands around a step in a Triton kernel: names, loads and stores of tiles, and what is carried from step to step.

A tensor [models, T, B, n] is a table of lines: row b of step t of a model lies in line `model * x_model + t * B + b`, lines
are `x_ROW` entries apart, and that is known when the kernel is compiled, so that loads are as wide as the memory allows.
Offsets within a block of rows are small; the rest of an address is computed in 64 bits.
"""

import keyword
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unfading.fuse.ir.program import Block, InputKind, Leaf, Op, Program, Store, TensorId, TensorKind, Value
from unfading.fuse.triton.tile_shapes import Tile, columns, wide
from unfading.fuse.triton.tiles import Tiles, is_vector, load_of

# Names that a kernel has for itself.
OWN = re.compile(
    r"([vi]|W|col|d?input|d?initial|d?next|d?final|saved|d?weight|sequence)\d+(_\w+)?|(index|flat|sum)_\w+|\w+_(model|ahead|here|now|new|start)"
    r"|place|tl|triton|model|wide|first|row|inside|lengths?|steps?|count|at|on|tanh|sigmoid|expm1|log1p|larger|smaller|rest|one_less_square"
    r"|factor|product|T|B|ROWS|REVERSE|RESIDENT|PRECISION|FAST|range|float"
)


class Names(NamedTuple):
    """What a cell calls its inputs, its states and its weights."""

    inputs: Sequence[str]
    states: Sequence[str]
    weights: Sequence[str]


class Piece(NamedTuple):
    """Entries start..stop of a tensor's row, and the variable they are held in."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Load(NamedTuple):
    name: str
    leaf: Leaf


class Frame:
    """Writes what a step reads and where it goes, and notes which tensors that needs."""

    on = ["if lengths is not None:", "    on = inside & (row * 0 + step < length)", "else:", "    on = inside"]

    def __init__(self, program: Program, names: Names, *, backward: bool):
        self.program, self.names, self.backward = program, names, backward
        self.pointers: dict[TensorId, None] = {}
        self.matrices: dict[tuple[int, bool], None] = {}
        self.taken: set[str] = set()
        self.before: list[str] = []
        self.sums: list[str] = []  # accumulators, before the loop
        self.summed: list[str] = []  # and what becomes of them after it
        self.blocks = {block: f"{self._of_block(block)}_{k}" for k, block in enumerate(program.blocks())}
        self.tiles = Tiles(program, self.blocks)
        self.leaves: dict[Leaf, Value] = {value.leaf: value for value in program.values() if value.op is Op.LEAF}

    def legend(self) -> list[str]:
        """What the cell calls what the kernel numbers."""
        kinds = (
            (TensorKind.INPUT, self.names.inputs),
            (TensorKind.STATE, self.names.states),
            (TensorKind.WEIGHT, self.names.weights),
        )
        return [f"{kind} {i} is {name}" for kind, names in kinds for i, name in enumerate(names)]

    def name(self, wish: str) -> str:
        """A name for a variable, near the wish."""
        name = re.sub(r"\W", "_", wish)
        if OWN.fullmatch(name) or keyword.iskeyword(name) or not name.isidentifier():
            name = f"the_{name}_"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    # -- leaves -----------------------------------------------------------------------------------------------------------

    def carry(self, kind: TensorKind, names: Sequence[str]) -> dict[int, list[Piece]]:
        """The variables that go from step to step: the pieces in which the program stores them."""
        carried: dict[int, list[Piece]] = {}
        for store in self.program.stores:
            if store.kind == kind:
                width, stop = self._width(kind, store.index), store.start + store.value.size
                whole = store.value.size == width
                name = self.name(names[store.index] if whole else f"{names[store.index]}_{store.start}")
                carried.setdefault(store.index, []).append(Piece(name, store.start, stop))
        return dict(sorted(carried.items()))

    def read_carried(self, kind: TensorKind, index: int, pieces: Sequence[Piece]) -> None:
        """The leaves of a kind are what is carried, or cut and joined from it."""
        for leaf, value in self.leaves.items():
            if (leaf.kind, leaf.index) != (kind, index):
                continue
            same = next((piece for piece in pieces if (piece.start, piece.stop) == (leaf.start, leaf.stop)), None)
            name = same.name if same else f"v{value.id}"
            if same is None:
                self.tiles.joined(name, pieces, leaf.start, leaf.stop)
            self.tiles.found[value.id] = Tile(name, True)

    def read_loads(self) -> list[Load]:
        """All other leaves. Those that hold for all time are loaded before the loop; the rest is returned."""
        loads = []
        for leaf, value in self.leaves.items():
            if value.id in self.tiles.found:
                continue
            whole = leaf.stop - leaf.start == self._width(leaf.kind, leaf.index)
            name = self.name(self._called(leaf) if whole else f"{self._called(leaf)}_{leaf.start}")
            shared = leaf.kind == TensorKind.WEIGHT or (
                leaf.kind == TensorKind.INPUT and self.program.kinds[leaf.index] == InputKind.SHARED
            )
            self.tiles.found[value.id] = Tile(name, not shared)
            piece = Piece(name, leaf.start, leaf.stop)
            if leaf.kind == TensorKind.WEIGHT:
                self.before.append(f"{name} = {self.load_row(TensorKind.WEIGHT, leaf.index, piece, '0')}")
            elif leaf.kind == TensorKind.INPUT and self.program.kinds[leaf.index] == InputKind.CONSTANT:
                self.before.append(f"{name} = {self.load(TensorKind.INPUT, leaf.index, piece, 'first', 'inside')}")
            else:
                loads.append(Load(name, leaf))
                if leaf.kind == TensorKind.STATE:
                    self.before.append(f"{name}_start = {self.load(TensorKind.INITIAL, leaf.index, piece, 'first', 'inside')}")
        return loads

    def _called(self, leaf: Leaf) -> str:
        if leaf.kind == TensorKind.INPUT:
            return self.names.inputs[leaf.index]
        if leaf.kind == TensorKind.WEIGHT:
            return self.names.weights[leaf.index]
        if leaf.kind == TensorKind.SAVED:
            return "kept"
        return self.names.states[leaf.index] + ("_before" if leaf.kind == TensorKind.STATE else "")

    # -- loads and stores -------------------------------------------------------------------------------------------------

    def pointer(self, kind: TensorKind, index: int) -> str:
        self.pointers[kind, index] = None
        return f"{kind}{index}"

    def at(self, step: str) -> tuple[str, str]:
        """The place of a step that need not be there, and the mask of the rows that have it."""
        alive = f"inside & (row * 0 + {step} < length)" + (f" & (row * 0 + {step} >= 0)" if self.backward else "")
        return f"place({step}, length, wide, first, REVERSE)", alive

    def read(self, load: Load, step: str) -> str:
        """A leaf as it is at a step."""
        leaf, piece = load.leaf, Piece(load.name, load.leaf.start, load.leaf.stop)
        if leaf.kind == TensorKind.INPUT and self.program.kinds[leaf.index] == InputKind.SHARED:
            return self.load_row(leaf.kind, leaf.index, piece, step)
        if leaf.kind != TensorKind.STATE:
            return self.load(leaf.kind, leaf.index, piece, *self.at(step))
        # Before the first step there is the initial state: what a masked load gives.
        earlier = step.replace(" - 1", " - 2")
        return self.load(TensorKind.NEXT, leaf.index, piece, *self.at(earlier), other=f"{load.name}_start")

    def load(self, kind: TensorKind, index: int, piece: Piece, line: str, mask: str, other: str = "0.0") -> str:
        """Entries of one line for every row of the block."""
        return f"tl.load({self._address(kind, index, piece, line)}, mask={self._mask(piece, mask)}, other={other})"

    def load_row(self, kind: TensorKind, index: int, piece: Piece, line: str) -> str:
        """Entries of one line for all rows."""
        pointer, along = self.pointer(kind, index), columns(wide(piece.size))
        mask = f"({along} < {piece.size})" + ("" if kind == TensorKind.WEIGHT else f" & ({along} * 0 + {line} < T)")
        mask += f" & ({along} * 0 + {line} >= 0)" if self.backward and kind != TensorKind.WEIGHT else ""
        address = f"{pointer} + (model * {pointer}_model + {line}) * {pointer}_ROW + {piece.start} + {along}"
        return f"tl.load({address}, mask={mask}, other=0.0)"

    def write(self, kind: TensorKind, index: int, piece: Piece, text: str, line: str, mask: str) -> str:
        return f"tl.store({self._address(kind, index, piece, line)}, {text}, mask={self._mask(piece, mask)})"

    def _address(self, kind: TensorKind, index: int, piece: Piece, line: str) -> str:
        pointer = self.pointer(kind, index)
        base = f"{pointer} + (model * {pointer}_model + {line}) * {pointer}_ROW"
        return f"{base} + (row * {pointer}_ROW + {piece.start} + {columns(wide(piece.size))})"

    def _mask(self, piece: Piece, mask: str) -> str:
        return mask if piece.size == wide(piece.size) else f"{mask} & ({columns(wide(piece.size))} < {piece.size})"

    def store(self, store: Store) -> str:
        """A value on its way out of a step."""
        kind, index, start, value = store
        late = self.tiles.late.get(store)
        text = self.tiles.full(late.summand if late else value)
        piece = Piece("", start, start + value.size)
        if kind == TensorKind.D_WEIGHT:
            return self._add_up(kind, index, start, (late.summand if late else value).size, text, bool(late))
        if kind != TensorKind.D_INPUT or self.program.kinds[index] == InputKind.SEQUENCE:
            return _given(kind, index, self.write(kind, index, piece, text, "at", "on"))
        if self.program.kinds[index] == InputKind.CONSTANT:
            return _given(kind, index, self._add_up(kind, index, start, value.size, text, False))
        pointer, along = self.pointer(kind, index), columns(wide(value.size))
        line = "step * (wide * 0 + tl.num_programs(0)) + tl.program_id(0)"
        address = f"{pointer} + (model * {pointer}_model + {line}) * {pointer}_ROW + {start} + {along}"
        total = f"tl.sum(tl.where(on, {text}, 0.0), axis=0, keep_dims=True)"
        return _given(kind, index, f"tl.store({address}, {total}, mask={along} < {value.size})")

    def _add_up(self, kind: TensorKind, index: int, start: int, size: int, text: str, whole: bool) -> str:
        """Add to a sum over time, which is written after the loop: row by row, or summed over the block and over features."""
        name, pointer, along = f"sum_{kind}{index}_{start}", self.pointer(kind, index), columns(wide(size))
        self.sums.append(f"{name} = tl.zeros((ROWS, {wide(size)}), tl.float32)")
        if kind == TensorKind.D_INPUT:
            written = self.write(kind, index, Piece("", start, start + size), name, "first", "inside")
            self.summed.append(_given(kind, index, written))
        else:
            total = f"tl.sum(tl.where(inside & ({along} < {size}), {name}, 0.0), axis=0, keep_dims=True)"
            address = f"{pointer} + (model * {pointer}_model + tl.program_id(0)) * {pointer}_ROW + {start}"
            if whole:
                self.summed.append(f"tl.store({address} + {columns(1)}, tl.sum({total}, axis=1, keep_dims=True))")
            else:
                self.summed.append(f"tl.store({address} + {along}, {total}, mask={along} < {size})")
        return f"{name} += tl.where(on, {text}, 0.0)"

    def carried_on(self, carried: dict[int, list[Piece]], kind: TensorKind) -> list[str]:
        """The state after the step in place of that before it; a row that has ended keeps its own."""
        values = {(store.index, store.start): store.value for store in self.program.stores if store.kind == kind}
        made, moved = [], []
        for i, pieces in carried.items():
            for piece in pieces:
                new = self.tiles.full(values[i, piece.start])
                made += ["if lengths is not None:", f"    {piece.name}_new = tl.where(on, {new}, {piece.name})", "else:"]
                made.append(f"    {piece.name}_new = {new}")
                moved.append(f"{piece.name} = {piece.name}_new")
        return made + moved

    def resident_loads(self) -> list[str]:
        """The matrices that stay on chip; of the others a dot loads its own at every step."""
        loads = {block: f"{name} = {load_of(block)}" for block, name in self.blocks.items()}
        return [load if is_vector(block) else f"if {self.tiles.stays[block]}:\n    {load}" for block, load in loads.items()]

    def _of_block(self, block: Block) -> str:
        self.matrices[block.weight, block.transposed] = None
        return f"W{block.weight}_t" if block.transposed else f"W{block.weight}"

    def _width(self, kind: TensorKind, index: int) -> int:
        return self.program.widths[kind, index]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for text in lines for line in text.split("\n")]


def _given(kind: TensorKind, index: int, line: str) -> str:
    """Only where the gradient is wanted."""
    return line if kind != TensorKind.D_INPUT else f"if {kind}{index} is not None:\n    {line}"
