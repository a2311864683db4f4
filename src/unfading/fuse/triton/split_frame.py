"""The frame around a step whose units are divided among the programs of a grid.

Program (part, block) of the grid has the units of `part` in the rows of `block`. The blocks of all models are counted through.
"""

from unfading.fuse.ir.program import Program, Shape, TensorKind, Value
from unfading.fuse.plan import TensorNames
from unfading.fuse.triton.frame import Frame, guarded
from unfading.fuse.triton.launch_settings import Matrices
from unfading.fuse.triton.split_tiles import SplitTiles
from unfading.fuse.triton.summed_tiles import SummedTiles
from unfading.fuse.triton.tiles import Tiles

COUNTER = 32  # entries from one counter to the next, a cache line


class SplitFrame(Frame):
    """Loads and stores this program's units of long vectors. What all programs have is stored by the first of them."""

    tiles: SplitTiles
    arguments: tuple[str, ...] = ("blocks", "first_block", "exchange", "counters", "trouble")
    constants = (*Frame.constants, "UNITS", "PARTS", "EXCHANGE_ROW", "CHUNK")
    blocks_of_rows, block_of_rows = "blocks", "block"
    line_of_sums = "block * tl.num_programs(0) + part"
    head = (
        "part, slot = tl.program_id(0), tl.program_id(1)",
        "model = ((first_block + slot) // blocks).to(tl.int64)",
        "block = (first_block + slot) % blocks",
        "wide = model * 0 + B  # in 64 bits, and all that is multiplied with it",
        "first = block * ROWS",
        "row = tl.arange(0, ROWS)[:, None]",
        "unit = part * UNITS + tl.arange(0, UNITS)[None, :]",
        f"counter = counters + slot * {COUNTER}  # in a cache line of its own",
        "slot = slot * ROWS + row",
        "apart = tl.num_programs(1) * ROWS * EXCHANGE_ROW  # from the exchange of a step to that of the next one",
        "met, patience = part * 0, part * 0 + PATIENCE",
    )

    def __init__(self, program: Program, names: TensorNames, matrices: Matrices, *, backward: bool):
        self._matrices = matrices
        if matrices is Matrices.SUMMED:
            self.arguments = (*self.arguments, "products")
        super().__init__(program, names, backward=backward)

    def new_tiles(self) -> Tiles:
        if self._matrices is Matrices.SUMMED:
            return SummedTiles(self.program, self.blocks)
        return SplitTiles(self.program, self.blocks, streamed=self._matrices is Matrices.STREAMED)

    def is_divided(self, shape: Shape) -> bool:
        return self.tiles.stages.divides(shape) or self.tiles.stages.spreads(shape)

    def along(self, shape: Shape) -> str:
        return self.tiles.entry(shape) if self.is_divided(shape) else super().along(shape)

    def entries(self, shape: Shape) -> str:
        return self.tiles.entries(shape) if self.is_divided(shape) else super().entries(shape)

    def is_filled(self, shape: Shape) -> bool:
        return not self.is_divided(shape) and super().is_filled(shape)

    def full(self, value: Value) -> str:
        self.tiles.dividing = self.is_divided(value.shape)
        text = super().full(value)
        self.tiles.dividing = False
        return text

    def write_value(self, kind: TensorKind, index: int, start: int, shape: Shape, text: str, line: str, mask: str) -> str:
        store = super().write_value(kind, index, start, shape, text, line, mask)
        return store if self.is_divided(shape) else guarded("part == 0", store)

    def _add_up(self, kind: TensorKind, index: int, start: int, shape: Shape, text: str, whole: bool) -> str:
        line = super()._add_up(kind, index, start, shape, text, whole)
        if kind == TensorKind.D_WEIGHT and not self.is_divided(shape):
            self.summed[-1] = guarded("part == 0", self.summed[-1])
        return line

    def resident_loads(self) -> list[str]:
        return []  # the tiles have them

    def matrix_sizes(self) -> tuple[int, ...]:
        return ()  # they depend on the number of units
