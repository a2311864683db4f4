"""backend="graph": the reference loop, recorded once per kind of call as CUDA graphs and replayed from then on.

It serves cells that no kernel accepts: large matrices, float64, operations that the compiler does not know. The host launches
a chunk of the sequence at a time, instead of each operation of each step. `chunks` has the equations, `capture` the recording.
The projection runs outside, once over all time, and so does the reversal of a reversed sequence. The backward pass needs the
result of `project` and the states between chunks. A second derivative is that of the reference loop.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

from unfading.backends.cuda_graph import capture
from unfading.backends.cuda_graph.capture import NotGraphable, NotNow, Watch
from unfading.backends.cuda_graph.chunks import CallKind, Gradients, Parts, RecordedLoop, gradients
from unfading.cells.base import Cell, in_frame
from unfading.errors import cannot_run
from unfading.fuse.contents import Contents
from unfading.fuse.plan import FramePlan
from unfading.lengths import flip
from unfading.loop_options import LoopOptions
from unfading.reference import check_inputs, leaf_names, reference, scan
from unfading.source_lines import first_line
from unfading.torch_state import traced

# Kinds of call whose recordings a cell stores. Each batch size, precision and training mode is a kind of its own.
STORED = 8
# Kinds of call that backend="auto" records. A cell that has met more seems never to meet one twice.
MOST = 32
# The largest inputs of one recording of a compiled step with convolutions, in bytes. The kernels of larger calls take longer
# than their launches, and the recordings of all layers would fill the memory of a GPU.
LARGEST_INPUTS = 1 << 30


def graph(
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    options: LoopOptions = LoopOptions(),
    *,
    inputs: Any = None,
) -> tuple[Any, Any]:
    """As `reference`, with the same arguments and results, for a step that can be recorded."""
    try:
        return _graphed(cell, cell.project(x, options.start) if inputs is None else inputs, state, weights, options)
    except NotGraphable as error:
        raise RuntimeError(cannot_run(cell, "as CUDA graphs", str(error))) from error


def graph_if_possible(
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    options: LoopOptions = LoopOptions(),
    *,
    inputs: Any = None,
    otherwise: Callable[..., tuple[Any, Any]] = reference,
    plan: FramePlan | None = None,
) -> tuple[Any, Any]:
    """As `graph`, and by another backend where recording fails. Both use one projection, so no noise is drawn twice.

    Args:
        otherwise: the other backend.
        plan: of a convolutional cell whose compiled step is recorded, in the place of the reference loop.
    """
    inputs = cell.project(x, options.start) if inputs is None else inputs
    try:
        return _graphed(cell, inputs, state, weights, options, most=MOST, plan=plan)
    except NotGraphable:
        return otherwise(cell, x, state, weights, options, inputs=inputs)


def graph_refusal(cell: Cell) -> str | None:
    """The reason why a cell does not run as CUDA graphs at this moment; None if none is known."""
    if traced():
        return "torch.compile or a transform of torch.func is active, and nothing can be recorded through it"
    parameter = next(cell.parameters(), None)
    device = cell.initial_state(1)[0].device if parameter is None else parameter.device
    if device.type != capture.CapturedGraph.kind:
        return f"a CUDA graph needs a GPU, and the cell is on {device}"
    if torch.autograd.forward_ad._current_level >= 0:
        return "a forward-mode derivative is being computed, which only the reference loop supports"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on, which checks every value"
    if torch._C._is_tracing() or _get_current_dispatch_mode_stack():
        return "a dispatch mode or a tracer is recording the operations of torch, and would not see those inside a graph"
    if capture.CapturedGraph.under_way():
        return "a CUDA graph is being recorded just now, and cannot contain another"
    return _of(cell).reason


def unrecordable(cell: Cell) -> str | None:
    """The reason why a cell's step cannot be recorded, from a run over two rows on the cell's device; None if it can be."""
    state = in_frame(cell.initial_state(2), cell.state_frame(cell.example_frame))
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # project may draw masks
        example = (cell.project(state[0].new_zeros(1, 2, cell.input_size, *cell.example_frame)), state, cell.weights())
    # Copies, so that a parameter which the step reads by itself is no argument.
    arguments = _pytree.tree_map_only(Tensor, torch.clone, example)
    try:
        with Watch(_pytree.tree_leaves(arguments)), torch.no_grad():
            scan(cell, *arguments)
    except NotGraphable as error:
        return str(error)
    return None


class CellRecordings:
    """The recordings of a cell with its present options, or the reason why there are none."""

    def __init__(self, cell: Cell):
        self.contents = Contents(cell).for_comparison()
        self.reason: str | None = None
        self.recorded = 0
        self.loops: OrderedDict[CallKind, RecordedLoop] = OrderedDict()

    def loop(self, cell: Cell, kind: CallKind, T: int, most: float) -> RecordedLoop:
        """The recordings for a call. Raises NotGraphable where there are none; a reason that lies in the step is stored."""
        if self.reason is not None:
            raise NotGraphable(self.reason)
        try:
            loop = self.loops.pop(kind, None)
            if loop is None:
                if self.recorded >= most:
                    raise NotNow(f"{most} kinds of call have been recorded already, and this is a new one")
                self.recorded += 1
                loop = RecordedLoop(cell, kind)
            self.loops[kind] = loop  # now the most recently used
            if len(self.loops) > STORED:
                self.loops.popitem(last=False)
            loop.record(cell, T)
        except NotNow:
            raise
        except (NotGraphable, torch.OutOfMemoryError) as error:
            self.reason = first_line(error)
            self.loops.clear()
            raise NotGraphable(self.reason) from error
        return loop


# For each cell, by training flags. Entries disappear with their cell.
_recordings: "WeakKeyDictionary[Cell, dict[tuple[bool, ...], CellRecordings]]" = WeakKeyDictionary()


def forget(cell: Cell) -> None:
    """Release the recordings of a cell and their memory."""
    _recordings.pop(cell, None)


def _of(cell: Cell) -> CellRecordings:
    recordings = _recordings.setdefault(cell, {})
    training = tuple(module.training for module in cell.modules())
    if training not in recordings or not recordings[training].contents.unchanged():
        recordings[training] = CellRecordings(cell)
    return recordings[training]


def _graphed(
    cell: Cell,
    inputs: Any,
    state: Any,
    weights: Any,
    options: LoopOptions,
    most: float = math.inf,
    plan: FramePlan | None = None,
) -> tuple[Any, Any]:
    lengths, reverse = options[:2]
    T = check_inputs(cell, inputs, batch=state[0].shape[0])
    parts, kind = _sorted(cell, inputs, state, weights, lengths, reverse)
    kind = kind._replace(plan=plan)
    if plan is not None and kind.input_bytes > LARGEST_INPUTS:
        raise NotNow("its inputs are so large that the kernels take longer than their launches")
    loop = _of(cell).loop(cell, kind, T, most)
    n, flat = len(state), [each for group in parts for each in group]
    if kind.differentiable:
        results = GraphedLoop.apply(loop, cell, T, lengths, *flat)
    else:
        trajectory, final, _ = loop.forward(parts, lengths, T)
        results = (*trajectory, *final)
    trajectory = [flip(part, lengths) for part in results[:n]] if reverse else results[:n]
    return type(state)(*trajectory), type(state)(*results[n:])


def _sorted(cell: Cell, inputs: Any, state: Any, weights: Any, lengths: Tensor | None, reverse: bool) -> tuple[Parts, CallKind]:
    """The tensors of a call in the order of processing, and its kind."""
    leaves, inputs_tree = _pytree.tree_flatten(inputs)
    weight_leaves, weights_tree = _pytree.tree_flatten(weights)
    device, tracking = state[0].device, torch.is_grad_enabled()
    for tensor in (*leaves, *weight_leaves, *state):
        if is_traceable_wrapper_subclass(tensor) or tensor.device != device:
            raise NotNow(
                f"a recording takes plain tensors on one device, {device}; got {type(tensor).__name__} on {tensor.device}"
            )
    parts, is_timed = Parts([], [], [*state]), []
    for name, leaf in zip(leaf_names(inputs), leaves, strict=True):
        is_timed.append(name not in cell.constant)
        flipped = reverse and is_timed[-1] and name not in cell.shared
        (parts.timed if is_timed[-1] else parts.whole).append(flip(leaf, lengths) if flipped else leaf)
    parts.whole.extend(weight_leaves)
    is_timed += [False] * len(weight_leaves)
    matmul = torch.backends.cuda.matmul
    shapes = ([each.shape[1:] for each in parts.timed], *([each.shape for each in group] for group in parts[1:]))
    kind = CallKind(
        inputs_tree,
        weights_tree,
        type(state),
        tuple(is_timed),
        tuple(map(tuple, shapes)),
        tuple(tuple(each.dtype for each in group) for group in parts),
        tuple(tuple(tracking and each.requires_grad for each in group) for group in parts),
        device,
        lengths is not None,
        (torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)),
        (
            matmul.fp32_precision,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
            torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
            torch.are_deterministic_algorithms_enabled(),
        ),
    )
    return parts, kind


class GraphedLoop(torch.autograd.Function):
    """A sequence run by recordings, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, loop: RecordedLoop, cell: Cell, T: int, lengths: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.loop, ctx.cell, ctx.T = loop, cell, T
        ctx.set_materialize_grads(False)
        trajectory, final, borders = loop.forward(_grouped(loop, tensors), lengths, T)
        ctx.save_for_backward(lengths, *tensors, *borders)
        return (*trajectory, *final)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        lengths, *tensors = ctx.saved_tensors
        n = len(d_outputs) // 2
        tensors, borders = tensors[:-n], tensors[-n:]
        loop: RecordedLoop = ctx.loop
        if torch.is_grad_enabled():  # a second derivative is wanted
            results = _twice(loop.kind, ctx.cell, _grouped(loop, tensors), lengths, d_outputs)
        else:
            results = loop.backward(list(d_outputs), _grouped(loop, tensors), lengths, borders, ctx.T)
        return (None,) * 4 + tuple(each for group in results for each in group)


def _twice(
    kind: CallKind, cell: Cell, parts: Parts, lengths: Tensor | None, d_outputs: tuple[Tensor | None, ...]
) -> tuple[Gradients, Gradients, Gradients]:
    """The gradient as a differentiable function, by the reference loop."""
    # New nodes, so that the gradient stops at the arguments.
    parts = Parts(*([each.view_as(each) for each in group] for group in parts))
    return gradients(kind.scan(cell, parts, lengths), d_outputs, parts, create_graph=True)


def _grouped(loop: RecordedLoop, tensors: Any) -> Parts:
    timed, whole, _ = (len(group) for group in loop.kind.shapes)
    return Parts(list(tensors[:timed]), list(tensors[timed : timed + whole]), list(tensors[timed + whole :]))
