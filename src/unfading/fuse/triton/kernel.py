"""A compiled step on a GPU: tensors in, tensors out, the loop over time in one kernel between them.

    trajectory, final, saved = kernel.forward(inputs, states, weights, walk, keep=True)

All tensors have a leading axis of models, which may have stride 0, are float32 and lie on one device. Gradients of matrices
are products after the loop; all sums have a fixed order, so that a repeated run gives the same bits.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from unfading.fuse.ir.differentiate import differentiate
from unfading.fuse.ir.passes import narrow
from unfading.fuse.ir.program import ELEMENTWISE, InputKind, Op, Program, TensorKind
from unfading.fuse.refusal import NotFusable
from unfading.fuse.triton.emit import emit_backward, emit_forward, source
from unfading.fuse.triton.frame import Names
from unfading.fuse.triton.launch import Known, Launcher, packed
from unfading.fuse.triton.launch_settings import BYTES, Loop, Setting, refused, resident_blocks, usual
from unfading.fuse.triton.source import module
from unfading.fuse.triton.weight_gradients import Sums

FLAT = ELEMENTWISE | {Op.CONST, Op.ZERO, Op.LEAF, Op.EXPAND, Op.CAT, Op.DOT}  # on vectors that may be cut into pieces

Tensors = dict[tuple[str, int], Tensor | None]


class Way(NamedTuple):
    """How time is gone through: the direction, each row's length, int64 [models, B], and the numbers that dots multiply."""

    reverse: bool
    lengths: Tensor | None
    dots: str  # bf16 or fp16, as autocast has it; empty for those of float32


