"""Record a step with convolutions: `step` runs on frames of one pixel, and each convolution cuts the program.

What a step does beside its convolutions must be the same for every pixel. A frame of one pixel then shows all of it: the
tensors have no data and the shape [B, channels, 1, 1]. The result of a convolution is recorded as a new input. Whether the
program computes what the step computes on larger frames is tested on data (`plan_frames.py`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unfading.fuse.frames.frame_program import (
    ConvolutionSource,
    FrameConvolution,
    FrameProgram,
    RecordedConvolution,
    cut,
    pieces,
)
from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import ELEMENTWISE, NUMBERS, Op, Shape, Store, TensorKind, Value, in_order
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace.recorder import (
    ProjectFunction,
    Recorder,
    StepFunction,
    own_gradients_refused,
    recorded,
    tensor_without_data,
)
from unfading.fuse.trace.values import EXAMPLES, Example, Kernels, Opaque, RowValue
from unfading.source_lines import definition_line

ops = torch.ops.aten
PIXEL = (1, 1)  # the frame on which a step is recorded
SIZES_KEPT = "a convolution in a compiled step has stride 1 and a border that keeps the size of its frames"


class FrameRecorder(Recorder):
    """A recorder that takes convolutions. Result j is input `first + j` of the values.

    Args:
        first: the number of inputs and states.
    """

    def __init__(self, builder: Builder, dtype: torch.dtype, example: Example, first: int, *, lenient: bool = False):
        super().__init__(builder, dtype, example, lenient=lenient)
        self.first = first
        self.convolutions: list[RecordedConvolution] = []

    def frame(self, leaf: Value, *lead: int) -> Tensor:
        """A tensor of one pixel that stands for a value of all channels."""
        return self.rows(self.builder.reshape(leaf, (*leaf.shape, *PIXEL)), *lead)

    def weight(self, index: int, shape: tuple[int, ...]) -> Tensor:
        if len(shape) != 4:
            return super().weight(index, shape)
        self.columns.append(shape[-1])
        return self.name(tensor_without_data(shape, self.dtype), Kernels(index, 0, shape[0]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is ops.convolution:
            return self._convolution(func, args)
        kernels = self.value(args[0]) if args and isinstance(args[0], Tensor) else None
        if isinstance(kernels, Kernels) and packet in (ops.split, ops.split_with_sizes) and _axis(args, kwargs) == 0:
            out = func(*args, **(kwargs or {}))
            row = kernels.r0
            for part in out:
                self.name(part, kernels._replace(r0=row, r1=row + len(part)))
                row += len(part)
            return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _convolution(self, func: Any, args: Sequence[Any]) -> Tensor:
        v, weight, bias, stride, padding, dilation, transposed, _, groups = args
        reason = self._unsupported(func, [each for each in (v, weight, bias) if each is not None])
        row, kernels = self.value(v), self.value(weight)
        shape = tuple(weight.shape)
        if reason is None and not isinstance(kernels, Kernels):
            reason = "the kernels of a convolution are not a weight as weights() returns it; compute them there, once per call"
        if reason is None and (not isinstance(row, RowValue) or row.lead != 1 or row.value.shape != (v.shape[1], *PIXEL)):
            reason = f"a convolution reads {self._shape(v)}; a compiled step has convolutions of [B, channels, height, width]"
        border = [(k - 1) * d for k, d in zip(shape[2:], dilation, strict=False)]
        same_size = [2 * p for p in padding] == border and all(s == 1 for s in stride) and not transposed
        if reason is None and (len(shape) != 4 or not same_size):
            reason = SIZES_KEPT
        if reason is None and not torch.is_grad_enabled():
            reason = "a convolution runs without its gradient; detach the kernels in weights(), once per call"
        out = v.new_empty((v.shape[0], shape[0], *PIXEL))
        if reason is not None:
            return self.name(out, self._opaque(reason))
        assert isinstance(row, RowValue)
        assert isinstance(kernels, Kernels)
        value = self.builder.reshape(row.value, (v.shape[1],))
        convolution = FrameConvolution(
            ConvolutionSource(TensorKind.INPUT, 0),
            kernels.index,
            kernels.r0,
            kernels.r1,
            shape[2:],
            tuple(dilation),
            groups,
            v.shape[1],
        )
        self.convolutions.append(RecordedConvolution(value, convolution))
        leaf = self.builder.leaf(TensorKind.INPUT, self.first + len(self.convolutions) - 1, 0, shape[0])
        result = self.builder.reshape(leaf, (shape[0], *PIXEL))
        if bias is not None:
            of_bias = self.value(bias)
            assert isinstance(of_bias, RowValue)
            result = self.builder.map(Op.ADD, result, self.builder.reshape(of_bias.value, (shape[0], *PIXEL)))
        return self.name(out, RowValue(result, 1))


def trace_frames(
    step: StepFunction,
    inputs: Sequence[int],
    states: Sequence[int],
    weights: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    project: ProjectFunction | None = None,
    step_weights: int | None = None,
) -> FrameProgram:
    """The program of a step, with its projection if that is given.

    Args:
        inputs: channels of each input: of the fields that the projection returns, or of x alone with a projection.
        states: channels of each part of the state.
        weights: shapes; those that the step reads come first, then the parameters of `project`.
        step_weights: how many the step reads.
    """

    def program(example: Example) -> FrameProgram:
        builder = Builder()
        recorder = FrameRecorder(builder, dtype, example, len(inputs) + len(states), lenient=project is not None)
        leaves = [builder.leaf(TensorKind.INPUT, i, 0, n) for i, n in enumerate((*inputs, *states))]
        named = [recorder.weight(i, shape) for i, shape in enumerate(weights)]
        own = len(named) if step_weights is None else step_weights
        if project is None:
            rows = [recorder.frame(leaf, example.batch) for leaf in leaves[: len(inputs)]]
        else:
            rows = _projected(recorder, project, leaves[0], named[own:], example)
            recorder.lenient = False  # for the step
        parts = [recorder.frame(leaf, example.batch) for leaf in leaves[len(inputs) :]]
        outputs = recorded(recorder, lambda: step(rows, parts, named[:own]))
        own_gradients_refused(outputs)
        if any(tensor._backward_hooks for tensor, _ in recorder.values.values()):
            reason = "the step registers a hook on a gradient, which a compiled step would not call"
            raise NotFusable(reason, definition_line(step))
        stores: list[Store] = []
        pixel = Pixel()
        for i, (output, width) in enumerate(zip(outputs, states, strict=True)):
            row = recorder.value(output) if isinstance(output, Tensor) else None
            shape = (example.batch, width, *PIXEL)
            if not isinstance(row, RowValue) or output.shape != shape or output.dtype != dtype:
                reason = f"the step must return its states as tensors {dtype} [B, {width}, height, width]; part {i} is "
                raise NotFusable(reason + recorder.kind(output), definition_line(step))
            stores += pieces(TensorKind.NEXT, i, pixel(builder.expand(row.value, (width, *PIXEL))))
        convolutions = [RecordedConvolution(pixel(value), each) for value, each in recorder.convolutions]
        result = cut(stores, convolutions, [*inputs, *states], len(inputs), tuple(weights))
        for stage in result.stages:
            check_pixelwise([store.value for store in stage.program.stores])
        return result

    try:
        first, *others = [program(example) for example in EXAMPLES]
    except NotFusable as error:
        if error.refusal.line is not None:
            raise
        raise NotFusable(error.refusal.reason, definition_line(step)) from error
    if any(str(other) != str(first) for other in others):
        reason = "the step computes with the batch size, the number of steps or the index of a step; a compiled step does not"
        raise NotFusable(reason, definition_line(step))
    return first


def _projected(
    recorder: FrameRecorder, project: ProjectFunction, x: Value, parameters: Sequence[Tensor], example: Example
) -> list[Tensor]:
    """The fields of the projection at one step."""
    fields = recorded(recorder, lambda: project(recorder.frame(x, example.time, example.batch), example.start, parameters))
    own_gradients_refused(fields)
    rows = []
    for field in fields:
        row = recorder.value(field)
        if not isinstance(row, RowValue) or field.shape[:2] != (example.time, example.batch) or field.dim() != 5:
            reason = row.reason if isinstance(row, Opaque) else "project uses operations that a fused step does not have"
            raise NotFusable(reason)
        rows.append(recorder.rows(row.value, example.batch))
    return rows


class Pixel:
    """Values without the two axes of the frame, which have size 1."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.values: dict[int, Value] = {}

    def __call__(self, root: Value) -> Value:
        for value in in_order([root]):
            if value.id not in self.values:
                self.values[value.id] = self._of(value, [self.values[arg.id] for arg in value.args])
        return self.values[root.id]

    def _of(self, value: Value, args: list[Value]) -> Value:
        b, axes = self.builder, len(value.shape) - 2
        if value.op is Op.LEAF:
            return b.leaf(*value.leaf)
        if value.op in NUMBERS:
            return b.const(value.number) if value.op is Op.CONST else b.zero(())
        if value.op in ELEMENTWISE:
            return b.map(value.op, *args, attr=value.number if value.op is Op.POWER else None)
        if value.op in (Op.EXPAND, Op.RESHAPE):
            shape = _without_pixel(value)
            return b.expand(args[0], shape) if value.op is Op.EXPAND else b.reshape(args[0], shape)
        if len(value.shape) == 1 and value.op is not Op.DOT:  # of channels alone, as a convolution reads them
            return b.rebuilt(value, args)
        moved = {value.slice.axis} if value.op is Op.SLICE else {value.axis} if value.op is Op.CAT else set(value.axes)
        if value.op is Op.PERMUTE:
            moved = {i for i, axis in enumerate(value.axes) if i != axis}
        if value.op is Op.DOT or any(axis >= axes for axis in moved) or value.shape[-2:] != PIXEL:
            reason = f"{value.op} computes with the axes of a frame"
            raise NotFusable(f"{reason}; beside its convolutions a compiled step computes each pixel alone")
        return b.permute(args[0], value.axes[:-2]) if value.op is Op.PERMUTE else b.rebuilt(value, args)


def _without_pixel(value: Value) -> Shape:
    shape = value.shape
    if shape == () or math.prod(shape) == 1:
        return shape[:-2] if len(shape) > 2 else (1,) if shape else ()
    if shape[-2:] == PIXEL:
        return shape[:-2]
    if len(shape) == 1:  # a value of all channels, as a convolution reads it
        return shape
    raise NotFusable(f"a value of shape {list(shape)} has other axes than channels, height and width")


def check_pixelwise(roots: Sequence[Value]) -> None:
    """Raise NotFusable unless these values are elementwise functions of channels."""
    for value in in_order(roots):
        allowed = value.op in ELEMENTWISE or value.op in NUMBERS or value.op is Op.LEAF
        if not allowed and not (value.op is Op.EXPAND and value.args[0].size == 1):
            raise NotFusable(f"{value.op} over channels is not compiled in a step with convolutions")


def _axis(args: Sequence[Any], kwargs: Any) -> int:
    return int(args[2] if len(args) > 2 else (kwargs or {}).get("dim", 0))
