"""Triton source of the loops of a step whose units are independent (`ir/recurrence.py`).

Each thread of a program has one unit of one batch row, and runs a *chunk* of time: all steps, or a part of them. Nothing is
exchanged, so only the latency of memory limits a step: the inputs of `STEPS` steps are loaded before the first of them is
computed. Where there are several chunks, two kernels run:

    map     each chunk is composed to one affine map of the lanes,   s -> slope s + offset
    loop    each chunk applies the maps of the chunks before it to the first state, then runs its steps

A chunk of the backward pass comes after the later ones. Its map is one of the gradients, which exists for every step; the map
of the states exists only where the step is linear in them.
"""

from collections.abc import Sequence

from unfading.fuse.ir.program import Op, Program, Shape, TensorKind, Value
from unfading.fuse.ir.recurrence import AffineMap
from unfading.fuse.plan import TensorNames
from unfading.fuse.triton.emit import TritonFunction, each, function, if_given, summary
from unfading.fuse.triton.frame import Frame, Load, RowSlice, guarded, indented
from unfading.fuse.triton.tile_shapes import Tile
from unfading.fuse.triton.tiles import Tiles

MAPS = 8  # of chunks that are loaded at the same time
SLOPE, OFFSET = TensorKind.SLOPE, TensorKind.OFFSET
HERE, BELOW = "chunk * wide + first", "earlier * wide + first"


class LaneTiles(Tiles):
    """One entry of a tile for each unit of a program; what is the same for all units has one entry, and is broadcast."""

    def full(self, value: Value) -> str:
        tile = self.tile(value)
        if tile.is_number:
            return f"tl.full((ROWS, UNITS), {tile.text}, tl.float32)"
        return f"tl.broadcast_to({tile.text}, (ROWS, UNITS))"

    def _view(self, value: Value) -> Tile:
        return self.tile(value.args[0])  # broadcast where it is used


class LaneFrame(Frame):
    """Loads and stores the units of a program."""

    arguments = ("parts", "chunk_steps")
    constants = ("ROWS", "REVERSE", "FAST", "UNITS")
    line_of_sums = "tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)"
    head = (
        "model = tl.program_id(1).to(tl.int64)",
        "wide = model * 0 + B  # in 64 bits, and all that is multiplied with it",
        "first = tl.program_id(0) * ROWS",
        "row = tl.arange(0, ROWS)[:, None]",
        "chunk, chunks = tl.program_id(2) // parts, tl.num_programs(2) // parts",
        "unit = tl.program_id(2) % parts * UNITS + tl.arange(0, UNITS)[None, :]",
    )
    on = ["on = inside & (row * 0 + step >= begin) & (row * 0 + step < limit)"]

    def __init__(self, program: Program, names: TensorNames, units: int, *, backward: bool):
        self.units = units
        super().__init__(program, names, backward=backward)

    def new_tiles(self) -> Tiles:
        return LaneTiles(self.program, self.blocks)

    def along(self, shape: Shape) -> str:
        return "unit" if shape == (self.units,) else super().along(shape)

    def entries(self, shape: Shape) -> str:
        return "UNITS" if shape == (self.units,) else super().entries(shape)

    def is_filled(self, shape: Shape) -> bool:
        return shape != (self.units,) and super().is_filled(shape)

    def at(self, step: str) -> tuple[str, str]:
        alive = f"inside & (row * 0 + {step} >= begin) & (row * 0 + {step} < limit)"
        return f"place({step}, length, wide, first, REVERSE)", alive

    def at_step(self, along: str) -> str:
        return f" & ({along} * 0 + step >= begin) & ({along} * 0 + step < end)"

    def read(self, load: Load, step: str) -> str:
        leaf, part = load.leaf, RowSlice(load.name, load.leaf.start, load.leaf.stop)
        if leaf.kind != TensorKind.STATE:
            return super().read(load, step)
        # The state before a step lies in the chunk before, at the first step of this one, or is the initial state. It is
        # also read as the state after the last step of a row, hence `<=`.
        line, mask = f"place({step} - 1, length, wide, first, REVERSE)", f"inside & (row * 0 + {step} <= limit)"
        mask += f" & (row * 0 + {step} > 0)"
        return self.load(TensorKind.NEXT, leaf.index, part, line, mask, other=f"{load.name}_start")