class Loops:
    """The three loops of a program, with tiles of one width: to run, to run keeping what the gradient needs, and back."""

    def __init__(self, programs: Sequence[Program], names: Names, width: int | None):
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

    def __init__(self, program: Program, names: Names):
        made = differentiate(program, save_light=False)
        self.program, self.reverse_program, self.names = program, made.reverse, names
        self.outer, self.totals = made.outer, made.totals
        self.programs = (program, made.forward, made.reverse)
        self.loops: dict[int | None, Loops] = {}  # by the width of their tiles
        self.settings: dict[tuple[str, str], Setting] = {}  # by function and precision
        values = [value for program in self.programs for value in program.values()]
        flat = all(value.op in FLAT or (value.op in (Op.SUM, Op.RESHAPE) and value.size == 1) for value in values)
        functions = self.at(None).functions.values()
        widest = max(n for (kind, _), n in made.forward.widths.items() if kind == TensorKind.NEXT)
        self.about = {f.name: Loop(f.name, widest, sum(f.sizes), flat) for f in functions}
        reason = refused(list(self.about.values()), max((size for f in functions for size in f.sizes), default=0))
        if reason:
            raise NotFusable(reason)
        sources = [product.dy for product in self.outer] + [total.dy for total in self.totals]
        self.read = {source.index for source in sources if source.kind == TensorKind.D_INPUT}  # after the loop, wanted or not
        widths = made.forward.widths
        self.states = [n for (kind, _), n in sorted(widths.items()) if kind == TensorKind.NEXT]
        self.saved = widths.get((TensorKind.SAVED, 0), 0)

    def at(self, width: int | None) -> Loops:
        """The loops with tiles of so many entries."""
        if width not in self.loops:
            self.loops[width] = Loops(self.programs, self.names, width)
        return self.loops[width]

    def setting(self, name: str, precision: str) -> Setting:
        """How a loop is cut: as it was tuned, or as is usual."""
        found = self.settings.get((name, precision))
        if found is None:
            found = self.settings[name, precision] = usual(self.about[name], precision)
        return found

    def forward(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor], way: Way, *, keep: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The states after every step [models, T, B, n], the final ones, and what the gradient needs, if it is to be kept."""
        E, T, B = self.extent(inputs, states)
        trajectory = [_blank(states[0], (E, T, B, n), way) for n in self.states]
        final = [states[0].new_empty((E, B, n)) for n in self.states]
        saved = _blank(states[0], (E, T, B, self.saved), way) if keep and self.saved else None
        tensors = self._named(input=inputs, initial=states, next=trajectory, final=final, saved=[saved])
        self._launch("train" if keep else "infer", tensors, weights, way, (E, T, B))
        return trajectory, final, saved

    def backward(
        self,
        gradients: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
        given: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        kept: tuple[Sequence[Tensor], Tensor | None],
        way: Way,
        wanted: Sequence[bool],
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """Gradients of inputs, initial states and weights, from those of the trajectory and of the final states.

        Args:
            given: inputs, states and weights, as forward had them.
            kept: the trajectory and what was saved.
            wanted: of every input, state and weight whether its gradient is; None stands for one that is not.
        """
        (inputs, states, weights), (trajectory, saved) = given, kept
        E, T, B = extent = self.extent(inputs, states)
        widths, like = self.reverse_program.widths, states[0]
        blocks = -(-B // self.setting("back", precision(way, like.device)).rows)
        shapes = {InputKind.SEQUENCE: (E, T, B), InputKind.SHARED: (E, T, blocks), InputKind.CONSTANT: (E, 1, B)}
        d_inputs = [
            _blank(like, (*shapes[kind], widths[TensorKind.D_INPUT, i]), way)
            if (TensorKind.D_INPUT, i) in widths and (wanted[i] or i in self.read)
            else None
            for i, kind in enumerate(self.program.kinds)
        ]
        d_states = [like.new_empty((E, B, n)) for n in self.states]
        d_entries = {i: like.new_empty((E, blocks, n)) for (kind, i), n in widths.items() if kind == TensorKind.D_WEIGHT}
        sizes = [n for (kind, _), n in sorted(widths.items()) if kind == TensorKind.SEQUENCE]
        starts = [0, *accumulate(sizes)]
        stored = _blank(like, (E, T, B, starts[-1]), way) if sizes else None
        sequences = [] if stored is None else [stored[..., a:b] for a, b in pairwise(starts)]
        tensors = self._named(
            input=inputs, initial=states, next=trajectory, saved=[saved], dnext=gradients[0], dfinal=gradients[1],
            dinput=d_inputs, dinitial=d_states, sequence=sequences,
        )  # fmt: skip
        tensors |= {(TensorKind.D_WEIGHT, i): entries for i, entries in d_entries.items()}
        self._launch("back", tensors, weights, way, extent)
        d_weights = self._weights(weights, wanted[len(inputs) + len(states) :], tensors, (stored, starts), way)
        found: list[Tensor | None] = []
        for x, d, kind, want in zip(inputs, d_inputs, self.program.kinds, wanted, strict=False):
            if not want:
                found.append(None)
            elif d is None:
                found.append(torch.zeros_like(x, memory_format=torch.contiguous_format))
            else:
                found.append(d.sum(2, keepdim=True) if kind == InputKind.SHARED else d)
        return found, d_states, d_weights

    def extent(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, int, int]:
        """Models, steps and rows."""
        T = next((x.shape[1] for x, kind in zip(inputs, self.program.kinds, strict=True) if kind != InputKind.CONSTANT), 0)
        return states[0].shape[0], T, states[0].shape[1]

    # -- launching --------------------------------------------------------------------------------------------------------

    def _named(self, **groups: Sequence[Tensor | None]) -> Tensors:
        return {(kind, i): tensor for kind, group in groups.items() for i, tensor in enumerate(group)}

    def _launch(self, name: str, tensors: Tensors, weights: Sequence[Tensor], way: Way, extent: tuple[int, int, int]) -> None:
        E, device = extent[0], next(tensor.device for tensor in tensors.values() if tensor is not None)
        dots = precision(way, device)
        rows, warps, width, room = self.setting(name, dots)
        loops = self.at(width)
        function = loops.functions[name]
        taken = [
            weights[i].reshape(E, 1, -1) if kind == TensorKind.WEIGHT else tensors[kind, i] for kind, i in function.pointers
        ]
        taken += [packed(weights[i].mT if turned else weights[i]) for i, turned in function.matrices]
        taken.append(way.lengths)
        resident = resident_blocks([BYTES[dots] * size for size in function.sizes], room)
        known = Known(rows, way.reverse, resident, dots, dots != "tf32x3" and device.type == "cuda")
        loops.launcher.launch(function, taken, extent, known, warps)

    # -- after the loop ---------------------------------------------------------------------------------------------------

    def _weights(
        self,
        weights: Sequence[Tensor],
        wanted: Sequence[bool],
        tensors: Tensors,
        stored: tuple[Tensor | None, Sequence[int]],
        way: Way,
    ) -> list[Tensor | None]:
        found = [
            torch.zeros_like(weight, memory_format=torch.contiguous_format) if want else None
            for weight, want in zip(weights, wanted, strict=True)
        ]
        for i, weight in enumerate(found):
            entries = tensors.get((TensorKind.D_WEIGHT, i))
            if weight is not None and entries is not None:
                weight += entries.sum(1).reshape(weight.shape)
        sums = Sums(tensors, stored, reverse=way.reverse, lengths=way.lengths)
        for product in self.outer:
            weight = found[product.block.weight]
            if weight is not None:
                sums.add_product(product, weight)
        for total in self.totals:
            weight = found[total.weight]
            if weight is not None:
                sums.add_total(total, weight)
        return found


def precision(way: Way, device: torch.device) -> str:
    """Of a dot: as autocast has it, else tf32 where torch lets products of float32 be made in it."""
    if way.dots:
        return way.dots
    return "tf32" if device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _blank(like: Tensor, shape: tuple[int, ...], way: Way) -> Tensor:
    """Memory for a sequence; with lengths it begins as zeros, for what lies past a row's end is not written."""
    return like.new_empty(shape) if way.lengths is None else like.new_zeros(shape)
