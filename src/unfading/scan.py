"""THE REFERENCE: the plain loop over time that every other implementation is tested against.

Never removed, never optimised. The loop runs over `unbind(0)`, not over `x[t]`: under autograd the backward of a select
writes a whole tensor of zeros per step, which makes the loop quadratic in T.
"""

from typing import Any

import torch
from torch import Tensor

from unfading.cells.base import Cell


def scan(
    cell: Cell, inputs: Any, state: Any, weights: Any, *, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `cell.step` over time; return the states after every step, each part [T, B, n], and the final state.

    Args:
        inputs: what `cell.project` gave: fields [T, B, n], or [T, 1, n] if named in `cell.shared`, or [1, B, n] if named
            in `cell.constant`.
        state: before the first step, each part [B, n].
        lengths: int64 [B], in 1..T. A row's state stands still after its last step; the states past it come back as zeros.
        reverse: run each row from its own last step to its first. Shared fields are read by processing step, the others
            by time; the states come back in the order of time.
    """
    rows = []
    T = next(len(value) for name, value in inputs._asdict().items() if name not in cell.constant)
    for name, value in inputs._asdict().items():
        if name in cell.constant:
            rows.append(value.unbind(0) * T)
        elif reverse and name not in cell.shared:
            rows.append(flip(value, lengths).unbind(0))
        else:
            rows.append(value.unbind(0))

    states = []
    for t, inputs_t in enumerate(zip(*rows, strict=True)):
        new = _checked(cell, cell.step(type(inputs)(*inputs_t), state, weights), state)
        if lengths is not None:
            new = [torch.where(_as_column(t < lengths, n), n, old) for n, old in zip(new, state, strict=True)]
        state = type(state)(*new)
        states.append(state)

    trajectory = [torch.stack(part) for part in zip(*states, strict=True)]
    if reverse:
        trajectory = [flip(part, lengths) for part in trajectory]
    if lengths is not None:
        trajectory = [zero_past(part, lengths) for part in trajectory]
    return type(state)(*trajectory), state


def flip(value: Tensor, lengths: Tensor | None) -> Tensor:
    """[T, B, ...] with each row's first `length` steps in reverse order, the rest in place."""
    if lengths is None:
        return value.flip(0)
    t = torch.arange(value.shape[0], device=value.device).unsqueeze(1)
    mirrored = lengths - 1 - t
    index = torch.where(mirrored < 0, t, mirrored)
    return value.gather(0, index.reshape(*index.shape, *[1] * (value.dim() - 2)).expand_as(value))


def zero_past(value: Tensor, lengths: Tensor) -> Tensor:
    """[T, B, ...] with zeros after each row's last step, whatever stood there."""
    t = torch.arange(value.shape[0], device=value.device).unsqueeze(1)
    past = t >= lengths
    return value.masked_fill(past.reshape(*past.shape, *[1] * (value.dim() - 2)), 0.0)


def _checked(cell: Cell, new: Any, old: Any) -> Any:
    """The new state, held to the shape and dtype of the old one: under autocast cast back to it, else refused."""
    name = type(cell).__name__
    if not isinstance(new, tuple) or len(new) != len(old):
        raise TypeError(f"{name}.step must return its state, {_describe(old)}; got {_describe(new)}.")
    for n, o in zip(new, old, strict=True):
        if n.shape != o.shape:
            raise ValueError(f"{name}.step must keep the shapes of its state, {_describe(old)}; got {_describe(new)}.")
    if any(n.dtype != o.dtype for n, o in zip(new, old, strict=True)):
        if not torch.is_autocast_enabled(old[0].device.type):
            raise TypeError(f"{name}.step must keep the dtypes of its state, {_describe(old)}; got {_describe(new)}.")
        return [n.to(o.dtype) for n, o in zip(new, old, strict=True)]
    return new


def _describe(state: Any) -> str:
    if not isinstance(state, tuple):
        return type(state).__name__
    names = getattr(state, "_fields", range(len(state)))
    return ", ".join(f"{name} {part.dtype} {list(part.shape)}" for name, part in zip(names, state, strict=True))


def _as_column(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (like.dim() - 1))
