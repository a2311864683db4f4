"""The fused implementation of the loop over time: as `scan`, through the compiled kernel."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.fuse.compiler import NoCompiler
from unfading.fuse.inference import Inference, can_be_cut, outputs_in_pieces, steps_of_a_piece
from unfading.fuse.operator import Loop
from unfading.fuse.plan import Plan, flatten, kernel, plan, with_dense
from unfading.fuse.program import NotFusable
from unfading.scan import check_inputs
from unfading.traced import traced


def fused(
    cell: Cell, inputs: Any, state: Any, weights: Any, *, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """As `scan`, with the same arguments and results, for a cell that `refusal` lets pass."""
    found = _plan(cell)
    if isinstance(found, str):
        raise NotFusable(found)
    weights = with_dense(weights, found.dense)
    if torch.compiler.is_compiling():
        leaves = _pytree.tree_leaves(inputs)
        tensors = [*leaves, *state, *_pytree.tree_leaves(weights)]
        sizes = (len(leaves), len(state))
    else:
        tensors = []
        structure = flatten(inputs, tensors)
        sizes = (len(tensors), len(state))
        tensors += state
        if (structure, flatten(weights, tensors)) != (found.inputs, found.weights):
            raise TypeError(f"{type(cell).__name__}.project or weights gives other parts than at the call before.")
        _check(cell, inputs, tensors, sizes, found)
    keep = torch.is_grad_enabled() and (traced() or any(tensor.requires_grad for tensor in tensors))
    made = Loop.apply(found.key, sizes, lengths, reverse, keep, *tensors)
    n = len(state)
    return type(state)(*made[:n]), type(state)(*made[n : 2 * n])


def fused_outputs(
    cell: Cell, x: Tensor, state: Any, weights: Any, *, lengths: Tensor | None, reverse: bool, start: int
) -> tuple[Tensor, Any] | None:
    """`cell.output` of every step and the final state, without a gradient and in pieces of time; None where one is enough."""
    found = plan(cell)
    if isinstance(found, str) or not can_be_cut(cell, lengths=lengths, reverse=reverse):
        return None
    steps = steps_of_a_piece(found, x.shape[1])
    if len(x) <= steps:
        return None
    inference = Inference(kernel(found.key, found.signature.dtype), found, weights)
    return outputs_in_pieces(inference, cell, x, state, steps=steps, lengths=lengths, reverse=reverse, start=start)


def refusal(cell: Cell) -> str | None:
    """In words why a cell does not run fused at this moment; None where it does."""
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, and a C kernel computes in one precision"
    if not torch.compiler.is_compiling() and _forward_mode():
        return "a forward-mode derivative is being taken, which only the reference loop has"
    return _compiled(id(cell)) if torch.compiler.is_compiling() else _no_kernel(cell)


def _no_kernel(cell: Cell) -> str | None:
    found = plan(cell)
    if isinstance(found, str):
        return found
    try:
        kernel(found.key, found.signature.dtype)
    except NoCompiler as error:
        return str(error)
    return None


def _plan(cell: Cell) -> Plan | str:
    return _constant_plan(id(cell)) if torch.compiler.is_compiling() else plan(cell)


# torch.compile runs these two once, when it traces, and writes down what they return. It hands over no modules, but
# numbers: the cell is alive while it is traced, so its id is as good as itself.


@torch.compiler.assume_constant_result
def _constant_plan(identity: int) -> Plan | str:
    return plan(ctypes.cast(identity, ctypes.py_object).value)


@torch.compiler.assume_constant_result
def _compiled(identity: int) -> str | None:
    return _no_kernel(ctypes.cast(identity, ctypes.py_object).value)


def _check(cell: Cell, inputs: Any, tensors: list[Tensor], sizes: tuple[int, int], found: Plan) -> None:
    """A kernel reads memory by the plan's sizes: what comes must have them, and lie where it says."""
    signature = found.signature
    n_inputs, n_states = sizes
    B = tensors[n_inputs].shape[0]
    T = None
    shapes = []
    for width, kind, tensor in zip(signature.inputs, signature.kinds, tensors, strict=False):
        if kind != "constant" and T is None:
            T = tensor.shape[0]
        shapes.append((1, B, width) if kind == "constant" else (T, 1, width) if kind == "shared" else (T, B, width))
    shapes += [(B, width) for width in signature.states]
    shapes += signature.weights
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor.shape != shape:
            check_inputs(cell, inputs, batch=B)
            raise ValueError(f"{type(cell).__name__}: a fused step was compiled for {list(shape)}; got {list(tensor.shape)}.")
        if tensor.dtype != signature.dtype or tensor.device.type != "cpu":
            raise TypeError(
                f"{type(cell).__name__}: a fused step was compiled for {signature.dtype} on the CPU; got {tensor.dtype} on "
                f"{tensor.device}."
            )


def _forward_mode() -> bool:
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)
