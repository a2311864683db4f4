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

from unfading.fuse.differentiate import differentiate
from unfading.fuse.emit_triton import Function, emit_backward, emit_forward, source
from unfading.fuse.frame import Names
from unfading.fuse.program import NotFusable, Program
from unfading.fuse.triton_launch import Known, Launcher, packed
from unfading.fuse.triton_source import module
from unfading.fuse.triton_weights import Sums

ROWS = 16  # of a block: the least that a dot takes
RESIDENT = 192 * 1024  # bytes of matrices that stay on chip beside everything else
LARGEST = 128 * 1024  # bytes of one matrix, which a dot takes whole

Tensors = dict[tuple[str, int], Tensor | None]


class Way(NamedTuple):
    """How time is gone through: the direction, and each row's length, int64 [models, B]."""

    reverse: bool
    lengths: Tensor | None


class TritonKernel:
    """The three loops of one program: to run, to run keeping what the gradient needs, and back."""

    def __init__(self, program: Program, names: Names):
        made = differentiate(program, save_light=False)
        self.program, self.reverse_program = program, made.reverse
        self.outer, self.totals = made.outer, made.totals
        self.infer = emit_forward("infer", program, names)
        self.train = emit_forward("train", made.forward, names)
        self.back = emit_backward("back", made, names)
        largest = max((*self.infer.sizes, *self.back.sizes), default=0)
        if largest > LARGEST:
            raise NotFusable(
                f"a recurrent matrix takes {largest // 1024} KB on chip, padded to powers of two, and a dot has room for "
                f"{LARGEST // 1024} KB"
            )
        self.source = source([self.infer, self.train, self.back])
        self.module = module(self.source)
        self.launcher = Launcher(self.module)
        sources = [product.dy for product in self.outer] + [total.dy for total in self.totals]
        self.read = {source.index for source in sources if source.kind == "dinput"}  # after the loop, wanted or not
        widths = made.forward.widths
        self.states = [n for (kind, _), n in sorted(widths.items()) if kind == "next"]
        self.saved = widths.get(("saved", 0), 0)
        self.room = RESIDENT  # less where a GPU has less
        self.warps = 8 if max(self.states) > 64 else 4

    def forward(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor], way: Way, *, keep: bool
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The states after every step [models, T, B, n], the final ones, and what the gradient needs, if it is to be kept."""
        E, T, B = self.extent(inputs, states)
        trajectory = [_blank(states[0], (E, T, B, n), way) for n in self.states]
        final = [states[0].new_empty((E, B, n)) for n in self.states]
        saved = _blank(states[0], (E, T, B, self.saved), way) if keep and self.saved else None
        tensors = self._named(input=inputs, initial=states, next=trajectory, final=final, saved=[saved])
        self._launch(self.train if keep else self.infer, tensors, weights, way, (E, T, B))
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
        blocks, widths, like = -(-B // ROWS), self.reverse_program.widths, states[0]
        shapes = {"sequence": (E, T, B), "shared": (E, T, blocks), "constant": (E, 1, B)}
        d_inputs = [
            _blank(like, (*shapes[kind], widths["dinput", i]), way)
            if ("dinput", i) in widths and (wanted[i] or i in self.read)
            else None
            for i, kind in enumerate(self.program.kinds)
        ]
        d_states = [like.new_empty((E, B, n)) for n in self.states]
        d_entries = {i: like.new_empty((E, blocks, n)) for (kind, i), n in widths.items() if kind == "dweight"}
        sizes = [n for (kind, _), n in sorted(widths.items()) if kind == "sequence"]
        starts = [0, *accumulate(sizes)]
        stored = _blank(like, (E, T, B, starts[-1]), way) if sizes else None
        sequences = [] if stored is None else [stored[..., a:b] for a, b in pairwise(starts)]
        tensors = self._named(
            input=inputs, initial=states, next=trajectory, saved=[saved], dnext=gradients[0], dfinal=gradients[1],
            dinput=d_inputs, dinitial=d_states, sequence=sequences,
        )  # fmt: skip
        tensors |= {("dweight", i): entries for i, entries in d_entries.items()}
        self._launch(self.back, tensors, weights, way, extent)
        d_weights = self._weights(weights, wanted[len(inputs) + len(states) :], tensors, (stored, starts), way)
        found: list[Tensor | None] = []
        for x, d, kind, want in zip(inputs, d_inputs, self.program.kinds, wanted, strict=False):
            if not want:
                found.append(None)
            elif d is None:
                found.append(torch.zeros_like(x, memory_format=torch.contiguous_format))
            else:
                found.append(d.sum(2, keepdim=True) if kind == "shared" else d)
        return found, d_states, d_weights

    def extent(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, int, int]:
        """Models, steps and rows."""
        T = next((x.shape[1] for x, kind in zip(inputs, self.program.kinds, strict=True) if kind != "constant"), 0)
        return states[0].shape[0], T, states[0].shape[1]

    # -- launching --------------------------------------------------------------------------------------------------------

    def _named(self, **groups: Sequence[Tensor | None]) -> Tensors:
        return {(kind, i): tensor for kind, group in groups.items() for i, tensor in enumerate(group)}

    def _launch(
        self, function: Function, tensors: Tensors, weights: Sequence[Tensor], way: Way, extent: tuple[int, int, int]
    ) -> None:
        E = extent[0]
        taken = [weights[i].reshape(E, 1, -1) if kind == "weight" else tensors[kind, i] for kind, i in function.pointers]
        taken += [packed(weights[i].mT if turned else weights[i]) for i, turned in function.matrices]
        taken.append(way.lengths)
        device = next(tensor.device for tensor in taken if tensor is not None)
        fast = torch.backends.cuda.matmul.fp32_precision == "tf32" and device.type == "cuda"
        # A dot right to float32 is three in tf32, on the upper and the lower halves of both factors.
        precision, copies = ("tf32", 1) if fast else ("tf32x3", 2)
        resident = resident_blocks([copies * size for size in function.sizes], min(self.room, RESIDENT))
        known = Known(ROWS, way.reverse, resident, precision, fast)
        self.launcher.launch(function, taken, extent, known, self.warps)

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
            entries = tensors.get(("dweight", i))
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


def resident_blocks(sizes: Sequence[int], room: int) -> int:
    """How many matrices stay on chip: all, or as many as leave room there for the largest of the others on its way."""
    if sum(sizes) <= room:
        return len(sizes)
    for count in range(len(sizes), 0, -1):
        if sum(sizes[:count]) + max(sizes[count:], default=0) <= room:
            return count
    return 0


def _blank(like: Tensor, shape: tuple[int, ...], way: Way) -> Tensor:
    """Memory for a sequence; with lengths it begins as zeros, for what lies past a row's end is not written."""
    return like.new_empty(shape) if way.lengths is None else like.new_zeros(shape)