def emit_lane_forward(
    name: str, program: Program, names: TensorNames, units: int, lane_map: AffineMap | Op, steps: int
) -> TritonFunction:
    """The loop of a forward program over one chunk of time."""
    frame = LaneFrame(program, names, units, backward=False)
    carried = frame.carry(TensorKind.NEXT, names.states)
    for i, slices in carried.items():
        frame.read_carried(TensorKind.STATE, i, slices)
    loads = frame.read_loads()
    initial = [f"{part.name} = {frame.load(TensorKind.INITIAL, i, part, 'first', 'inside')}" for i, part in each(carried)]
    skip = _maps_before(frame, [part for _, part in each(carried)], lane_map, "range(0, chunk, MAPS)", "block + {k}", "< chunk")
    frame.tiles.write()
    body = [
        *frame.tiles.lines,
        *(frame.store(store) for store in program.stores),
        *_carried_on(frame, carried, TensorKind.NEXT),
    ]
    loop = _loop(frame, loads, [], body, steps)
    final = [frame.write(TensorKind.FINAL, i, part, part.name, "first", "inside") for i, part in each(carried)]
    lines = [*_bounds(), *initial, *skip, *loop, guarded("chunk == chunks - 1", "\n".join(final))]
    return function(name, f"{summary(program)}, one chunk of time", frame, lines)


def emit_lane_backward(
    name: str, program: Program, names: TensorNames, units: int, lane_map: AffineMap, steps: int
) -> TritonFunction:
    """The loop of a reverse program over one chunk of time."""
    frame = LaneFrame(program, names, units, backward=True)
    carried = frame.carry(TensorKind.D_STATE, [f"d_{name}" for name in names.states])
    parts = each(carried)
    join: list[str] = []
    for i, part in parts:
        d_final = frame.load(TensorKind.D_FINAL, i, part, "first", "inside")
        join += if_given(f"dfinal{i}", f"{part.name} = {d_final}", f"{part.name} = tl.zeros((ROWS, UNITS), tl.float32)")
    for i, slices in carried.items():
        frame.read_carried(TensorKind.CARRY, i, [part._replace(name=f"{part.name}_now") for part in slices])
    skip = _maps_before(
        frame,
        [part for _, part in parts],
        lane_map,
        "range(0, chunks - 1 - chunk, MAPS)",
        "chunks - 1 - block - {k}",
        "> chunk",
    )
    loads = _states_first(frame.read_loads())
    frame.tiles.write()
    stores = [frame.store(store) for store in program.stores if store.kind != TensorKind.D_STATE]
    body = [*frame.tiles.lines, *stores, *_carried_on(frame, carried, TensorKind.D_STATE)]
    loop = _loop(frame, loads, parts, body, steps)
    initial = [frame.write(TensorKind.D_INITIAL, i, part, part.name, "first", "inside") for i, part in parts]
    lines = [*_bounds(), *join, *skip, *frame.sums, *loop, guarded("chunk == 0", "\n".join(initial)), *frame.summed]
    return function(name, "backward, one chunk of time", frame, lines)


def emit_lane_map(
    name: str, lane_map: AffineMap, names: TensorNames, units: int, steps: int, *, backward: bool
) -> TritonFunction:
    """The composition of the maps of all steps of a chunk."""
    frame = LaneFrame(lane_map.program, names, units, backward=backward)
    composed = lane_map.composed()
    loads = _states_first(frame.read_loads())
    frame.tiles.write()
    count = len(lane_map.slopes)
    values = [frame.full(store.value) for store in lane_map.program.stores]
    slopes = dict(zip(lane_map.slopes, values[:count], strict=True))
    offsets = dict(zip(lane_map.offsets, values[count:], strict=True))
    lanes = range(len(lane_map.lanes))
    start = [f"offset_{i} = tl.zeros((ROWS, UNITS), tl.float32)" for i in lanes]
    start += [f"slope_{i}_{j} = tl.full((ROWS, UNITS), {float(i == j)}, tl.float32)" for i, j in composed]
    parts = [(index, RowSlice(f"offset_{k}", first, first + units)) for k, (index, first) in enumerate(lane_map.lanes)]
    body, before = list(frame.tiles.lines), "offset_{}_now" if backward else "offset_{}"
    moved: list[str] = []
    for i in lanes:
        terms = [f"{slopes[i, j]} * {before.format(j)}" for j in lanes if (i, j) in slopes]
        terms += [offsets[i]] if i in offsets else []
        body.append(f"offset_{i}_new = {' + '.join(terms) or 'tl.zeros((ROWS, UNITS), tl.float32)'}")
        moved.append(f"offset_{i} = tl.where(on, offset_{i}_new, offset_{i})")
    for i, j in composed:
        terms = [f"{slopes[i, k]} * slope_{k}_{j}" for k in lanes if (i, k) in slopes and (k, j) in composed]
        body.append(f"slope_{i}_{j}_new = {' + '.join(terms) or 'tl.zeros((ROWS, UNITS), tl.float32)'}")
        moved.append(f"slope_{i}_{j} = tl.where(on, slope_{i}_{j}_new, slope_{i}_{j})")
    loop = _loop(frame, loads, parts if backward else [], [*body, *moved], steps)
    stores = [frame.write(OFFSET, i, _lane(units), f"offset_{i}", HERE, "inside") for i in lanes]
    stores += [frame.write(SLOPE, k, _lane(units), f"slope_{i}_{j}", HERE, "inside") for k, (i, j) in enumerate(composed)]
    return function(name, "the map of one chunk of time", frame, [*_bounds(), *start, *loop, *stores])


