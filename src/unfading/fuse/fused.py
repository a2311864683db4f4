"""The fused implementation of the loop over time: as `scan`, through the compiled kernel."""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

from unfading.cells.base import Cell
from unfading.fuse.bind import check, gather_inputs, gather_weights
from unfading.fuse.c.compiler import NoCompiler
from unfading.fuse.devices import halves, place_of
from unfading.fuse.inference import Inference
from unfading.fuse.operator import Loop
from unfading.fuse.plan import Plan, kernel, plan, plan_or_raise
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.triton.probe import triton_trouble
from unfading.fuse.triton.source import NoTriton
from unfading.reference import reference
from unfading.torch_state import traced

T = TypeVar("T")


def fused(
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
    """As `scan.reference`, with the same arguments and results, for a cell that `refusal` lets pass."""
    found = _constant_plan(id(cell), _training(cell)) if torch.compiler.is_compiling() else plan_or_raise(cell)
    dots = halves(x.device.type)
    inputs = gather_inputs(found, cell, x, start, constants)
    with torch.autocast(x.device.type, enabled=False) if dots else nullcontext():
        inputs = [leaf.to(found.signature.dtype) for leaf in inputs] if dots else inputs
        tensors = [*inputs, *state, *gather_weights(found, cell, weights)]
    if not torch.compiler.is_compiling() and any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
        # Such a tensor has no memory of its own that a kernel could read.
        return reference(cell, x, state, weights, lengths=lengths, reverse=reverse, start=start, constants=constants)
    if torch.compiler.is_compiling():
        tensors = [tensor.view_as(tensor) for tensor in tensors]  # torch.compile takes no tensor twice
    else:
        check(found, cell, tensors)
    keep = torch.is_grad_enabled() and (traced() or any(tensor.requires_grad for tensor in tensors))
    sizes = (len(inputs), len(state), len(tensors) - len(inputs) - len(state), 0, dots)
    if keep or traced():
        made = Loop.apply(found.key, sizes, lengths, reverse, keep, *tensors)
    else:
        made = Loop.forward(found.key, sizes, lengths, reverse, False, *tensors)
    n = len(state)
    return type(state)(*made[:n]), type(state)(*made[n : 2 * n])


def fused_outputs(
    cell: Cell, x: Tensor, state: Any, weights: Any, *, lengths: Tensor | None, reverse: bool, start: int
) -> tuple[Tensor, Any] | None:
    """`cell.output` of every step and the final state, without a gradient, for a cell that `refusal` lets pass.

    None where a tensor has no memory of its own that a kernel could read, and on a GPU, where nothing is gained by it.
    """
    found = plan_or_raise(cell)
    if found.place != "c":
        return None
    inference = Inference(found, cell, weights)
    if any(is_traceable_wrapper_subclass(tensor) for tensor in (x, *state, *inference.weights)):
        return None
    return inference.outputs(x, state, lengths=lengths, reverse=reverse, start=start)


def refusal(cell: Cell) -> str | None:
    """In words why a cell does not run fused at this moment; None where it does."""
    device = _device(cell)
    if torch.is_autocast_enabled(device.type) and place_of(device) != "triton":
        return "autocast is on, and a kernel for the CPU computes in one precision"
    if not torch.compiler.is_compiling() and _forward_mode():
        return "a forward-mode derivative is being taken, which only the reference loop has"
    if torch.compiler.is_compiling():
        return _compiled(id(cell), _training(cell))
    if torch._C._is_tracing() or _get_current_dispatch_mode_stack():
        return "something is recording the operations of torch, and would not see those of a kernel"
    return _no_kernel(cell)


def _no_kernel(cell: Cell) -> str | None:
    found = plan(cell)
    if isinstance(found, Refusal):
        return str(found)
    try:
        if found.place == "triton":
            return triton_trouble(found, cell)
        kernel(found.key, found.signature.dtype)
    except (NoCompiler, NoTriton, NotFusable, RecursionError) as error:
        return str(error)
    return None


def _device(cell: Cell) -> torch.device:
    parameter = next(cell.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _training(cell: Cell) -> tuple[bool, ...]:
    """Read where torch.compile sees it, so that it compiles anew when a module changes between training and evaluation."""
    return tuple(module.training for module in cell.modules())


# torch.compile runs these two once, when it traces, and writes down what they return. It hands over no modules, but
# numbers: the cell is alive while it is traced, so its id is as good as itself.


def _constant(function: Callable[..., T]) -> Callable[..., T]:
    """As torch.compiler.assume_constant_result, which would load the compiler of torch with the library: two seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _constant_plan(identity: int, training: tuple[bool, ...]) -> Plan:
    return plan_or_raise(ctypes.cast(identity, ctypes.py_object).value)


@_constant
def _compiled(identity: int, training: tuple[bool, ...]) -> str | None:
    return _no_kernel(ctypes.cast(identity, ctypes.py_object).value)


def _forward_mode() -> bool:
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)
