"""The kernels of a program with convolutions, and which of its tensors have a gradient."""

from functools import cache
from typing import NamedTuple

import torch

from unfading.fuse.frames.frame_program import FrameProgram
from unfading.fuse.frames.pixels import PixelKernel, PixelKernels
from unfading.fuse.ir.differentiate import Total
from unfading.fuse.ir.program import Program, Store, TensorKind

# Every program traced in this process, by its key.
FRAME_PROGRAMS: dict[str, FrameProgram] = {}

INPUT, NEXT, SAVED = TensorKind.INPUT, TensorKind.NEXT, TensorKind.SAVED
D_INPUT, D_WEIGHT = TensorKind.D_INPUT, TensorKind.D_WEIGHT


class StageKernels(NamedTuple):
    """One stage with its reverse."""

    forward: Program  # with what the reverse reads
    reverse: Program
    totals: tuple[Total, ...]
    kernels: PixelKernels
    saved: int  # channels
    outputs: tuple[int, ...]  # channels of each output
    results: dict[int, int]  # input -> the input that has an equal gradient, of the inputs whose gradient is written


class FrameKernels:
    """The kernels of a program in one precision, for one kind of device."""

    def __init__(self, program: FrameProgram, dtype: torch.dtype, target: str):
        self.program, self.dtype, self.target = program, dtype, target
        self.stages: list[StageKernels] = []
        for stage, both in zip(program.stages, program.reversed(), strict=True):
            assert not both.outer
            reverse, results = _each_once(both.reverse, program.first_result)
            kernels = PixelKernels(*(PixelKernel(each, dtype, target) for each in (stage.program, both.forward, reverse)))
            outputs = tuple(n for (kind, _), n in sorted(stage.program.widths.items()) if kind == NEXT)
            saved = both.forward.widths.get((SAVED, 0), 0)
            self.stages.append(StageKernels(both.forward, reverse, both.totals, kernels, saved, outputs, results))
        # Results of convolutions that a reverse reads, and outputs that it reads.
        first = program.first_result
        self.kept_results = {i for stage in self.stages for i in stage.reverse.reads(INPUT) if i >= first}
        self.has_gradient = self._has_gradient()

    def stored_channels(self) -> int:
        """Of one pixel at one step: what the forward pass stores for the backward pass."""
        results = sum(
            c.width for i, c in enumerate(self.program.convolutions, self.program.first_result) if i in self.kept_results
        )
        read = self.program.stages[-1].program.widths
        inputs = sum(read[INPUT, i] for i in range(self.program.inputs))
        return inputs + results + sum(stage.saved + sum(stage.outputs) for stage in self.stages)

    def _has_gradient(self) -> tuple[bool, ...]:
        """For every input, state and weight: whether a gradient reaches it."""
        program = self.program
        inputs: set[int] = set()
        weights: set[int] = set()
        outputs: set[int] = {-1}  # of the stage, as far as a gradient reaches them; -1 for those of the last stage
        number = program.first_result + len(program.convolutions)
        for stage, kernels in zip(reversed(program.stages), reversed(self.stages), strict=True):
            number -= len(stage.convolutions)
            if stage is not program.stages[-1]:
                outputs = set()
            for j, convolution in enumerate(stage.convolutions, start=number):
                if j in inputs:
                    weights.add(convolution.weight)
                    (inputs if convolution.source.kind == INPUT else outputs).add(convolution.source.index)
            if outputs:
                inputs |= kernels.results.keys()
                weights |= {index for kind, index in kernels.reverse.widths if kind == D_WEIGHT}
                weights |= {total.weight for total in kernels.totals}
        read = [i in inputs for i in range(program.inputs)]
        return (*read, *[True] * program.states, *(i in weights for i in range(len(program.weights))))


def _each_once(reverse: Program, first: int) -> tuple[Program, dict[int, int]]:
    """The reverse of a stage with equal gradients of convolutions' results written once; which input has which gradient.

    The two convolutions of an LSTM, of its input and of its state, are added up: their gradients are equal.
    """
    of_inputs: dict[int, list[Store]] = {}
    for store in reverse.stores:
        if store.kind == D_INPUT:
            of_inputs.setdefault(store.index, []).append(store)
    equal: dict[tuple[tuple[int, int], ...], int] = {}
    results: dict[int, int] = {}
    for i, stores in of_inputs.items():
        content = tuple((store.start, store.value.id) for store in stores)
        results[i] = equal.setdefault(content, i) if i >= first else i
    stores_once = tuple(store for store in reverse.stores if store.kind != D_INPUT or results[store.index] == store.index)
    return reverse._replace(stores=stores_once), results


@cache
def frame_kernels(key: str, dtype: torch.dtype, target: str) -> FrameKernels:
    """The kernels of a program."""
    return FrameKernels(FRAME_PROGRAMS[key], dtype, target)
