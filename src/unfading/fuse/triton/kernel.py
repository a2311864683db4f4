"""The loops of a program on a GPU, each as one kernel.

    trajectory, final, saved = kernel.forward(inputs, states, weights, options, keep=True)

All tensors have a leading axis of models, which may have stride 0, are float32 and lie on one device. Gradients of matrices are
products after the loop. All sums have a fixed order, so that a repeated run gives the same bits.
"""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.passes import narrow
from unfading.fuse.ir.program import ELEMENTWISE, InputKind, Op, Program, TensorKind
from unfading.fuse.plan import TensorNames
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.emit import emit_backward, emit_forward, source
from unfading.fuse.triton.launch import LaunchConstants, Launcher, packed
from unfading.fuse.triton.launch_settings import (
    BYTES,
    ON_CHIP,
    SPLIT_FROM,
    Gpu,
    LaunchSettings,
    LoopShape,
    fastest,
    refused,
    resident_blocks,
)
from unfading.fuse.triton.source import module
from unfading.fuse.triton.split_kernel import SplitLoops
from unfading.fuse.triton.tile_shapes import wide
from unfading.fuse.triton.tiles import is_vector
from unfading.fuse.triton.weight_gradients import WeightSums
from unfading.loop_options import LoopOptions

FLAT = ELEMENTWISE | {Op.CONST, Op.ZERO, Op.LEAF, Op.EXPAND, Op.CAT, Op.DOT}  # operations on vectors that may be divided

Tensors = dict[tuple[str, int], Tensor | None]

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
WEIGHT, NEXT, SAVED, SEQUENCE = TensorKind.WEIGHT, TensorKind.NEXT, TensorKind.SAVED, TensorKind.SEQUENCE
D_INPUT, D_WEIGHT = TensorKind.D_INPUT, TensorKind.D_WEIGHT
SHARED, CONSTANT, PER_STEP = InputKind.SHARED, InputKind.CONSTANT, InputKind.SEQUENCE


class TritonLoops:
    """The three loops of a program with tiles of one width: infer, train (which saves what the gradient needs) and back."""

    def __init__(self, programs: Sequence[Program], names: TensorNames, width: int | None):
        infer, train, back = programs if width is None else (narrow(program, width) for program in programs)
        functions = [
            emit_forward("infer", infer, names),
            emit_forward("train", train, names),
            emit_backward("back", back, names),
        ]
        self.functions = {function.name: function for function in functions}
        self.source = source(functions)
        self.launcher = Launcher(module(self.source))


