"""Rows of different lengths in one tensor [T, B, ...]: check lengths, set what is past a row's end to zero, reverse rows."""

import torch
from torch import Tensor

from unfading.torch_state import traced


def checked_lengths(lengths: Tensor, x: Tensor) -> Tensor:
    """The lengths on the device of x [T, B, ...]; raises unless they are int64 [B] in 1..T."""
    T, B = x.shape[:2]
    check_lengths(lengths, B)
    # The values of traced or batched tensors cannot be read, nor those on a GPU while a CUDA graph is captured: not checked.
    if not traced() and not (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        wrong = lengths[(lengths < 1) | (lengths > T)]
        if len(wrong):
            raise ValueError(f"lengths must lie in 1..{T}, the steps of the input; got {int(wrong[0])}.")
    return lengths.to(x.device)


def check_lengths(lengths: Tensor, B: int) -> None:
    """Raise unless lengths are int64 [B]; their values, which may be on a GPU, are not read."""
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int64:
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths must be an int64 tensor of shape [{B}]; got {got}. Use torch.as_tensor(lengths).long().")
    if lengths.shape != (B,):
        raise ValueError(f"lengths must have one entry per row, shape [{B}]; got {list(lengths.shape)}.")


def zero_past(value: Tensor, lengths: Tensor) -> Tensor:
    """[T, B, ...] with zeros after each row's last step."""
    past = _time(value) >= lengths.to(value.device)
    return value.masked_fill(_like(past, value), 0.0)


def flip(value: Tensor, lengths: Tensor | None) -> Tensor:
    """[T, B, ...] with each row's first `length` steps in reverse order and the rest unchanged."""
    if lengths is None:
        return value.flip(0)
    t = _time(value)
    mirrored = lengths - 1 - t
    return value.gather(0, _like(torch.where(mirrored < 0, t, mirrored), value).expand_as(value))


def _time(value: Tensor) -> Tensor:
    """[T, 1]"""
    return torch.arange(value.shape[0], device=value.device).unsqueeze(1)


def _like(rows: Tensor, value: Tensor) -> Tensor:
    """[T, B] with axes of size 1 appended, so that it broadcasts with `value`."""
    return rows.reshape(*rows.shape, *[1] * (value.dim() - 2))
