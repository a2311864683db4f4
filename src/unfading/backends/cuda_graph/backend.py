"""backend="graph": the reference loop, recorded once per kind of call as CUDA graphs and played from then on.

For what no kernel takes: large matrices, float64, operations that the compiler does not know. The host then launches a piece
of the sequence where it launched each operation of each step. `pieces` has the equations, `capture` the recording. The
projection runs outside, once over all time, and so does the turning round of a reversed sequence. The backward pass needs what
`project` gave and the states at the ends of pieces. A second derivative is the reference loop's own.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

from unfading.backends.cuda_graph import capture
from unfading.backends.cuda_graph.capture import NotGraphable, NotNow, Watch
from unfading.backends.cuda_graph.chunks import Gradients, Kind, Loop, Parts, gradients
from unfading.cells.base import Cell
from unfading.errors import cannot_run
from unfading.fuse.trace.staleness import Options
from unfading.lengths import flip
from unfading.reference import check_inputs, leaf_names, projected, scan
from unfading.source_lines import first_line
from unfading.torch_state import traced

# Kinds of call whose recordings a cell keeps: a batch size, a precision, training or not are of another kind each.
KEPT = 8
# Kinds that are recorded where nobody asked for graphs by name; a cell that has met more seems never to meet one twice.
MOST = 32


def graph(
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    *,
    lengths: Tensor | None = None,
    reverse: bool = False,
    start: int = 0,
    constants: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """As `scan.reference`, with the same arguments and results, for a step that can be recorded."""
    try:
        return _graphed(cell, projected(cell, x, start, constants), state, weights, lengths, reverse)
    except NotGraphable as error:
        raise RuntimeError(cannot_run(cell, "as CUDA graphs", str(error))) from error


def graph_or_scan(
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    *,
    lengths: Tensor | None = None,
    reverse: bool = False,
    start: int = 0,
    constants: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Any, Any]:
    """As `graph`, and by the reference loop where recording fails, over what is projected already: no noise is drawn twice."""
    inputs = projected(cell, x, start, constants)
    try:
        return _graphed(cell, inputs, state, weights, lengths, reverse, most=MOST)
    except NotGraphable:
        return scan(cell, inputs, state, weights, lengths=lengths, reverse=reverse)


def graph_refusal(cell: Cell) -> str | None:
    """In words why a cell does not run as CUDA graphs at this moment; None where it does, as far as is known yet."""
    if traced():
        return "torch.compile or a transform of torch.func is at work, and nothing can be recorded through it"
    parameter = next(cell.parameters(), None)
    device = cell.initial_state(1)[0].device if parameter is None else parameter.device
    if device.type != capture.Captured.kind:
        return f"a CUDA graph needs a GPU, and the cell is on {device}"
    if torch.autograd.forward_ad._current_level >= 0:
        return "a forward-mode derivative is being taken, which only the reference loop has"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on, which looks at every value"
    if torch._C._is_tracing() or _get_current_dispatch_mode_stack():
        return "something is recording the operations of torch, and would not see those of a graph"
    if capture.Captured.under_way():
        return "a CUDA graph is being recorded just now, and holds no other"
    return _of(cell).reason


def unrecordable(cell: Cell) -> str | None:
    """In words what in a cell's step no recording can hold, found on two rows wherever the cell is; None for nothing."""
    state = cell.initial_state(2)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # masks are drawn in project
        example = (cell.project(state[0].new_zeros(1, 2, cell.input_size)), state, cell.weights())
    # Copies: a parameter that the step reads by itself is no argument.
    arguments = _pytree.tree_map_only(Tensor, torch.clone, example)
    try:
        with Watch(_pytree.tree_leaves(arguments)), torch.no_grad():
            scan(cell, *arguments)
    except NotGraphable as error:
        return str(error)
    return None


