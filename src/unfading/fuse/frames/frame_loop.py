"""The loop over time of a step with convolutions, forward and backward.

All tensors of the loop are [pixels, channels], with the pixels of all frames of a batch one after the other: the layout of
torch's channels_last. One step runs a kernel per stage and the convolutions between them. The gradients of the kernels are
summed by the convolutions themselves, in a form that is transformed once after the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unfading.fuse.frames.convolver import Convolver, Frames, add_kernel_gradients, convolver
from unfading.fuse.frames.frame_kernels import FRAME_PROGRAMS, FrameKernels, frame_kernels
from unfading.fuse.frames.interpret_frames import loop_in_torch
from unfading.fuse.frames.pixels import target_for
from unfading.fuse.ir.program import TensorId, TensorKind

INPUT, WEIGHT, NEXT, SAVED, CARRY = (
    TensorKind.INPUT,
    TensorKind.WEIGHT,
    TensorKind.NEXT,
    TensorKind.SAVED,
    TensorKind.CARRY,
)
D_INPUT, D_WEIGHT = TensorKind.D_INPUT, TensorKind.D_WEIGHT


@dataclass(frozen=True)
class FrameCall:
    """What a call of a loop takes beside its tensors."""

    key: str  # of the program
    steps: int
    keep: bool  # whether to store what the gradient needs
    precision: torch.dtype | None = None  # of the convolutions, under autocast


class FrameLoop(torch.autograd.Function):
    """(inputs [T or 1, B, n, height, width], states [B, n, height, width], weights) -> (trajectory, final states)."""

    @staticmethod
    def forward(ctx: Any, call: FrameCall, lengths: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        run = FrameForward(call, lengths, tensors)
        run.all_steps()
        ctx.call = call
        ctx.counts = [len(group) for group in (run.states, run.saved, run.outputs, run.results)]
        ctx.set_materialize_grads(False)
        stored = [*run.states, *run.saved, *run.outputs, *run.results]
        ctx.save_for_backward(lengths, *tensors, *stored)
        return run.result()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (lengths, *tensors) = ctx.call, ctx.saved_tensors
        count = sum(ctx.counts)
        tensors, stored = tensors[:-count], list(tensors[-count:])
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # a second derivative is wanted
            return (None, None, *_twice(call, lengths, tensors, gradients, wanted))
        groups = []
        for n in ctx.counts:
            groups.append(stored[:n])
            del stored[:n]
        return (None, None, *FrameBackward(call, lengths, tensors, groups, wanted).gradients(gradients))


def run_frames(call: FrameCall, lengths: Tensor | None, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The states after every step, and the final states."""
    if call.keep:
        reads = frame_kernels(call.key, tensors[0].dtype, target_for(tensors[0])).has_gradient
        tensors = [tensor if has else tensor.detach() for tensor, has in zip(tensors, reads, strict=True)]
        results: tuple[Tensor, ...] = FrameLoop.apply(call, lengths, *tensors)
        return results
    run = FrameForward(call, lengths, [tensor.detach() for tensor in tensors])
    run.all_steps()
    return run.result()


