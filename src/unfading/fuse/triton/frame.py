"""The frame around a step in a Triton kernel: names, loads and stores of tiles, and variables carried from step to step.

A tensor [models, T, B, n] is a table of lines: row b of step t of a model lies in line `model * x_model + t * B + b`. Lines
are `x_ROW` entries apart, which is known when the kernel is compiled, so that loads are as wide as the memory allows. Offsets
within a block of rows are small; the rest of an address is computed in 64 bits.
"""

import keyword
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unfading.fuse.ir.program import Block, InputKind, Leaf, Op, Program, Shape, Store, TensorId, TensorKind, Value
from unfading.fuse.plan import TensorNames
from unfading.fuse.triton.tile_shapes import Tile, columns, wide
from unfading.fuse.triton.tiles import Tiles, is_vector, load_of

# Names that a kernel uses itself.
OWN = re.compile(
    r"([vi]|W|M|col|all|at|entry|part|joined|d?input|d?initial|d?next|d?final|saved|d?weight|sequence|slope|offset)_?\d+(_\w+)?|(index|flat|sum)_\w+|\w+_(model|ahead|here|now|new|start|at\d+)"
    r"|begin|end|limit|earlier|there|parts|chunks|chunk_steps|place|tl|triton|model|wide|first|row|inside|lengths?|steps?|count|at|on|part|unit|apart|slot|met|patience|counters?|exchange|trouble"
    r"|blocks?|first_block|turn_of|unit_of|peek|arrive|wait|tanh|sigmoid|expm1|log1p|larger|smaller|rest|one_less_square"
    r"|factor|product|T|B|ROWS|REVERSE|RESIDENT|PRECISION|FAST|UNITS|PARTS|EXCHANGE_ROW|CHUNK|chunk|entry|start|place_of|products|(one|share|team)\d+|(from|of)\d+_W\d+(_t)?|PATIENCE|range|float"
)


class RowSlice(NamedTuple):
    """Entries start..stop of a tensor's row, and the variable that holds them."""

    name: str
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start,)


class Load(NamedTuple):
    name: str
    leaf: Leaf


