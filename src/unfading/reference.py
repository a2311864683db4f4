"""THE REFERENCE: the plain loop over time that every other implementation is tested against.

It is never removed and never optimised. The loop runs over `unbind(0)`, not over `x[t]`: the backward pass of a select writes a
whole tensor of zeros per step, which would make the loop quadratic in T.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.errors import cell_name, check_flag
from unfading.lengths import check_lengths, flip, zero_past
from unfading.loop_options import LoopOptions


def scan(
    cell: Cell, inputs: Any, state: Any, weights: Any, *, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `cell.step` over time; return the states after every step, each part [T, B, n], and the final state.

    Args:
        inputs: the result of `cell.project`: fields [T, B, n], or [T, 1, n] if named in `cell.shared`, or [1, B, n] if named
            in `cell.constant`.
        state: the state before the first step, each part [B, n].
        lengths: int64 [B], at most T. A row's state stays the same after its last step; the returned states past it are zeros.
        reverse: run each row from its own last step to its first. Shared fields are read in the order of processing, the
            others in the order of time; the returned states are in the order of time.
    """
    _check_arguments(cell, state, lengths, reverse)
    leaves, tree = _pytree.tree_flatten(inputs)
    T = check_inputs(cell, inputs, batch=state[0].shape[0])
    rows = []
    for name, value in zip(leaf_names(inputs), leaves, strict=True):
        if name in cell.constant:
            rows.append(value.unbind(0) * T)
        elif reverse and name not in cell.shared:
            rows.append(flip(value, lengths).unbind(0))
        else:
            rows.append(value.unbind(0))

    states = []
    for t, inputs_t in enumerate(zip(*rows, strict=True)):
        new = _checked(cell, cell.step(_pytree.tree_unflatten(inputs_t, tree), state, weights), state)
        if lengths is not None:
            new = [torch.where(as_column(t < lengths, n), n, old) for n, old in zip(new, state, strict=True)]
        state = type(state)(*new)
        states.append(state)

    trajectory = [torch.stack(part) for part in zip(*states, strict=True)]
    if reverse:
        trajectory = [flip(part, lengths) for part in trajectory]
    if lengths is not None:
        trajectory = [zero_past(part, lengths) for part in trajectory]
    return type(state)(*trajectory), state


def _check_arguments(cell: Cell, state: Any, lengths: Tensor | None, reverse: bool) -> None:
    if not callable(getattr(cell, "step", None)):
        raise TypeError(f"scan takes a cell; got {type(cell).__name__}.")
    if not hasattr(state, "_fields") or not state or not all(isinstance(part, Tensor) and part.dim() for part in state):
        raise TypeError(f"state must be a NamedTuple of tensors [B, n], as of initial_state; got {type(state).__name__}.")
    check_flag("reverse", reverse)
    if lengths is not None:
        check_lengths(lengths, state[0].shape[0])


def reference(
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    options: LoopOptions = LoopOptions(),
    *,
    inputs: Any = None,
) -> tuple[Any, Any]:
    """Project x [T, B, I] and `scan`: what every implementation computes, in the simplest form.

    Args:
        inputs: the result of `cell.project`, where the caller has it already.
    """
    if inputs is None:
        inputs = cell.project(x, options.start)
    return scan(cell, inputs, state, weights, lengths=options.lengths, reverse=options.reverse)


def projected(cell: Cell, x: Tensor, start: int, constants: Mapping[str, Tensor]) -> Any:
    """The result of `cell.project` for a chunk of a sequence, with the fields that hold for all time from `constants`."""
    inputs = cell.project(x, start)
    if not constants:
        return inputs
    leaves, tree = _pytree.tree_flatten(inputs)
    named = zip(leaf_names(inputs), leaves, strict=True)
    return _pytree.tree_unflatten([constants.get(name, value) for name, value in named], tree)


def constants_of(cell: Cell, x: Tensor, start: int) -> dict[str, Tensor]:
    """The fields that hold for all time, computed from the first step of x."""
    if not cell.constant:
        return {}
    inputs = cell.project(x[:1], start)
    named = zip(leaf_names(inputs), _pytree.tree_leaves(inputs), strict=True)
    return {name: value for name, value in named if name in cell.constant}


def leaf_names(inputs: Any, prefix: str = "") -> list[str]:
    """The names of the tensors in a NamedTuple, or in tuples nested in it: "a", "inner.eta", "masks.0"."""
    names = []
    for name, value in zip(getattr(inputs, "_fields", range(len(inputs))), inputs, strict=True):
        names += leaf_names(value, f"{prefix}{name}.") if isinstance(value, tuple) else [f"{prefix}{name}"]
    return names


def check_inputs(cell: Cell, inputs: Any, batch: int) -> int:
    """Check the result of `project` against what the cell declares; return T."""
    if not hasattr(inputs, "_fields"):
        raise TypeError(f"{cell_name(cell)}.project must return a NamedTuple of tensors; got {type(inputs).__name__}.")
    leaves = dict(zip(leaf_names(inputs), _pytree.tree_leaves(inputs), strict=True))
    for kind, declared in (("shared", cell.shared), ("constant", cell.constant)):
        for field in declared:
            if field not in leaves:
                raise ValueError(
                    f"{cell_name(cell)}.{kind} names {field!r}, which is not a field of its inputs: {', '.join(leaves)}."
                )
    # Not len(value), which must be a plain int: torch.export would fix the number of steps.
    T = next((value.shape[0] for field, value in leaves.items() if field not in cell.constant), 0)
    for field, value in leaves.items():
        wanted = (1, batch) if field in cell.constant else (T, 1) if field in cell.shared else (T, batch)
        if tuple(value.shape[:2]) != wanted:
            raise ValueError(
                f"{cell_name(cell)}.project must return {field} of shape [{wanted[0]}, {wanted[1]}, n]; got "
                f"{list(value.shape)}. Fields with one row for the whole batch are named in `shared`, with one value for all "
                "time in `constant`."
            )
    return T


def _checked(cell: Cell, new: Any, old: Any) -> Any:
    """The new state, which must have the shapes and dtypes of the old one; under autocast it is cast to them."""
    if not isinstance(new, tuple) or len(new) != len(old):
        raise TypeError(f"{cell_name(cell)}.step must return its state, {_describe(old)}; got {_describe(new)}.")
    for n, o in zip(new, old, strict=True):
        if n.shape != o.shape:
            raise ValueError(
                f"{cell_name(cell)}.step must keep the shapes of its state, {_describe(old)}; got {_describe(new)}."
            )
    if any(n.dtype != o.dtype for n, o in zip(new, old, strict=True)):
        if not torch.is_autocast_enabled(old[0].device.type):
            raise TypeError(
                f"{cell_name(cell)}.step must keep the dtypes of its state, {_describe(old)}; got {_describe(new)}."
            )
        return [n.to(o.dtype) for n, o in zip(new, old, strict=True)]
    return new


def _describe(state: Any) -> str:
    if not isinstance(state, tuple):
        return type(state).__name__
    names = getattr(state, "_fields", range(len(state)))
    return ", ".join(f"{name} {part.dtype} {list(part.shape)}" for name, part in zip(names, state, strict=True))


def as_column(mask: Tensor, like: Tensor) -> Tensor:
    """A mask [B] with axes of size 1 appended, so that it broadcasts with `like` [B, ...]."""
    return mask.reshape(-1, *[1] * (like.dim() - 1))