def _twice(
    call: FrameCall,
    lengths: Tensor | None,
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradient as a differentiable function, by torch's operations."""
    program = FRAME_PROGRAMS[call.key]
    own = [tensor.view_as(tensor) for tensor in tensors]  # new nodes, so that the gradient stops at the arguments
    a, b = program.inputs, program.first_result
    outputs = loop_in_torch(program, own[:a], own[a:b], own[b:], lengths, call.steps)
    pairs = [(out, d) for out, d in zip(outputs, gradients, strict=True) if d is not None and out.requires_grad]
    targets = [tensor for tensor, want in zip(own, wanted, strict=True) if want]
    results = iter(
        torch.autograd.grad([out for out, _ in pairs], targets, [d for _, d in pairs], create_graph=True, allow_unused=True)
        if pairs
        else [None] * len(targets)
    )
    return [next(results) if want else None for want in wanted]


class Loop:
    """What both passes of a call have in common: sizes, weights and convolutions."""

    def __init__(self, call: FrameCall, lengths: Tensor | None, tensors: Sequence[Tensor]):
        self.kernels: FrameKernels = frame_kernels(call.key, tensors[0].dtype, target_for(tensors[0]))
        self.program, self.T, self.lengths = self.kernels.program, call.steps, lengths
        a, b = self.program.inputs, self.program.first_result
        self.given, self.initial, self.weights = tensors[:a], tensors[a:b], tensors[b:]
        first = self.initial[0]
        self.frames = Frames(first.shape[0], first.shape[2], first.shape[3])
        self.like = first
        self.constant: dict[int, Tensor] = {}  # inputs that are the same at all steps
        # Weights that are read entry by entry; the others are the kernels of convolutions.
        self.flat: dict[TensorId, Tensor] = {
            (WEIGHT, i): weight.reshape(-1) for i, weight in enumerate(self.weights) if weight.dim() != 4
        }
        self.convolvers: list[Convolver] = [
            convolver(c, self.weights[c.weight].detach(), self.frames, call.precision) for c in self.program.convolutions
        ]

    def rows(self, tensor: Tensor) -> Tensor:
        """[T, B, n, height, width], or with axes of size 1, as [T, pixels, n]."""
        B, height, width = self.frames
        tensor = tensor.expand(len(tensor), B, tensor.shape[2], height, width)
        return tensor.permute(0, 1, 3, 4, 2).reshape(len(tensor), -1, tensor.shape[2]).contiguous()

    def frames_of(self, rows: Tensor) -> Tensor:
        """[T, pixels, n] or [pixels, n] as [T, B, n, height, width] or [B, n, height, width]."""
        frames = rows.unflatten(-2, self.frames)
        return frames.movedim(-1, -3)

    def blank(self, n: int, *lead: int) -> Tensor:
        return self.like.new_empty((*lead, self.frames.pixels, n))

    def blank_frames(self, n: int, steps: int) -> Tensor:
        """Memory for [T, B, n, height, width] with channels side by side."""
        B, height, width = self.frames
        frame = height * width * n
        strides = (B * frame, frame, 1, width * n, n)
        return self.like.new_empty_strided((steps, B, n, height, width), strides)

    def at(self, i: int, t: int) -> Tensor:
        """Input i at a step, [pixels, n]. Not the input of all steps at once, which would be a second copy of it."""
        if self.T > 1 and len(self.given[i]) == 1:
            if i not in self.constant:
                self.constant[i] = self.rows(self.given[i])[0]
            return self.constant[i]
        return self.rows(self.given[i][t : t + 1])[0]

    def running(self, t: int) -> Tensor | None:
        """Which rows of the batch still run, [B, 1, 1]; None where all do."""
        if self.lengths is None:
            return None
        running = self.lengths > t
        if not running.is_cuda and bool(running.all()):
            return None
        return running.reshape(-1, 1, 1)

    def by_batch(self, rows: Tensor) -> Tensor:
        """[pixels, n] as [B, pixels of a frame, n]."""
        return rows.view(self.frames.batch, -1, rows.shape[-1])


class FrameForward(Loop):
    """The forward pass. What the backward pass reads is stored if the call says so."""

    def __init__(self, call: FrameCall, lengths: Tensor | None, tensors: Sequence[Tensor]):
        super().__init__(call, lengths, tensors)
        T, stages = self.T, self.kernels.stages
        self.keep = call.keep
        stored_steps = T if call.keep else 1
        self.before = [self.rows(state.unsqueeze(0))[0] for state in self.initial]
        # Tensors of their own and no views of others, so that a caller may write into them.
        self.states = [self.blank_frames(n, T) for n in stages[-1].outputs]
        self.trajectory = [self.rows(part) for part in self.states]
        self.saved = [self.blank(stage.saved if call.keep else 0, stored_steps) for stage in stages]
        self.outputs = [self.blank(n, stored_steps) for stage in stages[:-1] for n in stage.outputs]
        self.results = [self.blank(c.width, stored_steps) if self.keeps(i) else self.blank(0, 1) for i, c in self._numbered()]

    def _numbered(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.program.convolutions, start=self.program.first_result))

    def keeps(self, i: int) -> bool:
        return self.keep and i in self.kernels.kept_results

    def all_steps(self) -> None:
        for t in range(self.T):
            self._step(t, self.before if t == 0 else [part[t - 1] for part in self.trajectory])

    def result(self) -> tuple[Tensor, ...]:
        """The states after every step, and a copy of the final ones."""
        return (*self.states, *(part[-1].clone() for part in self.states))

    def _step(self, t: int, before: Sequence[Tensor]) -> None:
        program = self.program
        values = [*(self.at(i, t) for i in range(program.inputs)), *before]
        outputs, convolvers = iter(self.outputs), iter(self.convolvers)
        last = len(program.stages) - 1
        for k, (stage, of_stage) in enumerate(zip(program.stages, self.kernels.stages, strict=True)):
            tensors: dict[TensorId, Tensor] = {(INPUT, i): value for i, value in enumerate(values)} | self.flat
            if k == last:
                computed = [part[t] for part in self.trajectory]
            else:
                computed = [next(outputs)[t if self.keep else 0] for _ in of_stage.outputs]
            tensors |= {(NEXT, i): each for i, each in enumerate(computed)}
            tensors[SAVED, 0] = self.saved[k][t if self.keep else 0]
            kernels = of_stage.kernels
            (kernels.train if self.keep else kernels.infer)(tensors, self.frames.pixels)
            for c in stage.convolutions:
                result = next(convolvers).forward((values if c.source.kind == INPUT else computed)[c.source.index])
                if self.keeps(len(values)):
                    result = self.results[len(values) - program.first_result][t].copy_(result)
                values.append(result)
        running = self.running(t)
        if running is not None:
            for part, old in zip(self.trajectory, before, strict=True):
                part[t] = torch.where(running, self.by_batch(part[t]), self.by_batch(old)).view_as(old)