class Frame:
    """Writes the loads and stores of a step, and collects the tensors that they need."""

    # In the source: how many blocks of rows a model has, which of them a program works on, and the line of its sums.
    blocks_of_rows, block_of_rows, line_of_sums = "tl.num_programs(0)", "tl.program_id(0)", "tl.program_id(0)"
    arguments: tuple[str, ...] = ()  # beside the tensors, lengths, T and B
    constants: tuple[str, ...] = ("ROWS", "REVERSE", "RESIDENT", "PRECISION", "FAST")
    head: tuple[str, ...] = (
        "model = tl.program_id(1).to(tl.int64)",
        "wide = model * 0 + B  # in 64 bits, and all that is multiplied with it",
        "first = tl.program_id(0) * ROWS",
        "row = tl.arange(0, ROWS)[:, None]",
    )
    on = ["if lengths is not None:", "    on = inside & (row * 0 + step < length)", "else:", "    on = inside"]

    def __init__(self, program: Program, names: TensorNames, *, backward: bool):
        self.program, self.names, self.backward = program, names, backward
        self.pointers: dict[TensorId, None] = {}
        self.matrices: dict[tuple[int, bool], None] = {}
        self.taken: set[str] = set()
        self.before: list[str] = []
        self.sums: list[str] = []  # accumulators, before the loop
        self.summed: list[str] = []  # and their use after it
        self.blocks = {block: f"{self._of_block(block)}_{k}" for k, block in enumerate(program.blocks())}
        self.tiles = self.new_tiles()
        self.leaves: dict[Leaf, Value] = {value.leaf: value for value in program.values() if value.op is Op.LEAF}

    def new_tiles(self) -> Tiles:
        return Tiles(self.program, self.blocks)

    def legend(self) -> list[str]:
        """The names that the cell has for the numbered tensors of the kernel."""
        kinds = (
            (TensorKind.INPUT, self.names.inputs),
            (TensorKind.STATE, self.names.states),
            (TensorKind.WEIGHT, self.names.weights),
        )
        return [f"{kind} {i} is {name}" for kind, names in kinds for i, name in enumerate(names)]

    def name(self, wish: str) -> str:
        """A free name for a variable, as near to the wish as possible."""
        name = re.sub(r"\W", "_", wish)
        if OWN.fullmatch(name) or keyword.iskeyword(name) or not name.isidentifier():
            name = f"the_{name}_"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    # -- leaves -----------------------------------------------------------------------------------------------------------

    def carry(self, kind: TensorKind, names: Sequence[str]) -> dict[int, list[RowSlice]]:
        """The variables that are carried from step to step: one for each slice that the program stores."""
        carried: dict[int, list[RowSlice]] = {}
        for store in self.program.stores:
            if store.kind == kind:
                width, stop = self._width(kind, store.index), store.start + store.value.size
                whole = store.value.size == width
                name = self.name(names[store.index] if whole else f"{names[store.index]}_{store.start}")
                carried.setdefault(store.index, []).append(RowSlice(name, store.start, stop))
        return dict(sorted(carried.items()))

    def read_carried(self, kind: TensorKind, index: int, slices: Sequence[RowSlice]) -> None:
        """Read the leaves of a kind from the carried variables, joined where a leaf spans several."""
        for leaf, value in self.leaves.items():
            if (leaf.kind, leaf.index) != (kind, index):
                continue
            same = next((part for part in slices if (part.start, part.stop) == (leaf.start, leaf.stop)), None)
            name = same.name if same else f"v{value.id}"
            if same is None:
                self.tiles.joined(name, slices, leaf.start, leaf.stop)
            self.tiles.set_leaf(value, Tile(name, True))

    def read_loads(self) -> list[Load]:
        """Read all other leaves: constant ones are loaded before the loop, the others are returned."""
        loads = []
        for leaf, value in self.leaves.items():
            if self.tiles.has(value):
                continue
            whole = leaf.stop - leaf.start == self._width(leaf.kind, leaf.index)
            name = self.name(self._called(leaf) if whole else f"{self._called(leaf)}_{leaf.start}")
            shared = leaf.kind == TensorKind.WEIGHT or (
                leaf.kind == TensorKind.INPUT and self.program.kinds[leaf.index] == InputKind.SHARED
            )
            self.tiles.set_leaf(value, Tile(name, not shared))
            part = RowSlice(name, leaf.start, leaf.stop)
            if leaf.kind == TensorKind.WEIGHT:
                self.before.append(f"{name} = {self.load_row(TensorKind.WEIGHT, leaf.index, part, '0')}")
            elif leaf.kind == TensorKind.INPUT and self.program.kinds[leaf.index] == InputKind.CONSTANT:
                self.before.append(f"{name} = {self.load(TensorKind.INPUT, leaf.index, part, 'first', 'inside')}")
            else:
                loads.append(Load(name, leaf))
                if leaf.kind == TensorKind.STATE:
                    self.before.append(f"{name}_start = {self.load(TensorKind.INITIAL, leaf.index, part, 'first', 'inside')}")
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

    def along(self, shape: Shape) -> str:
        """The name of the indices of the entries that a flat tile holds of a value."""
        return columns(wide(math.prod(shape)))

    def entries(self, shape: Shape) -> str:
        """The number of columns of a flat tile of a value."""
        return str(wide(math.prod(shape)))

    def is_filled(self, shape: Shape) -> bool:
        """Whether the flat tile of a value has no padding."""
        return math.prod(shape) == wide(math.prod(shape))

    def full(self, value: Value) -> str:
        """A value as a tile with all its rows, to be stored or carried."""
        return self.tiles.full(value)

    def pointer(self, kind: TensorKind, index: int) -> str:
        self.pointers[kind, index] = None
        return f"{kind}{index}"

    def at(self, step: str) -> tuple[str, str]:
        """The line of a step that may not exist, and the mask of the rows that have it."""
        alive = f"inside & (row * 0 + {step} < length)" + (f" & (row * 0 + {step} >= 0)" if self.backward else "")
        return f"place({step}, length, wide, first, REVERSE)", alive

    def read(self, load: Load, step: str) -> str:
        """A leaf at a step."""
        leaf, part = load.leaf, RowSlice(load.name, load.leaf.start, load.leaf.stop)
        if leaf.kind == TensorKind.INPUT and self.program.kinds[leaf.index] == InputKind.SHARED:
            return self.load_row(leaf.kind, leaf.index, part, step)
        if leaf.kind != TensorKind.STATE:
            return self.load(leaf.kind, leaf.index, part, *self.at(step))
        # Before the first step the state is the initial one, which is what the masked load returns.
        earlier = step.replace(" - 1", " - 2")
        return self.load(TensorKind.NEXT, leaf.index, part, *self.at(earlier), other=f"{load.name}_start")

    def load(self, kind: TensorKind, index: int, part: RowSlice, line: str, mask: str, other: str = "0.0") -> str:
        """Entries of one line for every row of the block."""
        address = self._address(kind, index, part.start, part.shape, line)
        return f"tl.load({address}, mask={self._mask(part.shape, mask)}, other={other})"

    def load_row(self, kind: TensorKind, index: int, part: RowSlice, line: str) -> str:
        """Entries of one line for all rows."""
        pointer, along = self.pointer(kind, index), self.along(part.shape)
        mask = f"({along} < {part.shape[0]})" + ("" if kind == TensorKind.WEIGHT else f" & ({along} * 0 + {line} < T)")
        mask += f" & ({along} * 0 + {line} >= 0)" if self.backward and kind != TensorKind.WEIGHT else ""
        address = f"{pointer} + (model * {pointer}_model + {line}) * {pointer}_ROW + {part.start} + {along}"
        return f"tl.load({address}, mask={mask}, other=0.0)"

    def write(self, kind: TensorKind, index: int, part: RowSlice, text: str, line: str, mask: str) -> str:
        """Store entries of one line for every row of the block."""
        return self.write_value(kind, index, part.start, part.shape, text, line, mask)

    def write_value(self, kind: TensorKind, index: int, start: int, shape: Shape, text: str, line: str, mask: str) -> str:
        """The same for a flat tile of a value of this shape."""
        return f"tl.store({self._address(kind, index, start, shape, line)}, {text}, mask={self._mask(shape, mask)})"

    def _address(self, kind: TensorKind, index: int, start: int, shape: Shape, line: str) -> str:
        pointer = self.pointer(kind, index)
        base = f"{pointer} + (model * {pointer}_model + {line}) * {pointer}_ROW"
        return f"{base} + (row * {pointer}_ROW + {start} + {self.along(shape)})"

    def _mask(self, shape: Shape, mask: str) -> str:
        return mask if self.is_filled(shape) else f"{mask} & ({self.along(shape)} < {math.prod(shape)})"

    def store(self, store: Store) -> str:
        """Store a value at the end of a step."""
        kind, index, start, value = store
        late = self.tiles.late.get(store)
        text = self.full(late.summand if late else value)
        if kind == TensorKind.D_WEIGHT:
            return self._add_up(kind, index, start, (late.summand if late else value).shape, text, bool(late))
        if kind != TensorKind.D_INPUT or self.program.kinds[index] == InputKind.SEQUENCE:
            return _given(kind, index, self.write_value(kind, index, start, value.shape, text, "at", "on"))
        if self.program.kinds[index] == InputKind.CONSTANT:
            return _given(kind, index, self._add_up(kind, index, start, value.shape, text, False))
        pointer, along = self.pointer(kind, index), self.along(value.shape)
        line = f"step * (wide * 0 + {self.blocks_of_rows}) + {self.block_of_rows}"
        address = f"{pointer} + (model * {pointer}_model + {line}) * {pointer}_ROW + {start} + {along}"
        total = f"tl.sum(tl.where(on, {text}, 0.0), axis=0, keep_dims=True)"
        return _given(kind, index, f"tl.store({address}, {total}, mask=({along} < {value.size}){self.at_step(along)})")

    def at_step(self, along: str) -> str:
        """A mask of the entries of a line that is stored once for all rows, in a loop that may run past the last step."""
        return ""

    def _add_up(self, kind: TensorKind, index: int, start: int, shape: Shape, text: str, whole: bool) -> str:
        """Add to a sum over time, which is stored after the loop: row by row, or summed over the rows of the block.

        With `whole` it is also summed over features.
        """
        name, pointer, along = f"sum_{kind}{index}_{start}", self.pointer(kind, index), self.along(shape)
        self.sums.append(f"{name} = tl.zeros((ROWS, {self.entries(shape)}), tl.float32)")
        if kind == TensorKind.D_INPUT:
            store = self.write_value(kind, index, start, shape, name, "first", "inside")
            self.summed.append(_given(kind, index, store))
        else:
            size = math.prod(shape)
            total = f"tl.sum(tl.where(inside & ({along} < {size}), {name}, 0.0), axis=0, keep_dims=True)"
            address = f"{pointer} + (model * {pointer}_model + {self.line_of_sums}) * {pointer}_ROW + {start}"
            if whole:
                self.summed.append(f"tl.store({address} + {columns(1)}, tl.sum({total}, axis=1, keep_dims=True))")
            else:
                self.summed.append(f"tl.store({address} + {along}, {total}, mask={along} < {size})")
        return f"{name} += tl.where(on, {text}, 0.0)"

    def carried_on(self, carried: dict[int, list[RowSlice]], kind: TensorKind) -> list[str]:
        """Replace the state before the step by the state after it, except in rows that have ended."""
        values = {(store.index, store.start): store.value for store in self.program.stores if store.kind == kind}
        new_lines, moved = [], []
        for i, slices in carried.items():
            for part in slices:
                new = self.full(values[i, part.start])
                new_lines += ["if lengths is not None:", f"    {part.name}_new = tl.where(on, {new}, {part.name})", "else:"]
                new_lines.append(f"    {part.name}_new = {new}")
                moved.append(f"{part.name} = {part.name}_new")
        return new_lines + moved

    def resident_loads(self) -> list[str]:
        """Load the matrices that stay on chip. A dot loads any other matrix at every step."""
        loads = {block: f"{name} = {load_of(block)}" for block, name in self.blocks.items()}
        return [load if is_vector(block) else f"if {self.tiles.stays[block]}:\n    {load}" for block, load in loads.items()]

    def matrix_sizes(self) -> tuple[int, ...]:
        """The entries of each matrix, padded."""
        return tuple(wide(block.length) * wide(block.width) for block in self.blocks if not is_vector(block))

    def _of_block(self, block: Block) -> str:
        self.matrices[block.weight, block.transposed] = None
        return f"W{block.weight}_t" if block.transposed else f"W{block.weight}"

    def _width(self, kind: TensorKind, index: int) -> int:
        return self.program.widths[kind, index]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for text in lines for line in text.split("\n")]


def guarded(condition: str, line: str) -> str:
    """Lines that run under a condition."""
    return "\n".join([f"if {condition}:", *indented([line])])


def _given(kind: TensorKind, index: int, line: str) -> str:
    """The line, run only where the gradient is wanted."""
    return line if kind != TensorKind.D_INPUT else guarded(f"{kind}{index} is not None", line)