def _states_first(loads: list[Load]) -> list[Load]:
    """The states before a step stand before those after it, which read them."""
    return sorted(loads, key=lambda load: load.leaf.kind == TensorKind.NEXT)


def _lane(units: int) -> RowSlice:
    return RowSlice("", 0, units)


def _bounds() -> list[str]:
    return ["begin = chunk * chunk_steps", "end = tl.minimum(begin + chunk_steps, steps)", "limit = tl.minimum(length, end)"]


def _loop(
    frame: LaneFrame, loads: Sequence[Load], arriving: Sequence[tuple[int, RowSlice]], body: Sequence[str], steps: int
) -> list[str]:
    """The loop over a chunk, some steps at a time: the loads of all of them, then one step after the other.

    Args:
        arriving: the states at which gradients arrive in a step, and the variables that they are added to.
    """
    here = [f"start - {k}" if frame.backward else f"start + {k}" for k in range(steps)]
    lines = ["start = end - 1 - (block - begin)" if frame.backward else "start = block"]
    lines += [line for load in loads for line in _reads(frame, load, loads, here)]
    for i, part in arriving:
        for k, step in enumerate(here):
            given = frame.load(TensorKind.D_NEXT, i, part, *frame.at(f"({step})"))
            lines += if_given(f"dnext{i}", f"{part.name}_here_at{k} = {given}", f"{part.name}_here_at{k} = 0.0")
    for k, step in enumerate(here):
        lines += [f"step = {step}", "at = place(step, length, wide, first, REVERSE)", *frame.on]
        lines += [f"{load.name} = {load.name}_at{k}" for load in loads]
        lines += [f"{part.name}_now = {part.name} + {part.name}_here_at{k}" for _, part in arriving]
        lines += body
    return [f"for block in range(begin, end, {steps}):", *indented(lines)]


def _reads(frame: LaneFrame, load: Load, loads: Sequence[Load], here: Sequence[str]) -> list[str]:
    """A leaf at some steps. The state after a step is the one before the step that the backward loop comes from."""
    lines = [f"{load.name}_at{k} = {frame.read(load, f'({step})')}" for k, step in enumerate(here)]
    before = [other.name for other in loads if other.leaf == load.leaf._replace(kind=TensorKind.STATE)]
    if load.leaf.kind == TensorKind.NEXT and before:
        lines[1:] = [f"{load.name}_at{k} = {before[0]}_at{k - 1}" for k in range(1, len(here))]
    return lines


def _carried_on(frame: LaneFrame, carried: dict[int, list[RowSlice]], kind: TensorKind) -> list[str]:
    values = {(store.index, store.start): store.value for store in frame.program.stores if store.kind == kind}
    new = [f"{part.name}_new = {frame.full(values[i, part.start])}" for i, part in each(carried)]
    return new + [f"{part.name} = tl.where(on, {part.name}_new, {part.name})" for _, part in each(carried)]


def _maps_before(
    frame: LaneFrame, parts: Sequence[RowSlice], lane_map: AffineMap | Op, blocks: str, chunk: str, test: str
) -> list[str]:
    """Apply the maps of the chunks that come before this one."""
    if not isinstance(lane_map, AffineMap):
        return []
    lane, lines = _lane(frame.units), []
    composed = lane_map.composed()
    for k in range(MAPS):
        lines += [f"earlier = {chunk.format(k=k)}", f"there = inside & (row * 0 + earlier {test})"]
        for i in range(len(parts)):
            lines.append(f"offset_{i}_at{k} = {frame.load(OFFSET, i, lane, BELOW, 'there')}")
        for number, (i, j) in enumerate(composed):
            other = str(float(i == j))
            lines.append(f"slope_{i}_{j}_at{k} = {frame.load(SLOPE, number, lane, BELOW, 'there', other=other)}")
    for k in range(MAPS):
        for i, part in enumerate(parts):
            terms = [f"slope_{i}_{j}_at{k} * {parts[j].name}" for row, j in composed if row == i]
            lines.append(f"{part.name}_new = {' + '.join([*terms, f'offset_{i}_at{k}'])}")
        lines += [f"{part.name} = {part.name}_new" for part in parts]
    loop = [f"for block in {blocks.replace('MAPS', str(MAPS))}:", *indented(lines)]
    return [guarded(f"{OFFSET}0 is not None", "\n".join(loop))]
