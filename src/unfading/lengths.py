"""Rows of different lengths in one tensor [T, B, ...]: set what is past a row's end to zero, and reverse rows."""

import torch
from torch import Tensor


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