class TritonKernel:
    """The loops of one program on a GPU."""

    def __init__(self, program: Program, names: TensorNames):
        both = differentiate(program, save_light=False)
        self.program, self.reverse_program, self.names = program, both.reverse, names
        self.outer, self.totals, self.has_gradient = both.outer, both.totals, both.has_gradient()
        self.programs = (program, both.forward, both.reverse)
        self.loops: dict[int | None, TritonLoops] = {}  # by the width of their tiles
        self.settings: dict[tuple[str, str, int], LaunchSettings] = {}  # of a search, by function, precision and number of rows
        self._settings: dict[tuple[str, str, tuple[int, int], torch.device], LaunchSettings | None] = {}
        self.crowded: set[str] = set()  # precisions in which no matrix fits on chip beside the rest of a loop
        values = [value for program in self.programs for value in program.values()]
        flat = all(value.op in FLAT or (value.op in (Op.SUM, Op.RESHAPE) and value.size == 1) for value in values)
        functions = self.at(None).functions.values()
        self.widest = max(n for (kind, _), n in both.forward.widths.items() if kind == NEXT)
        self.shapes = {
            f.name: LoopShape(f.name, self.widest, sum(f.sizes), *_dots(program), flat)
            for f, program in zip(functions, self.programs, strict=True)
        }
        self.whole_refused = refused(list(self.shapes.values()), max((size for f in functions for size in f.sizes), default=0))
        if self.whole_refused and self.split is None:
            raise NotFusable(self.whole_refused)
        sources = [product.dy for product in self.outer] + [total.dy for total in self.totals]
        self.read = {
            source.index for source in sources if source.kind == D_INPUT
        }  # by the products after the loop, wanted or not
        widths = both.forward.widths
        self.states = [n for (kind, _), n in sorted(widths.items()) if kind == NEXT]
        self.saved = widths.get((SAVED, 0), 0)

    def at(self, width: int | None) -> TritonLoops:
        """The loops with tiles of a width; None for tiles as wide as the vectors."""
        if width not in self.loops:
            self.loops[width] = TritonLoops(self.programs, self.names, width)
        return self.loops[width]

    @cached_property
    def split(self) -> SplitLoops | None:
        """The loops with their units divided among multiprocessors; None where that cannot be, or is never faster."""
        if self.widest < SPLIT_FROM:
            return None
        try:
            return SplitLoops(self.programs, self.names)
        except NotFusable:
            return None

    def setting(self, name: str, precision: str, rows: tuple[int, int], device: torch.device) -> LaunchSettings | None:
        """The settings of a loop for a number of models and of their rows: those of a search, or the usual ones.

        None where no settings fit on the GPU.
        """
        key = (name, precision, rows, device)
        if key not in self._settings:
            self._settings[key] = self.settings.get((name, precision, size_class(rows))) or self._fastest(*key)
        return self._settings[key]

    def _fastest(self, name: str, precision: str, rows: tuple[int, int], device: torch.device) -> LaunchSettings | None:
        setting = self.fastest(name, precision, rows, gpu(device))
        return setting._replace(room=0) if setting is not None and precision in self.crowded else setting

    def fastest(self, name: str, precision: str, rows: tuple[int, int], gpu: Gpu) -> LaunchSettings | None:
        """The settings of a loop with the least estimated time; None where no settings fit on the GPU."""
        split = None if self.split is None else self.split.functions[name].shape
        return fastest(self.shapes[name], split, precision, rows, gpu, whole=self.whole_refused is None)

    def _parts(self, name: str, units: int | None) -> int:
        """The number of programs that have all units of some rows; `units` is None where each has all of them."""
        return 1 if units is None or self.split is None else self.split.functions[name].shape.parts(units)

    def fits(self, precision: str, device: torch.device) -> bool:
        """Whether every loop has settings with which it fits on a GPU."""
        return all(self.setting(name, precision, (1, 1), device) is not None for name in self.shapes)

    def without_room(self, precision: str) -> None:
        """From now on keep no matrix on chip in this precision."""
        self.crowded.add(precision)
        self._settings.clear()

    def set(self, name: str, precision: str, rows: tuple[int, int], setting: LaunchSettings) -> None:
        """Use these settings for a loop from now on, for about as many rows."""
        self.add_settings({(name, precision, size_class(rows)): setting})

    def add_settings(self, settings: Mapping[tuple[str, str, int], LaunchSettings]) -> None:
        """Use the settings of a search from now on."""
        self.settings |= settings
        self._settings.clear()

    def forward(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor], options: LoopOptions, *, keep: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The states after every step [models, T, B, n], the final states, and, with `keep`, what the gradient needs."""
        E, T, B = self.extent(inputs, states)
        trajectory = [_blank(states[0], (E, T, B, n), options) for n in self.states]
        final = [states[0].new_empty((E, B, n)) for n in self.states]
        saved = _blank(states[0], (E, T, B, self.saved), options) if keep and self.saved else None
        tensors = self._named(input=inputs, initial=states, next=trajectory, final=final, saved=[saved])
        self._launch("train" if keep else "infer", tensors, weights, options, (E, T, B))
        return trajectory, final, saved

    def backward(
        self,
        gradients: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
        arguments: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        stored: tuple[Sequence[Tensor], Tensor | None],
        options: LoopOptions,
        wanted: Sequence[bool],
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """Gradients of inputs, initial states and weights, from those of the trajectory and of the final states.

        Args:
            arguments: inputs, states and weights of forward.
            stored: the trajectory and what forward saved.
            wanted: for every input, state and weight, whether its gradient is wanted; else it is None.
        """
        (inputs, states, weights), (trajectory, saved) = arguments, stored
        extent = self.extent(inputs, states)
        memory = self.blank_gradients(extent, states[0], options, wanted)
        d_states = [states[0].new_empty((extent[0], extent[2], n)) for n in self.states]
        tensors = memory.tensors() | self._named(
            input=inputs, initial=states, next=trajectory, saved=[saved], dnext=gradients[0], dfinal=gradients[1],
            dinitial=d_states,
        )  # fmt: skip
        self._launch("back", tensors, weights, options, extent)
        d_weights = self.weight_gradients(weights, wanted[len(inputs) + len(states) :], tensors, memory, options)
        returned: list[Tensor | None] = []
        for x, d, kind, want in zip(inputs, memory.inputs, self.program.kinds, wanted, strict=False):
            if not want:
                returned.append(None)
            elif d is None:
                returned.append(torch.zeros_like(x, memory_format=torch.contiguous_format))
            else:
                returned.append(d.sum(2, keepdim=True) if kind == SHARED else d)
        return returned, d_states, d_weights

    def blank_gradients(
        self,
        extent: tuple[int, int, int],
        like: Tensor,
        options: LoopOptions,
        wanted: Sequence[bool],
        setting: LaunchSettings | None = None,
        chunks: int = 1,
    ) -> "GradientMemory":
        """Memory for what a backward loop writes, beside the gradients of the initial states.

        Args:
            like: a tensor on the device.
            wanted: for every input, whether its gradient is wanted.
            setting: those of the loop; None for the usual ones.
            chunks: the number of launches that share the memory, each for its own steps.
        """
        E, T, B = extent
        widths = self.reverse_program.widths
        setting = setting or self.setting("back", precision(options, like.device), (E, B), like.device)
        assert setting is not None
        blocks = -(-B // setting.rows)
        lines = chunks * blocks * self._parts("back", setting.units)
        shapes = {PER_STEP: (E, T, B), SHARED: (E, T, blocks), CONSTANT: (E, 1, B)}
        d_inputs = [
            _blank(like, (*shapes[kind], widths[D_INPUT, i]), options)
            if (D_INPUT, i) in widths and (wanted[i] or i in self.read)
            else None
            for i, kind in enumerate(self.program.kinds)
        ]
        d_entries = {i: like.new_zeros((E, lines, n)) for (kind, i), n in widths.items() if kind == D_WEIGHT}
        sizes = [n for (kind, _), n in sorted(widths.items()) if kind == SEQUENCE]
        starts = [0, *accumulate(sizes)]
        buffer = _blank(like, (E, T, B, starts[-1]), options) if sizes else None
        return GradientMemory(d_inputs, d_entries, buffer, starts)

    def extent(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, int, int]:
        """Models, steps and rows."""
        T = next((x.shape[1] for x, kind in zip(inputs, self.program.kinds, strict=True) if kind != CONSTANT), 0)
        return states[0].shape[0], T, states[0].shape[1]

    # -- launching --------------------------------------------------------------------------------------------------------

    def _named(self, **groups: Sequence[Tensor | None]) -> Tensors:
        return {(kind, i): tensor for kind, group in groups.items() for i, tensor in enumerate(group)}

    def _launch(
        self, name: str, tensors: Tensors, weights: Sequence[Tensor], options: LoopOptions, extent: tuple[int, int, int]
    ) -> None:
        E, device = extent[0], next(tensor.device for tensor in tensors.values() if tensor is not None)
        setting = self.setting(name, precision(options, device), (E, extent[2]), device)
        assert setting is not None
        ReadyLoop(self, name, weights, options, setting, (E, device)).run(tensors, options.lengths, extent)

    # -- after the loop ---------------------------------------------------------------------------------------------------

    def weight_gradients(
        self,
        weights: Sequence[Tensor],
        wanted: Sequence[bool],
        tensors: Tensors,
        memory: "GradientMemory",
        options: LoopOptions,
    ) -> list[Tensor | None]:
        """The gradients of the weights, from the tensors of a backward loop over all steps."""
        d_weights = [
            torch.zeros_like(weight, memory_format=torch.contiguous_format) if want else None
            for weight, want in zip(weights, wanted, strict=True)
        ]
        for i, weight in enumerate(d_weights):
            entries = tensors.get((D_WEIGHT, i))
            if weight is not None and entries is not None:
                weight += entries.sum(1).reshape(weight.shape)
        sums = WeightSums(tensors, (memory.buffer, memory.starts), reverse=options.reverse, lengths=options.lengths)
        for product in self.outer:
            weight = d_weights[product.block.weight]
            if weight is not None:
                sums.add_product(product, weight)
        for total in self.totals:
            weight = d_weights[total.weight]
            if weight is not None:
                sums.add_total(total, weight)
        return d_weights


class GradientMemory(NamedTuple):
    """What a backward loop writes."""

    inputs: list[Tensor | None]  # gradients of the inputs, where they are wanted
    entries: dict[int, Tensor]  # gradients of weights that a step uses entry by entry, one line for each program
    buffer: Tensor | None  # the factors of matrix products after the loop, side by side
    starts: list[int]  # the entry at which each of them begins

    def tensors(self) -> Tensors:
        """By their kinds, as a loop takes them."""
        sequences = [] if self.buffer is None else [self.buffer[..., a:b] for a, b in pairwise(self.starts)]
        tensors: Tensors = {(D_INPUT, i): d for i, d in enumerate(self.inputs)}
        tensors |= {(SEQUENCE, i): part for i, part in enumerate(sequences)}
        return tensors | {(D_WEIGHT, i): d for i, d in self.entries.items()}


class ReadyLoop:
    """A loop with its weights and settings, which runs on the tensors of a whole sequence or of any chunk of it.

    Args:
        where: the number of models, and the device.
    """

    def __init__(
        self,
        kernel: TritonKernel,
        name: str,
        weights: Sequence[Tensor],
        options: LoopOptions,
        setting: LaunchSettings,
        where: tuple[int, torch.device],
    ):
        E, device = where
        rows, self.warps, width, room, self.units = setting
        self.name, self.split = name, None if self.units is None else kernel.split
        self.parts, self.multiprocessors = kernel._parts(name, self.units), gpu(device).multiprocessors
        self.loops = kernel.at(width)
        function = self.loops.functions[name] if self.split is None else self.split.functions[name].kernel
        self.function = function
        self.vectors = {i: weights[i].reshape(E, 1, -1) for kind, i in function.pointers if kind == WEIGHT}
        self.matrices = [packed(weights[i].mT if turned else weights[i]) for i, turned in function.matrices]
        dots = precision(options, device)
        resident = resident_blocks([BYTES[dots] * size for size in function.sizes], room)
        self.constants = LaunchConstants(rows, options.reverse, resident, dots, dots != "tf32x3" and device.type == "cuda")

    def run(self, tensors: Tensors, lengths: Tensor | None, extent: tuple[int, int, int]) -> None:
        """Run on tensors with these numbers of models, steps and rows."""
        E, T, B = extent
        taken = [self.vectors[i] if kind == WEIGHT else tensors[kind, i] for kind, i in self.function.pointers]
        taken += (*self.matrices, lengths)
        if self.split is None or self.units is None:
            grid = (-(-B // self.constants.rows), E, 1)
            self.loops.launcher.launch(self.function, taken, grid, (T, B), self.constants, self.warps)
        else:
            at_once = max(self.multiprocessors // self.parts, 1)
            self.split.launch(self.name, taken, extent, self.constants, (self.units, self.parts, at_once), self.warps)


@cache
def gpu(device: torch.device) -> Gpu:
    """The properties of a GPU. Triton's interpreter has one multiprocessor: it runs the blocks of a grid in turn."""
    if device.type != "cuda":
        return Gpu(1, ON_CHIP)
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index or 0)
    return Gpu(properties["multiprocessor_count"], properties["max_shared_mem"])


def size_class(rows: tuple[int, int]) -> int:
    """Settings are stored for all numbers of rows up to the next power of two."""
    return 1 << (rows[0] * rows[1] - 1).bit_length()


def _dots(program: Program) -> tuple[int, int]:
    """The entries of the matrices of all dots, padded, and the longest chain of dots."""
    work = 0
    depth: dict[int, int] = {}
    for value in program.values():
        depth[value.id] = max((depth[arg.id] for arg in value.args), default=0)
        matrices = [block for block in value.blocks if not is_vector(block)] if value.op is Op.DOT else []
        work += sum(wide(block.length) * wide(block.width) for block in matrices)
        depth[value.id] += bool(matrices)
    return work, max(depth.values())


def precision(options: LoopOptions, device: torch.device) -> str:
    """The precision of a dot: that of autocast, else tf32 where torch allows it for float32 products."""
    if options.autocast:
        return options.autocast
    return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _blank(like: Tensor, shape: tuple[int, ...], options: LoopOptions) -> Tensor:
    """Memory for a sequence. With lengths it is zeroed, since nothing is written past a row's end."""
    return like.new_empty(shape) if options.lengths is None else like.new_zeros(shape)
