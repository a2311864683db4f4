"""Projections that are affine in x, however many matrices they are made with: of one feature x, each field is

    x A + c        with  c = project(0)  and  A = project(1) - project(0)

A loop takes A and c for vectors of weights, so that x goes into it as it is, and neither the field [T, B, n] nor its gradient
is ever written out. Gradients reach the parameters through these two rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unfading.fuse.ir.program import VIEWS, Value, in_order

ALONE = frozenset(["neg", "copy", "dot", "cat", "sum", *VIEWS])  # linear in all they are made of
SUMS = frozenset(["add", "sub"])


def is_affine(values: Sequence[Value]) -> bool:
    """Whether these are affine functions of what they read of inputs."""
    moving: set[int] = set()  # those that depend on an input
    for value in in_order(values):
        read = [arg.id in moving for arg in value.args]
        if value.op == "leaf":
            if value.attr.kind == "input":
                moving.add(value.id)
        elif any(read):
            one = (value.op == "mul" and not all(read)) or (value.op == "div" and not read[1])
            if not (value.op in ALONE or value.op in SUMS or one):
                return False
            moving.add(value.id)
    return True


def slopes(fields: Sequence[Tensor]) -> list[Tensor]:
    """A and c of each field, from what `project` makes of `ends`."""
    return [part for field in fields for part in (_both(field.device, field.dtype) @ field.squeeze(1)).unbind()]


# Both are kept: making them would make the host wait for a GPU.
@lru_cache(maxsize=8)
def ends(device: torch.device, dtype: torch.dtype) -> Tensor:
    """x = 0 and x = 1, [2, 1, 1]."""
    with torch.inference_mode(False):
        return torch.tensor([0.0, 1.0], device=device, dtype=dtype).reshape(2, 1, 1)


@lru_cache(maxsize=8)
def _both(device: torch.device, dtype: torch.dtype) -> Tensor:
    """What makes A and c of the values at both ends."""
    with torch.inference_mode(False):
        return torch.tensor([[-1.0, 1.0], [1.0, 0.0]], device=device, dtype=dtype)


def along(x: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
    """The fields of x, from A and c of each."""
    made: list[Any] = [x * A + c for A, c in zip(vectors[::2], vectors[1::2], strict=True)]
    return made