class FrameBackward(Loop):
    """The backward pass.

    Args:
        stored: states after every step, saved values, outputs of stages, results of convolutions.
        wanted: for every input, state and weight, whether its gradient is wanted.
    """

    def __init__(
        self,
        call: FrameCall,
        lengths: Tensor | None,
        tensors: Sequence[Tensor],
        stored: Sequence[Sequence[Tensor]],
        wanted: Sequence[bool],
    ):
        super().__init__(call, lengths, tensors)
        states, self.saved, outputs, self.results = stored
        self.trajectory = [self.rows(part) for part in states]
        self.before = [self.rows(state.unsqueeze(0))[0] for state in self.initial]
        a, b = self.program.inputs, self.program.first_result
        self.wanted_weights = wanted[b:]
        reached = self.kernels.has_gradient
        self.d_inputs: list[Tensor | None] = [
            self.blank(given.shape[2], self.T) if want and has else None
            for given, want, has in zip(self.given, wanted[:a], reached, strict=False)
        ]
        self.d_weights = [
            weight.new_zeros(weight.numel()) if want and weight.dim() != 4 else None
            for weight, want in zip(self.weights, self.wanted_weights, strict=True)
        ]
        # Per stage: its outputs, its convolutions and the number of the first of their results.
        self.stage_outputs, self.stage_convolvers, number = [], [], 0
        each = iter(outputs)
        for stage, of_stage in zip(self.program.stages, self.kernels.stages, strict=True):
            last = stage is self.program.stages[-1]
            self.stage_outputs.append([] if last else [next(each) for _ in of_stage.outputs])
            n = len(stage.convolutions)
            self.stage_convolvers.append(list(enumerate(self.convolvers[number : number + n], start=b + number)))
            number += n
        self.buffers: dict[tuple[str, int, int], Tensor] = {}

    def gradients(self, arriving: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs, states and weights, from those of trajectory and final states."""
        n = len(self.initial)
        carry = [
            self.blank(part.shape[-1]).zero_() if d is None else self.rows(d.unsqueeze(0))[0].clone()
            for d, part in zip(arriving[n:], self.trajectory, strict=True)
        ]
        spare = [torch.empty_like(part) for part in carry]
        for t in reversed(range(self.T)):
            for total, d in zip(carry, arriving[:n], strict=True):
                if d is not None:
                    self.frames.images(total).add_(d[t])
            running, passed = self.running(t), None
            if running is not None:
                passed = [torch.where(running, 0.0, self.by_batch(part)).view_as(part) for part in carry]
                carry = [part - rest for part, rest in zip(carry, passed, strict=True)]
            self._step(t, carry, spare)
            if passed is not None:
                for part, rest in zip(spare, passed, strict=True):
                    part += rest
            carry, spare = spare, carry
        d_inputs: list[Tensor | None] = []
        for given, d in zip(self.given, self.d_inputs, strict=True):
            d_inputs.append(None if d is None else self.frames_of(d).sum_to_size(given.shape))
        d_weights: list[Tensor | None] = []
        for i, (weight, want, d) in enumerate(zip(self.weights, self.wanted_weights, self.d_weights, strict=True)):
            d_weights.append(self._of_kernels(i) if want and weight.dim() == 4 else None if d is None else d.view_as(weight))
        return [*d_inputs, *(self.frames_of(part) for part in carry), *d_weights]

    def _of_kernels(self, index: int) -> Tensor:
        """The gradient of a weight that consists of the kernels of convolutions."""
        whole = torch.zeros_like(self.weights[index], memory_format=torch.contiguous_format)
        for c, own in zip(self.program.convolutions, self.convolvers, strict=True):
            if c.weight == index:
                whole[c.r0 : c.r1] += own.kernel_gradient()
        return whole

    def _buffer(self, name: str, number: int, n: int) -> Tensor:
        """Memory that every step uses again."""
        key = (name, number, n)
        if key not in self.buffers:
            self.buffers[key] = self.blank(n)
        return self.buffers[key]

    def _step(self, t: int, carry: Sequence[Tensor], d_before: Sequence[Tensor]) -> None:
        """From the gradient of the states after a step to that of the states before it, and of all else that it reads."""
        program, first = self.program, self.program.first_result
        before = self.before if t == 0 else [part[t - 1] for part in self.trajectory]
        values = [*(self.at(i, t) for i in range(program.inputs)), *before]
        values += [rows[t] if i in self.kernels.kept_results else rows[0] for i, rows in enumerate(self.results, start=first)]
        totals = Totals(self, [None if d is None else d[t] for d in self.d_inputs], d_before)
        last = len(program.stages) - 1
        for k in range(last, -1, -1):
            stage = program.stages[k]
            computed = [part[t] for part in (self.trajectory if k == last else self.stage_outputs[k])]
            d_outputs: list[Tensor] = list(carry)
            if k < last:
                d_outputs = [self._buffer(f"output {k}", i, part.shape[-1]).zero_() for i, part in enumerate(computed)]
                pairs: dict[int, list[tuple[Convolver, Tensor, Tensor]]] = {}  # by the memory of the gradient
                for c, (number, own) in zip(stage.convolutions, self.stage_convolvers[k], strict=True):
                    d = totals.of.get(number)
                    if d is None:
                        continue
                    of_input = c.source.kind == INPUT
                    if self.wanted_weights[c.weight]:
                        v = (values if of_input else computed)[c.source.index]
                        pairs.setdefault(d.data_ptr(), []).append((own, v, d))
                    target = totals.cleared(c.source.index) if of_input else d_outputs[c.source.index]
                    if target is not None:
                        own.add_input_gradient(d, target)
                for group in pairs.values():
                    add_kernel_gradients(group)
            self._back(k, t, values, computed, d_outputs, totals)
        for i in range(program.inputs, first):
            totals.cleared(i)
        for i in range(program.inputs):
            if self.d_inputs[i] is not None:
                totals.cleared(i)

    def _back(
        self,
        k: int,
        t: int,
        values: Sequence[Tensor],
        computed: Sequence[Tensor],
        d_outputs: Sequence[Tensor],
        totals: "Totals",
    ) -> None:
        """The reverse of one stage."""
        stage = self.kernels.stages[k]
        if not stage.reverse.stores:
            return
        tensors: dict[TensorId, Tensor] = {(INPUT, i): value for i, value in enumerate(values)} | self.flat
        tensors |= {(NEXT, i): each for i, each in enumerate(computed)}
        tensors |= {(CARRY, i): each for i, each in enumerate(d_outputs)}
        tensors[SAVED, 0] = self.saved[k][t]
        for kind, index in stage.kernels.back.written:
            n = stage.reverse.widths[kind, index]
            tensors[kind, index] = totals.target(index, n) if kind == D_INPUT else self._buffer("weight", index, n)
        stage.kernels.back(tensors, self.frames.pixels)
        for kind, index in stage.kernels.back.written:
            if kind == D_INPUT:
                totals.add(index, tensors[kind, index])
            elif (d_weight := self.d_weights[index]) is not None:
                entries = [store for store in stage.reverse.stores if (store.kind, store.index) == (kind, index)]
                for store in entries:
                    at = slice(store.start, store.start + store.value.size)
                    d_weight[at] += tensors[kind, index][:, at].sum(0)
        for index, same in stage.results.items():
            if same != index:
                totals.add(index, tensors[D_INPUT, same], shared_with=same)
        for total in stage.totals:
            d_weight = self.d_weights[total.weight]
            if d_weight is not None:
                d = tensors[D_INPUT, stage.results[total.dy.index]]
                d_weight[total.start : total.start + total.width] += d[:, total.dy.start : total.dy.start + total.width].sum(0)


class Totals:
    """The gradients of one step that have reached the inputs of its stages so far: inputs, states, results of convolutions."""

    def __init__(self, loop: FrameBackward, d_inputs: Sequence[Tensor | None], d_before: Sequence[Tensor]):
        self.loop = loop
        self.places = [*d_inputs, *d_before]  # where the gradients of inputs and states go; None for one that is not wanted
        self.of: dict[int, Tensor] = {}
        self.shared: set[int] = set()  # results of convolutions whose gradient lies in the memory of another one

    def target(self, index: int, n: int) -> Tensor:
        """Where a kernel writes the gradient of an input: to its place if that is empty, else to be added."""
        place = self.places[index] if index < len(self.places) else self.loop._buffer("result", index, n)
        return self.loop._buffer("part", index, n) if place is None or index in self.of else place

    def add(self, index: int, part: Tensor, *, shared_with: int | None = None) -> None:
        """Add what a kernel has written to a target: that of this input, or of one with an equal gradient."""
        if index in self.of and index in self.shared:
            self.of[index] = self.of[index] + part
            self.shared.discard(index)
        elif index in self.of:
            self.of[index] += part
        elif shared_with is not None:
            self.of[index] = part
            self.shared |= {index, shared_with}
        elif index >= len(self.places) or self.places[index] is not None:
            self.of[index] = part

    def cleared(self, index: int) -> Tensor | None:
        """The gradient of an input or a state, zeros where nothing has reached it; None where it is not wanted."""
        place = self.places[index]
        if place is not None and index not in self.of:
            self.of[index] = place.zero_()
        return place