class Known:
    """What is known of a cell as it stands: its recordings, or why there are none."""

    def __init__(self, cell: Cell):
        self.options = Options(cell)
        self.reason: str | None = None
        self.recorded = 0
        self.loops: OrderedDict[Kind, Loop] = OrderedDict()

    def loop(self, cell: Cell, kind: Kind, T: int, most: float) -> Loop:
        """The recordings for a call; NotGraphable where there can be none, which is remembered if it is the step's fault."""
        if self.reason is not None:
            raise NotGraphable(self.reason)
        try:
            loop = self.loops.pop(kind, None)
            if loop is None:
                if self.recorded >= most:
                    raise NotNow(f"{most} kinds of call have been recorded, and this is yet another")
                self.recorded += 1
                loop = Loop(cell, kind)
            self.loops[kind] = loop  # the last that was used
            if len(self.loops) > KEPT:
                self.loops.popitem(last=False)
            loop.record(cell, T)
        except NotNow:
            raise
        except (NotGraphable, torch.OutOfMemoryError) as error:
            self.reason = first_line(error)
            self.loops.clear()
            raise NotGraphable(self.reason) from error
        return loop


# Per cell, for training and for evaluation; gone with the cell, as nothing here holds on to it.
_known: "WeakKeyDictionary[Cell, dict[tuple[bool, ...], Known]]" = WeakKeyDictionary()


def _of(cell: Cell) -> Known:
    known = _known.setdefault(cell, {})
    training = tuple(module.training for module in cell.modules())
    if training not in known or not known[training].options.still_holds():
        known[training] = Known(cell)
    return known[training]


def _graphed(
    cell: Cell, inputs: Any, state: Any, weights: Any, lengths: Tensor | None, reverse: bool, most: float = math.inf
) -> tuple[Any, Any]:
    T = check_inputs(cell, inputs, batch=state[0].shape[0])
    parts, kind = _sorted(cell, inputs, state, weights, lengths, reverse)
    loop = _of(cell).loop(cell, kind, T, most)
    n, flat = len(state), [each for group in parts for each in group]
    if kind.differentiable:
        made = Graphed.apply(loop, cell, T, lengths, *flat)
    else:
        trajectory, final, _ = loop.forward(parts, lengths, T)
        made = (*trajectory, *final)
    trajectory = [flip(part, lengths) for part in made[:n]] if reverse else made[:n]
    return type(state)(*trajectory), type(state)(*made[n:])


def _sorted(cell: Cell, inputs: Any, state: Any, weights: Any, lengths: Tensor | None, reverse: bool) -> tuple[Parts, Kind]:
    """The tensors of a call in processing order, and the kind of call it is."""
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
        turned = reverse and is_timed[-1] and name not in cell.shared
        (parts.timed if is_timed[-1] else parts.whole).append(flip(leaf, lengths) if turned else leaf)
    parts.whole.extend(weight_leaves)
    is_timed += [False] * len(weight_leaves)
    matmul = torch.backends.cuda.matmul
    shapes = ([each.shape[1:] for each in parts.timed], *([each.shape for each in group] for group in parts[1:]))
    kind = Kind(
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
            torch.are_deterministic_algorithms_enabled(),
        ),
    )
    return parts, kind


class Graphed(torch.autograd.Function):
    """A sequence by recordings, both ways."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, cell: Cell, T: int, lengths: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
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
        loop: Loop = ctx.loop
        if torch.is_grad_enabled():  # a second derivative is asked for
            found = _twice(loop.kind, ctx.cell, _grouped(loop, tensors), lengths, d_outputs)
        else:
            found = loop.backward(list(d_outputs), _grouped(loop, tensors), lengths, borders, ctx.T)
        return (None,) * 4 + tuple(each for group in found for each in group)


def _twice(
    kind: Kind, cell: Cell, parts: Parts, lengths: Tensor | None, d_outputs: tuple[Tensor | None, ...]
) -> tuple[Gradients, Gradients, Gradients]:
    """The gradient as a function with a gradient: through the reference loop."""
    # New nodes, so that it goes back to the arguments and not past them.
    parts = Parts(*([each.view_as(each) for each in group] for group in parts))
    return gradients(kind.scan(cell, parts, lengths), d_outputs, parts, create_graph=True)


def _grouped(loop: Loop, tensors: Any) -> Parts:
    timed, whole, _ = (len(group) for group in loop.kind.shapes)
    return Parts(list(tensors[:timed]), list(tensors[timed : timed + whole]), list(tensors[timed + whole :]))
