"""Run the loops of a step whose units are independent, in one chunk of time or in several (`emit_lanes.py`).

Several chunks are faster where there are fewer lanes than the GPU runs at the same time: a chunk is read twice, once for its
map, but all of them run side by side.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from unfading.fuse.ir.differentiate import COSTLY
from unfading.fuse.ir.program import InputKind, Op, Program, TensorKind
from unfading.fuse.ir.recurrence import AffineMap, affine_map, independent_units, only_lanes
from unfading.fuse.plan import TensorNames
from unfading.fuse.triton.emit import TritonFunction, source
from unfading.fuse.triton.emit_lanes import emit_lane_backward, emit_lane_forward, emit_lane_map
from unfading.fuse.triton.launch import Launcher
from unfading.fuse.triton.launch_settings import Gpu, LaunchSettings
from unfading.fuse.triton.source import module
from unfading.fuse.triton.tile_shapes import power_of_two
from unfading.fuse.triton.tiles import late_sums

MOST_CHUNKS = 512  # each chunk applies the maps of all others before it
MOST_STEPS = 16  # whose inputs a thread loads before it computes
LOADED = 128  # numbers that a thread loads before it computes
# Operations that are written out for the steps loaded together, and how many of them a function such as tanh counts for. Triton
# compiles BR's forward loop with 16 steps in 37 s, with 8 in 2 s.
WRITTEN, FUNCTION = 320, 8
WARP = 32
RESIDENT = 32  # programs of one warp that a multiprocessor runs at the same time
# As measured on an H200, in microseconds: a step, applying the map of a chunk, a second kernel; and bytes of memory in one.
STEP, MAP, LAUNCH, MEMORY = 0.09, 0.12, 8.0, 3e6

Tensors = dict[tuple[str, int], Tensor | None]
Extent = tuple[int, int, int]  # models, or 0 where tensors have no axis of models; steps; rows


class LaneConstants(NamedTuple):
    """The constants of a compiled loop, beside the layout of its tensors."""

    rows: int
    reverse: bool
    fast: bool  # whether tanh and sigmoid are hardware instructions
    units: int


class LaneLoops:
    """The loops of a program over lanes: infer, train and back, and the maps of chunks."""

    def __init__(self, programs: Sequence[Program], names: TensorNames, units: int):
        infer, _, back = programs
        self.programs, self.names, self.units = dict(zip(("infer", "train", "back"), programs, strict=True)), names, units
        self.forward_map = affine_map(infer, TensorKind.NEXT)
        reverse_map = affine_map(back, TensorKind.D_STATE)
        assert isinstance(reverse_map, AffineMap), "a derivative is linear"
        self.reverse_map = reverse_map
        self.maps = {"infer": self.forward_map, "train": self.forward_map, "back": reverse_map}
        # The gradient of an input that is constant in time is summed in one loop.
        self.one_chunk = InputKind.CONSTANT in infer.kinds
        # Every call asks for the number of chunks, and walking a program takes longer than a launch.
        self.traffic = {name: _traffic(program) for name, program in self.programs.items()}
        self.map_traffic = {
            name: sum(value.op is Op.LEAF for value in each.program.values()) + (name == "back") * len(each.lanes)
            for name, each in self.maps.items()
            if isinstance(each, AffineMap)
        }

    @cached_property
    def functions(self) -> dict[str, TritonFunction]:
        infer, train, back = self.programs.values()
        names, units, ahead, behind = self.names, self.units, self.forward_map, self.reverse_map
        functions = [
            emit_lane_forward("infer", infer, names, units, ahead, _steps(infer)),
            emit_lane_forward("train", train, names, units, ahead, _steps(train)),
            emit_lane_backward("back", back, names, units, behind, _steps(back)),
            emit_lane_map("back_map", behind, names, units, _steps(behind.program), backward=True),
        ]
        if isinstance(ahead, AffineMap):
            functions.append(emit_lane_map("map", ahead, names, units, _steps(ahead.program), backward=False))
        return {function.name: function for function in functions}

    @cached_property
    def source(self) -> str:
        return source(list(self.functions.values()))

    @cached_property
    def launcher(self) -> Launcher:
        return Launcher(module(self.source))

    def not_linear(self) -> str | None:
        """Why the forward pass is not a scan; None where it is one."""
        if self.one_chunk:
            return (
                "the step reads an input that is constant in time, such as a dropout mask, and a scan does not sum its gradient"
            )
        if isinstance(self.forward_map, Op):
            return f"the step is not linear in its state, to which it applies {self.forward_map}"
        return None

    def settings(self, rows: tuple[int, int], gpu: Gpu) -> LaunchSettings:
        """How many rows and units a program has."""
        lanes = rows[0] * rows[1] * self.units
        warps = 1 if lanes <= gpu.multiprocessors * RESIDENT * WARP else 4
        units = min(power_of_two(self.units), warps * WARP)
        return LaunchSettings(min(warps * WARP // units, power_of_two(rows[1])), warps, None, 0, units)

    def chunks(self, name: str, extent: Extent, gpu: Gpu, scan: bool | None) -> int:
        """The number of chunks of time with which a loop is estimated to take the least time.

        Args:
            scan: False for one chunk; True for several where that is possible; None for what is faster.
        """
        models, T, B = extent
        if scan is False or self.one_chunk or not isinstance(self.maps[name], AffineMap):
            return 1
        counts = [1 << k for k in range(MOST_CHUNKS.bit_length()) if 1 << k < T]
        counts = counts[1:] if scan and len(counts) > 1 else counts
        best = min(counts, key=lambda count: self.microseconds(name, (models, T, B), gpu, count), default=1)
        return -(-T // -(-T // best)) if T else 1

    def microseconds(self, name: str, extent: Extent, gpu: Gpu, chunks: int) -> float:
        """The estimated time of a loop in some chunks."""
        models, T, B = extent
        lanes = (models or 1) * B * self.units
        waves = math.ceil(lanes * chunks / (gpu.multiprocessors * 2048))
        steps, of_number = waves * -(-T // chunks) * STEP, 4 * lanes * T / MEMORY
        time = steps + self.traffic[name] * of_number
        if chunks > 1:
            lane_map = self.maps[name]
            assert isinstance(lane_map, AffineMap)
            time += steps + self.map_traffic[name] * of_number + LAUNCH + waves * chunks * MAP * len(lane_map.lanes) ** 2
        return time

    def lines(self, name: str, extent: Extent, gpu: Gpu, setting: LaunchSettings, scan: bool | None) -> int:
        """The number of programs for each model, each of which writes its own sums over time."""
        assert setting.units is not None
        return self.chunks(name, extent, gpu, scan) * -(-self.units // setting.units) * -(-extent[2] // setting.rows)

    def launch(
        self,
        name: str,
        tensors: Tensors,
        weights: Sequence[Tensor],
        lengths: Tensor | None,
        extent: Extent,
        setting: LaunchSettings,
        chunks: int,
        constants: LaneConstants,
    ) -> None:
        """Run a loop: for several chunks, their maps first."""
        models, T, B = extent
        if not B:
            return
        parts = -(-self.units // constants.units)
        chunk_steps = max(-(-T // chunks), 1)
        grid = (-(-B // constants.rows), models or 1, parts * chunks)
        tensors = {**tensors, **{(TensorKind.WEIGHT, i): _line(weight, models) for i, weight in enumerate(weights)}}
        names = [name]
        if chunks > 1:
            lane_map = self.maps[name]
            assert isinstance(lane_map, AffineMap)
            like, lead = next(iter(t for t in tensors.values() if t is not None)), (models,) if models else ()
            count = len(lane_map.lanes) + len(lane_map.composed())
            maps = like.new_empty((count, *lead, chunks, B, self.units)).unbind()
            tensors |= {(TensorKind.OFFSET, i): part for i, part in enumerate(maps[: len(lane_map.lanes)])}
            tensors |= {(TensorKind.SLOPE, i): part for i, part in enumerate(maps[len(lane_map.lanes) :])}
            names = ["back_map" if name == "back" else "map", name]
        for each in names:
            function = self.functions[each]
            taken = [tensors.get((kind, i)) for kind, i in function.pointers]
            further = (T, B, parts, chunk_steps)
            self.launcher.launch(function, [*taken, lengths], grid, further, constants, setting.warps, models > 0)


def lane_loops(programs: Sequence[Program], names: TensorNames) -> LaneLoops | None:
    """The loops over lanes of a forward program, of the one that saves what the gradient needs, and of its reverse.

    None for a step whose units are not independent.
    """
    units = independent_units(programs[0])
    for program in programs:
        late = [value for summed in late_sums(program).values() for value in summed.between]
        if units is None or independent_units(program, late) != units or not only_lanes(program, units, late):
            return None
    return None if units is None else LaneLoops(programs, names, units)


def _steps(program: Program) -> int:
    """The steps whose inputs are loaded at the same time."""
    loads = sum(value.op is Op.LEAF and value.leaf.kind != TensorKind.WEIGHT for value in program.values())
    written = sum(FUNCTION if value.op in COSTLY else value.op is not Op.LEAF for value in program.values())
    most = min(LOADED // max(loads, 1), WRITTEN // max(written, 1))
    return max(2, min(MOST_STEPS, power_of_two(most + 1) // 2))


def _traffic(program: Program) -> int:
    """Numbers that a lane reads and writes in a step."""
    read = sum(
        value.op is Op.LEAF and value.leaf.kind not in (TensorKind.WEIGHT, TensorKind.STATE) for value in program.values()
    )
    return read + sum(store.kind not in (TensorKind.D_STATE, TensorKind.D_WEIGHT) for store in program.stores)


def _line(weight: Tensor, models: int) -> Tensor:
    """A weight as one line, for each model."""
    return weight.reshape(models, 1, -1) if models else weight.reshape(1, -1)
