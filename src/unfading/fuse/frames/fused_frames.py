"""backend="fused" for convolutional cells: bind the tensors of a cell to its program and run it."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.errors import NoKernel, cell_name
from unfading.fuse.frames.convolver import is_small
from unfading.fuse.frames.frame_kernels import FRAME_PROGRAMS
from unfading.fuse.frames.frame_loop import FrameCall, run_frames
from unfading.fuse.plan import FramePlan, target_of
from unfading.fuse.trace.tree import flatten
from unfading.lengths import flip, zero_past
from unfading.loop_options import LoopOptions
from unfading.reference import check_inputs

# On a CPU a compiled loop is faster from these on: multiply-adds of the convolutions of a step, below which the calls of
# kernels take longer than the computation; and tiles of 2 x 2 pixels over all steps, below which the transformation of the
# weights does.
LEAST_WORK = 20_000_000
LEAST_TILES = 1000


def fused_frames(
    plan: FramePlan,
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    options: LoopOptions,
    inputs: Any = None,
    *,
    if_faster: bool = False,
) -> tuple[Any, Any]:
    """As `reference`, by the present plan of a convolutional cell.

    Args:
        if_faster: raise NoKernel where the reference loop is estimated to be faster.
    """
    if if_faster and plan.target == "c" and not _is_faster(plan, len(x), state[0]):
        raise NoKernel("the reference loop is estimated to be faster for these frames")
    lengths, reverse = options[:2]
    if plan.with_project:
        trajectory, final = _run(plan, cell, [flip(x, lengths) if reverse else x], state, weights, lengths)
    else:
        inputs = cell.project(x, options.start) if inputs is None else inputs
        if reverse:
            fixed = (*cell.shared, *cell.constant)
            leaves, tree = _pytree.tree_flatten(inputs)
            named = zip(plan.names, leaves, strict=True)
            inputs = _pytree.tree_unflatten([leaf if name in fixed else flip(leaf, lengths) for name, leaf in named], tree)
        trajectory, final = scan_frames(plan, cell, inputs, state, weights, lengths=lengths)
    if reverse:
        trajectory = type(state)(*(flip(part, lengths) for part in trajectory))
    return trajectory, final


def _is_faster(plan: FramePlan, steps: int, state: Tensor) -> bool:
    """Whether a loop over these frames is faster than the reference loop, on a CPU.

    Only convolutions by Winograd's filtering are: torch's own take as long in both, or longer with channels side by side.
    """
    convolutions = FRAME_PROGRAMS[plan.key].convolutions
    B, _, height, width = state.shape
    tiles = steps * B * ((height + 1) // 2) * ((width + 1) // 2)
    work = 9 * B * height * width * sum(c.width * c.channels for c in convolutions)
    return all(map(is_small, convolutions)) and work >= LEAST_WORK and tiles >= LEAST_TILES


def scan_frames(
    plan: FramePlan, cell: Cell, inputs: Any, state: Any, weights: Any, *, lengths: Tensor | None = None
) -> tuple[Any, Any]:
    """As `scan`, by a plan without the projection."""
    check_inputs(cell, inputs, batch=state[0].shape[0])
    leaves: list[Tensor] = []
    _check(cell, flatten(inputs, leaves), plan.inputs)
    return _run(plan, cell, leaves, state, weights, lengths)


def _run(
    plan: FramePlan, cell: Cell, leaves: list[Tensor], state: Any, weights: Any, lengths: Tensor | None
) -> tuple[Any, Any]:
    """The states after every step, zeros past a row's end, and the final states."""
    device = state[0].device.type
    tensors: list[Tensor] = []
    _check(cell, flatten(weights, tensors), plan.weights)
    tensors += [attrgetter(name)(cell) for name in plan.parameters]
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        tensors = [*(leaf.to(plan.dtype) for leaf in leaves), *state, *tensors]
        T = max(len(leaf) for leaf in leaves)
        _check_tensors(plan, cell, tensors, len(leaves), T)
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        results = run_frames(FrameCall(plan.key, T, keep, precision), lengths, tensors)
    n = len(state)
    trajectory = [part if lengths is None else zero_past(part, lengths) for part in results[:n]]
    return type(state)(*trajectory), type(state)(*results[n:])


def _check(cell: Cell, got: Any, structure: Any) -> None:
    if got != structure:
        raise TypeError(
            f"{cell_name(cell)}: project or weights returns other parts than when its step was compiled; return the same "
            "parts at every call."
        )


def _check_tensors(plan: FramePlan, cell: Cell, tensors: Sequence[Tensor], inputs: int, steps: int) -> None:
    """Kernels read memory by the sizes of the program: every tensor must have them, and lie on the right device."""
    first = tensors[inputs]
    B, frame = first.shape[0], tuple(first.shape[2:])
    shapes: list[tuple[int, ...]] = [(steps, B, n, *frame) for n in plan.channels[:inputs]]
    shapes += [(B, n, *frame) for n in plan.channels[inputs:]]
    shapes += plan.shapes
    for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        fits = tensor.dtype == plan.dtype and tensor.device == first.device and target_of(tensor.device) == plan.target
        # Inputs that all steps, rows or pixels share have axes of size 1.
        broadcast = [
            n == m or (n == 1 and i < inputs and axis != 2)
            for axis, (n, m) in enumerate(zip(tensor.shape, shape, strict=False))
        ]
        if not fits or tensor.dim() != len(shape) or not all(broadcast):
            raise ValueError(
                f"{cell_name(cell)}: the fused step was compiled for {plan.dtype} {list(shape)}; got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}."
            )
