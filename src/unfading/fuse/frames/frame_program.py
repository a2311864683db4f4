"""The program of a step with convolutions: stages that compute every pixel by itself, and the convolutions between them.

A stage is a `Program` whose rows are pixels and whose features are channels. It reads inputs alone, numbered one after the
other: the inputs of the step, its states, and the results of the convolutions. Its outputs (`next`) are what the convolutions
after it read; those of the last stage are the states after the step. ConvGRU has two stages with a computation:

    convolutions 0   W_rz * h
    stage 1          next0 = sigmoid(...) h                       r h
    convolutions 1   W_n * (r h)
    stage 2          next0 = z h + (1 - z) tanh(...)              the state after the step

A convolution that reads a state or an input as it is needs no stage before it: stage 0 of ConvGRU is empty.
"""

from hashlib import sha256
from typing import NamedTuple

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.differentiate import Reversed, differentiate
from unfading.fuse.ir.program import InputKind, Op, Program, Store, TensorKind, Value, in_order


class ConvolutionSource(NamedTuple):
    """What a convolution reads: an input of the stages as it is, or an output of the stage before it."""

    kind: TensorKind  # input or next
    index: int  # type: ignore[assignment]


class FrameConvolution(NamedTuple):
    """A convolution that keeps the size of its frames: rows r0..r1 of a weight, with a border of zeros."""

    source: ConvolutionSource
    weight: int
    r0: int
    r1: int
    kernel: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    channels: int  # that it reads

    @property
    def width(self) -> int:
        """The channels of its result."""
        return self.r1 - self.r0

    @property
    def border(self) -> tuple[int, int]:
        """The zeros on each side of a frame."""
        height, width = ((k - 1) * d // 2 for k, d in zip(self.kernel, self.dilation, strict=True))
        return height, width


class FrameStage(NamedTuple):
    """A computation of every pixel, and the convolutions after it."""

    program: Program
    convolutions: tuple[FrameConvolution, ...]


class FrameProgram(NamedTuple):
    """A step. Its stages read inputs 0..inputs, then the states, then the results of the convolutions in their order."""

    stages: tuple[FrameStage, ...]
    inputs: int
    states: int
    weights: tuple[tuple[int, ...], ...]  # shapes

    @property
    def first_result(self) -> int:
        """The number of the input that holds the result of the first convolution."""
        return self.inputs + self.states

    @property
    def convolutions(self) -> list[FrameConvolution]:
        """All convolutions, in the order of their results."""
        return [convolution for stage in self.stages for convolution in stage.convolutions]

    def weights_read(self) -> set[int]:
        """The numbers of the weights in use."""
        read = {convolution.weight for convolution in self.convolutions}
        return read.union(*(stage.program.reads(TensorKind.WEIGHT) for stage in self.stages))

    def reversed(self) -> tuple[Reversed, ...]:
        """Every stage with its reverse."""
        return tuple(differentiate(stage.program) for stage in self.stages)

    def key(self) -> str:
        """A hash of the program, the same in every process."""
        return sha256(
            f"{self}\n{self[1:]}\n{[sorted(stage.program.widths.items()) for stage in self.stages]}".encode()
        ).hexdigest()[:16]

    def __str__(self) -> str:
        lines = []
        number = self.first_result
        for i, stage in enumerate(self.stages):
            lines.append(f"stage {i}")
            lines += [f"  {line}" for line in str(stage.program).splitlines()]
            for c in stage.convolutions:
                settings = f"kernel {c.kernel}, dilation {c.dilation}, groups {c.groups}"
                lines.append(
                    f"  input{number} = convolution({c.source.kind}{c.source.index} W{c.weight}[{c.r0}:{c.r1}], {settings})"
                )
                number += 1
        return "\n".join(lines)


class RecordedConvolution(NamedTuple):
    """A convolution as it was recorded: the value that it reads, and the convolution with an open source."""

    value: Value
    convolution: FrameConvolution


def cut(
    outputs: list[Store],
    recorded: list[RecordedConvolution],
    widths: list[int],
    inputs: int,
    weights: tuple[tuple[int, ...], ...],
) -> FrameProgram:
    """The stages of a step.

    Args:
        outputs: the stores of the states after the step.
        recorded: the convolutions; result j is input `len(widths) + j` of the values.
        widths: channels of the inputs and of the states.
        inputs: how many of these are inputs.
    """
    first = len(widths)
    needed = _needed([store.value for store in outputs], recorded, first)
    levels = _levels(recorded, first)
    depth = 1 + max((levels[j] for j in needed), default=-1)
    stages: list[FrameStage] = []
    order = sorted(needed, key=lambda j: (levels[j], j))
    numbers = {
        first + j: first + k for k, j in enumerate(order)
    }  # results are numbered in the order in which they are computed
    all_widths = widths + [recorded[j].convolution.width for j in order]
    weight_widths = {(TensorKind.WEIGHT, i): _size(shape) for i, shape in enumerate(weights)}

    def program(stores: list[Store], next_widths: list[int]) -> Program:
        renamed = Renaming(numbers)
        new = [store._replace(value=renamed(store.value)) for store in stores]
        tensors = {(TensorKind.INPUT, i): n for i, n in enumerate(all_widths)} | weight_widths
        tensors |= {(TensorKind.NEXT, i): n for i, n in enumerate(next_widths)}
        return Program(tuple(new), tensors, (InputKind.SEQUENCE,) * len(all_widths))

    for level in range(depth):
        stores: list[Store] = []
        computed: dict[int, int] = {}  # the output by the id of the value
        next_widths: list[int] = []
        convolutions = []
        for j in (j for j in order if levels[j] == level):
            value, convolution = recorded[j]
            whole = value.op is Op.LEAF and value.leaf.kind == TensorKind.INPUT and value.leaf.start == 0
            if whole and value.leaf.index < first and value.size == widths[value.leaf.index]:
                source = ConvolutionSource(TensorKind.INPUT, value.leaf.index)
            else:
                if value.id not in computed:
                    computed[value.id] = len(next_widths)
                    next_widths.append(value.size)
                    stores += pieces(TensorKind.NEXT, computed[value.id], value)
                source = ConvolutionSource(TensorKind.NEXT, computed[value.id])
            convolutions.append(convolution._replace(source=source))
        stages.append(FrameStage(program(stores, next_widths), tuple(convolutions)))
    states = widths[inputs:]
    stages.append(FrameStage(program(outputs, states), ()))
    return FrameProgram(tuple(stages), inputs, len(states), weights)


def pieces(kind: TensorKind, index: int, value: Value) -> list[Store]:
    """The stores of a value, one for each part of a concatenation."""
    stores, start = [], 0
    for piece in value.args if value.op is Op.CAT else (value,):
        stores.append(Store(kind, index, start, piece))
        start += piece.size
    return stores


class Renaming:
    """Values with other numbers of the inputs that they read."""

    def __init__(self, numbers: dict[int, int]):
        self.numbers, self.builder = numbers, Builder()
        self.values: dict[int, Value] = {}

    def __call__(self, root: Value) -> Value:
        for value in in_order([root]):
            if value.id in self.values:
                continue
            if value.op is Op.LEAF:
                kind, index, start, stop = value.leaf
                index = self.numbers.get(index, index) if kind == TensorKind.INPUT else index
                new = self.builder.leaf(kind, index, start, stop)
            elif value.op is Op.CONST:
                new = self.builder.const(value.number)
            elif value.op is Op.ZERO:
                new = self.builder.zero(())
            else:
                new = self.builder.rebuilt(value, [self.values[arg.id] for arg in value.args])
            self.values[value.id] = new
        return self.values[root.id]


def _results(value: Value, first: int) -> set[int]:
    """The convolutions whose results a value reads."""
    leaves = (v.leaf for v in in_order([value]) if v.op is Op.LEAF)
    return {leaf.index - first for leaf in leaves if leaf.kind == TensorKind.INPUT and leaf.index >= first}


def _needed(roots: list[Value], recorded: list[RecordedConvolution], first: int) -> set[int]:
    """The convolutions that these values depend on."""
    needed: set[int] = set()
    stack = [j for root in roots for j in _results(root, first)]
    while stack:
        j = stack.pop()
        if j not in needed:
            needed.add(j)
            stack += _results(recorded[j].value, first)
    return needed


def _levels(recorded: list[RecordedConvolution], first: int) -> list[int]:
    """For each convolution, how many others come before it on the longest way."""
    levels: list[int] = []
    for value, _ in recorded:
        levels.append(1 + max((levels[j] for j in _results(value, first)), default=-1))
    return levels


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
