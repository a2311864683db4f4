"""The loops of a program on a GPU, each as one kernel.

    trajectory, final, saved = kernel.forward(inputs, states, weights, options, keep=True)

All tensors are float32 and lie on one device. All or none have a leading axis of models, which may have stride 0. Gradients of
matrices are products after the loop. All sums have a fixed order, so that a repeated run gives the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from unfading.errors import NoKernel
from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.passes import dots_of_pieces, narrow, states_as_stored
from unfading.fuse.ir.program import ELEMENTWISE, InputKind, Op, Program, TensorKind
from unfading.fuse.plan import TensorNames, float32_dots
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.emit import TritonFunction, emit_backward, emit_forward, source
from unfading.fuse.triton.lane_loops import LaneConstants, LaneLoops, lane_loops
from unfading.fuse.triton.launch import LaunchConstants, Launcher, does_not_fit, is_unsupported, packed
from unfading.fuse.triton.launch_settings import (
    BYTES,
    ON_CHIP,
    SPLIT_FROM,
    Candidate,
    Gpu,
    LaunchSettings,
    LoopShape,
    Matrices,
    candidates,
    refused,
    resident_blocks,
)
from unfading.fuse.triton.source import module
from unfading.fuse.triton.split_kernel import SplitLoops
from unfading.fuse.triton.step_time import graph_microseconds, operations, step_shape
from unfading.fuse.triton.tile_shapes import wide
from unfading.fuse.triton.tiles import is_vector
from unfading.fuse.triton.weight_gradients import WeightGradients
from unfading.loop_options import LoopOptions

FLAT = ELEMENTWISE | {Op.CONST, Op.ZERO, Op.LEAF, Op.EXPAND, Op.CAT, Op.DOT}  # operations on vectors that may be divided

Tensors = dict[tuple[str, int], Tensor | None]
Extent = tuple[int, int, int]  # models, or 0 where tensors have no axis of models; steps; rows
Result = TypeVar("Result")
SearchKey = tuple[str, str, int, torch.device]  # loop, precision, size class of the rows, device

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
WEIGHT, NEXT, SAVED, SEQUENCE = TensorKind.WEIGHT, TensorKind.NEXT, TensorKind.SAVED, TensorKind.SEQUENCE
INITIAL = TensorKind.INITIAL
D_INPUT, D_WEIGHT = TensorKind.D_INPUT, TensorKind.D_WEIGHT
SHARED, CONSTANT, PER_STEP = InputKind.SHARED, InputKind.CONSTANT, InputKind.SEQUENCE


class TritonLoops:
    """The three loops of a program with tiles of one width: infer, train (which saves what the gradient needs) and back."""

    def __init__(self, programs: Sequence[Program], names: TensorNames, width: int | None):
        infer, train, back = (
            dots_of_pieces(states_as_stored(program)) if width is None else narrow(program, width) for program in programs
        )
        functions = [
            emit_forward("infer", infer, names),
            emit_forward("train", train, names),
            emit_backward("back", back, names),
        ]
        self.functions = {function.name: function for function in functions}
        self.source = source(functions)
        self.launcher = Launcher(module(self.source))

    def function(self, name: str) -> TritonFunction:
        """A loop by name."""
        return self.functions[name]


class TritonKernel:
    """The loops of one program on a GPU."""

    def __init__(self, program: Program, names: TensorNames):
        both = differentiate(program, save_light=False)
        self.program, self.names = program, names
        self.outer, self.has_gradient = both.outer, both.has_gradient()
        self.programs = (program, both.forward, both.reverse)
        self.lanes = lane_loops(self.programs, names)  # where the units are independent
        self.loops: dict[int | None, TritonLoops] = {}  # by the width of their tiles
        self.settings: dict[SearchKey, LaunchSettings] = {}  # of a search
        self._settings: dict[tuple[str, str, tuple[int, int], torch.device], LaunchSettings | None] = {}
        self.graphs_win: dict[tuple[str, int, torch.device, bool], bool] = {}  # of a search
        self._slower: dict[tuple[str, tuple[int, int], torch.device, bool], str | None] = {}
        self._prepared: dict[tuple[str, str, LaunchSettings, bool, torch.device], PreparedLoop] = {}
        self._excluded: set[tuple[str, str, torch.device, LaunchSettings]] = set()  # settings that a GPU did not accept
        self._undivided_on: set[torch.device] = set()  # GPUs without cooperative launches
        values = [value for program in self.programs for value in program.values()]
        flat = all(value.op in FLAT or (value.op in (Op.SUM, Op.RESHAPE) and value.size == 1) for value in values)
        functions = self.at(None).functions.values()
        self.widest = max(n for (kind, _), n in both.forward.widths.items() if kind == NEXT)
        self.shapes = {
            f.name: LoopShape(f.name, self.widest, sum(f.sizes), *_dots(program), flat, operations(program), _has_sums(program))
            for f, program in zip(functions, self.programs, strict=True)
        }
        self.whole_refused = refused(list(self.shapes.values()), max((size for f in functions for size in f.sizes), default=0))
        if self.whole_refused and self.split is None:
            raise NotFusable(self.whole_refused)
        self.step = step_shape(program, both.reverse)
        widths, reverse = both.forward.widths, both.reverse.widths
        self.states = [n for (kind, _), n in sorted(widths.items()) if kind == NEXT]
        self.saved = widths.get((SAVED, 0), 0)
        # The first input with an axis of time.
        self.timed = next((i for i, kind in enumerate(program.kinds) if kind != CONSTANT), None)
        sequences = [n for (kind, _), n in sorted(reverse.items()) if kind == SEQUENCE]
        self.after_loop = WeightGradients(both.outer, both.totals, sequences)
        self.entries = {i: n for (kind, i), n in reverse.items() if kind == D_WEIGHT}
        # The widths of gradients of inputs, and whether the products after the loop read them, wanted or not.
        read = {source.index for source in self.after_loop.sources() if source.kind == D_INPUT}
        self.d_inputs = [(reverse.get((D_INPUT, i)), i in read) for i in range(len(program.kinds))]

    def at(self, width: int | None) -> TritonLoops:
        """The loops with tiles of a width; None for tiles as wide as the vectors."""
        if width not in self.loops:
            self.loops[width] = TritonLoops(self.programs, self.names, width)
        return self.loops[width]

    @cached_property
    def split(self) -> SplitLoops | None:
        """The loops with their units divided among multiprocessors; None where that is never faster."""
        return SplitLoops(self.programs, self.names, Matrices.ON_CHIP) if self.widest >= SPLIT_FROM else None

    @cached_property
    def streamed(self) -> SplitLoops | None:
        """The same with matrices that are loaded at every step."""
        return None if self.split is None else SplitLoops(self.programs, self.names, Matrices.STREAMED)

    @cached_property
    def summed(self) -> SplitLoops | None:
        """The same with products that are summed; None where the step has others."""
        return SplitLoops(self.programs, self.names, Matrices.SUMMED) if self._has_products else None

    @cached_property
    def _has_products(self) -> bool:
        """Whether all dots of all loops may be sums of products of several programs."""
        return self.split is not None and all(function.shape.products for function in self.split.functions.values())

    def setting(self, name: str, precision: str, rows: tuple[int, int], device: torch.device) -> LaunchSettings | None:
        """The settings of a loop for a number of models and of their rows: those of a search, or the usual ones.

        None where no settings fit on the GPU.
        """
        key = (name, precision, rows, device)
        known = self._settings  # which another thread may replace: loops are tested side by side
        if key not in known:
            searched = self.settings.get((name, precision, size_class(rows), device))
            usual = (candidate.setting for candidate in self.candidates(name, precision, rows, gpu(device)))
            every = usual if searched is None else (searched, *usual)
            known[key] = next((one for one in every if self._accepted(name, precision, device, one)), None)
        return known[key]

    def _accepted(self, name: str, precision: str, device: torch.device, setting: LaunchSettings) -> bool:
        """Whether a GPU has not refused these settings."""
        divided_in_vain = setting.units is not None and device in self._undivided_on
        return (name, precision, device, setting) not in self._excluded and not divided_in_vain

    def candidates(self, name: str, precision: str, rows: tuple[int, int], gpu: Gpu) -> list[Candidate]:
        """The settings with which a loop may fit on a GPU, the fastest first."""
        if self.lanes is not None:
            return [Candidate(self.lanes.microseconds(name, (rows[0], 1, rows[1]), gpu, 1), self.lanes.settings(rows, gpu))]
        split = None if self.split is None else self.split.functions[name].shape
        if split is not None and not self._has_products:
            split = split._replace(products=())
        return candidates(self.shapes[name], split, precision, rows, gpu, whole=self.whole_refused is None)

    def unfit(self, precision: str, device: torch.device) -> str:
        """Why no settings are left with which the loops fit on a GPU."""
        whole = self.whole_refused or f"one multiprocessor of {device} does not take all units in {precision}"
        return f"{whole}; {self.split_refused(precision, gpu(device))}"

    def split_refused(self, precision: str, gpu: Gpu) -> str | None:
        """The reason why the units are not divided; None where they may be."""
        if self.split is None:
            return f"the units are not divided below {SPLIT_FROM} of them, where that is never faster"
        every = [self.candidates(name, precision, (1, 1), gpu) for name in self.shapes]
        if all(any(candidate.setting.units for candidate in each) for each in every):
            return None
        return f"the {gpu.multiprocessors} multiprocessors do not take the matrices in {precision}, divided among them"

    def microseconds(self, precision: str, rows: tuple[int, int], device: torch.device, *, keep: bool) -> float | None:
        """The estimated time of a step, forward and with `keep` backward; None where the loops do not fit."""
        total = 0.0
        for name in ("train", "back") if keep else ("infer",):
            every = self.candidates(name, precision, rows, gpu(device))
            fitting = [c.microseconds for c in every if self._accepted(name, precision, device, c.setting)]
            if not fitting:
                return None
            total += fitting[0]
        return total

    def slower_than_graphs(self, precision: str, rows: tuple[int, int], device: torch.device, *, keep: bool) -> str | None:
        """The reason why CUDA graphs of the reference loop run instead: they were measured or are estimated to be faster."""
        if self.lanes is not None:
            return None
        key = (precision, rows, device, keep)
        if key not in self._slower:
            measured = self.graphs_win.get((precision, size_class(rows), device, keep))
            own = self.microseconds(precision, rows, device, keep=keep)
            graphs = graph_microseconds(self.step, rows[0] * rows[1], keep=keep)
            if measured is not None:
                self._slower[key] = "CUDA graphs of the reference loop were measured to be faster" if measured else None
            elif own is None or own <= graphs:
                self._slower[key] = None
            else:
                times = f"{graphs:.3g} us a step instead of {own:.3g}"
                self._slower[key] = f"CUDA graphs of the reference loop are estimated to be faster, {times}"
        return self._slower[key]

    def exclude(self, name: str, precision: str, device: torch.device, setting: LaunchSettings, error: Exception) -> None:
        """Do not use these settings again: the GPU did not accept the loop."""
        self._excluded.add((name, precision, device, setting))
        if setting.units is not None and is_unsupported(error):
            self._undivided_on.add(device)
        self._settings, self._slower = {}, {}

    def split_of(self, setting: LaunchSettings) -> SplitLoops | None:
        """The divided loops of these settings; None where each program has all units, or units are independent."""
        if setting.units is None or self.lanes is not None:
            return None
        if setting.summed:
            return self.summed
        return self.split if setting.width is None else self.streamed

    def _parts(self, name: str, setting: LaunchSettings) -> int:
        """The number of programs that have all units of some rows."""
        if setting.units is None or self.split is None:
            return 1
        return self.split.functions[name].shape.parts(setting.units, summed=setting.summed)

    def fits(self, precision: str, rows: tuple[int, int], device: torch.device) -> bool:
        """Whether every loop has settings with which it fits on a GPU."""
        return all(self.setting(name, precision, rows, device) is not None for name in self.shapes)

    def set(self, name: str, precision: str, rows: tuple[int, int], device: torch.device, setting: LaunchSettings) -> None:
        """Use these settings for a loop on a device from now on, for about as many rows."""
        self.add_settings({(name, precision, size_class(rows), device): setting})

    def set_graphs(self, precision: str, rows: tuple[int, int], device: torch.device, *, keep: bool, faster: bool) -> None:
        """Remember whether CUDA graphs of the reference loop are faster for about as many rows."""
        self.graphs_win[precision, size_class(rows), device, keep] = faster
        self._slower.clear()

    def add_settings(self, settings: Mapping[SearchKey, LaunchSettings]) -> None:
        """Use the settings of a search from now on."""
        self.settings |= settings
        self._settings.clear()
        self._slower.clear()

    def forward(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor], options: LoopOptions, *, keep: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The states after every step [T, B, n], the final states, and, with `keep`, what the gradient needs."""
        like, extent = states[0], self.extent(inputs, states)
        lead, T, B = _lead(extent), *extent[1:]
        trajectory = [_blank(like, (*lead, T, B, n), options) for n in self.states]
        final = [like.new_empty((*lead, B, n)) for n in self.states]
        saved = _blank(like, (*lead, T, B, self.saved), options) if keep and self.saved else None
        tensors = self._named(input=inputs, initial=states, next=trajectory, final=final, saved=[saved])
        name = "train" if keep else "infer"
        launch = partial(self._launch, name, tensors, weights, options, extent)
        self._with_fitting_settings(launch, name, options, extent, like.device)
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
        extent, device = self.extent(*arguments[:2]), arguments[1][0].device
        run = partial(self._backward, gradients, arguments, stored, options, wanted, extent)
        return self._with_fitting_settings(run, "back", options, extent, device)

    def _backward(
        self,
        gradients: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
        arguments: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        stored: tuple[Sequence[Tensor], Tensor | None],
        options: LoopOptions,
        wanted: Sequence[bool],
        extent: Extent,
        setting: LaunchSettings,
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        (inputs, states, weights), (trajectory, saved) = arguments, stored
        memory = self.blank_gradients(extent, states[0], options, wanted, setting)
        d_states = [states[0].new_empty((*_lead(extent), extent[2], n)) for n in self.states]
        tensors = memory.tensors() | self._named(
            input=inputs, initial=states, next=trajectory, saved=[saved], dnext=gradients[0], dfinal=gradients[1],
            dinitial=d_states,
        )  # fmt: skip
        self._launch("back", tensors, weights, options, extent, setting)
        d_weights = self.weight_gradients(weights, wanted[len(inputs) + len(states) :], tensors, memory, options)
        returned: list[Tensor | None] = []
        for x, d, kind, want in zip(inputs, memory.inputs, self.program.kinds, wanted, strict=False):
            if not want:
                returned.append(None)
            elif d is None:
                returned.append(torch.zeros_like(x, memory_format=torch.contiguous_format))
            else:
                returned.append(d.sum(-2, keepdim=True) if kind == SHARED else d)
        return returned, d_states, d_weights

    def blank_gradients(
        self,
        extent: Extent,
        like: Tensor,
        options: LoopOptions,
        wanted: Sequence[bool],
        setting: LaunchSettings,
        chunks: int = 1,
    ) -> "GradientMemory":
        """Memory for what a backward loop writes, beside the gradients of the initial states.

        Args:
            like: a tensor on the device.
            wanted: for every input, whether its gradient is wanted.
            setting: those of the loop.
            chunks: the number of launches that share the memory, each for its own steps.
        """
        lead, T, B = _lead(extent), *extent[1:]
        blocks = -(-B // setting.rows)
        if self.lanes is None:
            lines = chunks * blocks * self._parts("back", setting)
        else:
            lines = self.lanes.lines("back", extent, gpu(like.device), setting, options.scan)
        shapes = {PER_STEP: (*lead, T, B), SHARED: (*lead, T, blocks), CONSTANT: (*lead, 1, B)}
        d_inputs = [
            _blank(like, (*shapes[kind], width), options) if width is not None and (want or read) else None
            for kind, want, (width, read) in zip(self.program.kinds, wanted, self.d_inputs, strict=False)
        ]
        d_entries = {i: like.new_zeros((*lead, lines, n)) for i, n in self.entries.items()}
        width = self.after_loop.width
        buffer = _blank(like, (*lead, T, B, width), options) if width else None
        return GradientMemory(d_inputs, d_entries, buffer, self.after_loop)

    def extent(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Extent:
        """Models, steps and rows of a call."""
        *lead, B, _ = states[0].shape
        return lead[0] if lead else 0, 0 if self.timed is None else inputs[self.timed].shape[-3], B

    # -- launching --------------------------------------------------------------------------------------------------------

    def _named(self, **groups: Sequence[Tensor | None]) -> Tensors:
        return {(kind, i): tensor for kind, group in groups.items() for i, tensor in enumerate(group)}

    def _with_fitting_settings(
        self,
        run: Callable[[LaunchSettings], Result],
        name: str,
        options: LoopOptions,
        extent: Extent,
        device: torch.device,
    ) -> Result:
        """Run a loop with the fastest settings that the GPU accepts. It refuses others before anything has run."""
        dots = precision(options, device)
        while True:
            setting = self.setting(name, dots, (extent[0] or 1, extent[2]), device)
            if setting is None:
                raise NoKernel(self.unfit(dots, device))
            try:
                return run(setting)
            except Exception as error:
                if not does_not_fit(error):
                    raise
                self.exclude(name, dots, device, setting, error)

    def _launch(
        self,
        name: str,
        tensors: Tensors,
        weights: Sequence[Tensor],
        options: LoopOptions,
        extent: Extent,
        setting: LaunchSettings,
    ) -> None:
        initial = tensors[INITIAL, 0]
        assert initial is not None
        if self.lanes is not None:
            self._launch_lanes(self.lanes, name, tensors, weights, options, extent, setting)
            return
        ReadyLoop(self, name, weights, options, setting, (extent[0], initial.device)).run(tensors, options.lengths, extent)

    def _launch_lanes(
        self,
        lanes: LaneLoops,
        name: str,
        tensors: Tensors,
        weights: Sequence[Tensor],
        options: LoopOptions,
        extent: Extent,
        setting: LaunchSettings,
    ) -> None:
        device = cast(Tensor, tensors[INITIAL, 0]).device
        assert setting.units is not None
        fast = precision(options, device) != "tf32x3" and device.type == "cuda"
        constants = LaneConstants(setting.rows, options.reverse, fast, setting.units)
        chunks = lanes.chunks(name, extent, gpu(device), options.scan)
        lanes.launch(name, tensors, weights, options.lengths, extent, setting, chunks, constants)

    def prepared(self, name: str, dots: str, setting: LaunchSettings, reverse: bool, device: torch.device) -> "PreparedLoop":
        """A loop with its settings, in a precision of dots and a direction."""
        key = (name, dots, setting, reverse, device)
        loop = self._prepared.get(key)
        if loop is None:
            loop = self._prepared[key] = PreparedLoop(self, *key)
        return loop

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
        return self.after_loop.compute(weights, wanted, tensors, memory.buffer, options)


class GradientMemory(NamedTuple):
    """What a backward loop writes."""

    inputs: list[Tensor | None]  # gradients of the inputs, where they are wanted
    entries: dict[int, Tensor]  # gradients of weights that a step uses entry by entry, one line for each program
    buffer: Tensor | None  # the factors of matrix products after the loop, side by side
    after_loop: WeightGradients  # which knows where each of them begins

    def tensors(self) -> Tensors:
        """By their kinds, as a loop takes them."""
        tensors: Tensors = {(D_INPUT, i): d for i, d in enumerate(self.inputs)}
        if self.buffer is not None:
            tensors |= {(SEQUENCE, i): part for i, part in self.after_loop.sequences(self.buffer).items()}
        return tensors | {(D_WEIGHT, i): d for i, d in self.entries.items()}


class PreparedLoop:
    """What a launch of a loop needs beside its tensors. It depends on the settings, and is the same for every call."""

    def __init__(
        self, kernel: TritonKernel, name: str, dots: str, setting: LaunchSettings, reverse: bool, device: torch.device
    ):
        rows, self.warps, width, room, self.units, _ = setting
        self.name, self.split, self.chunk = name, kernel.split_of(setting), width or 0
        self.parts, self.device = kernel._parts(name, setting), device
        self.loops = kernel.at(width if self.split is None else None)
        self.function: TritonFunction = (self.loops if self.split is None else self.split).function(name)
        resident = resident_blocks([BYTES[dots] * size for size in self.function.sizes], room)
        self.constants = LaunchConstants(rows, reverse, resident, dots, dots != "tf32x3" and device.type == "cuda")

    def launch(self, tensors: Sequence[Tensor | None], extent: Extent) -> None:
        models, T, B = extent
        if self.split is None or self.units is None:
            grid = (-(-B // self.constants.rows), models or 1, 1)
            self.loops.launcher.launch(self.function, tensors, grid, (T, B), self.constants, self.warps, models > 0)
        else:
            split = (self.units, self.parts, max(gpu(self.device).multiprocessors // self.parts, 1), self.chunk)
            self.split.launch(self.name, tensors, extent, self.constants, split, self.warps)


class ReadyLoop:
    """A loop with its weights and settings, which runs on the tensors of a whole sequence or of any chunk of it.

    Args:
        where: the number of models, 0 for tensors without their axis, and the device.
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
        models, device = where
        self.loop = kernel.prepared(name, precision(options, device), setting, options.reverse, device)
        function = self.loop.function
        self.vectors = {i: _vector(weights[i], models) for kind, i in function.pointers if kind == WEIGHT}
        self.matrices = [packed(weights[i].mT if turned else weights[i]) for i, turned in function.matrices]

    def run(self, tensors: Tensors, lengths: Tensor | None, extent: Extent) -> None:
        """Run on tensors with these numbers of models, steps and rows."""
        if not extent[2]:
            return
        pointers = self.loop.function.pointers
        taken = [self.vectors[i] if kind == WEIGHT else tensors[kind, i] for kind, i in pointers]
        self.loop.launch([*taken, *self.matrices, lengths], extent)


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


def _has_sums(program: Program) -> bool:
    """Whether a loop adds up gradients of weights over time."""
    return any(kind == D_WEIGHT for kind, _ in program.widths)


def precision(options: LoopOptions, device: torch.device) -> str:
    """The precision of the dots of a call."""
    return options.dots or float32_dots(device)


def _vector(weight: Tensor, models: int) -> Tensor:
    """A weight that a step uses entry by entry, as one line for each model."""
    if not models:
        return weight if weight.dim() == 1 and weight.is_contiguous() else weight.reshape(1, -1)
    return weight.reshape(models, 1, -1)


def _lead(extent: Extent) -> tuple[int, ...]:
    """The axis of models, where there is one."""
    return extent[:1] if extent[0] else ()


def _blank(like: Tensor, shape: tuple[int, ...], options: LoopOptions) -> Tensor:
    """Memory for a sequence. With lengths it is zeroed, since nothing is written past a row's end."""
    return like.new_empty(shape) if options.lengths is None else like.new_zeros(shape)
