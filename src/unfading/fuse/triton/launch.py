"""Launching a Triton kernel: which of its compiled forms fits the tensors at hand, and their memory as it takes them.

Triton finds the form anew at every call, by a text made of all arguments; here it is found by what the form depends on. That
is how far lines lie apart, which tensors are there and which begin at a multiple of 16 bytes: never T or B.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.fuse.triton.emit import Function


class Known(NamedTuple):
    """What is known when a kernel is compiled, beside the layout of its tensors."""

    rows: int  # of a block
    reverse: bool
    resident: int  # how many matrices stay on chip
    precision: str  # of a dot: tf32, tf32x3, bf16 or fp16
    fast: bool  # tanh and sigmoid by the processor's own


class Launcher:
    """The compiled forms of the kernels of one module."""

    def __init__(self, module: Any):
        self.module = module
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def launch(
        self, function: Function, tensors: Sequence[Tensor | None], sizes: tuple[int, int, int], known: Known, warps: int
    ) -> None:
        """Run a kernel on its tensors, in the order of its arguments; the last of them are its matrices, and lengths."""
        E, T, B = sizes
        first = len(function.pointers)
        taken: list[Any] = []  # tensors, each with the lines from one model to the next
        places: list[Any] = []  # the same, tensors as their addresses
        apart: list[int] = []
        form: list[bool | None] = []
        last = len(tensors) - 1
        for k, tensor in enumerate(tensors):
            if tensor is None:
                taken += (None, 0)
                places += (None, 0)
                apart.append(1)
                form.append(None)
                continue
            if k < first:
                tensor, between, row = lines(tensor)
            elif k < last:
                between, row = tensor.stride(0), tensor.stride(-2)
            else:
                between, row = tensor.stride(0), 1
            address = tensor.data_ptr()
            taken += (tensor, between)
            places += (address, between)
            apart.append(row)
            form.append(address % 16 == 0)
        apart.pop()
        device = next(tensor.device for tensor in tensors if tensor is not None)
        key = (function.name, device.index, known, warps, *apart, *form)
        grid = (-(-B // known.rows), E, 1)
        compiled = self.compiled.get(key)
        with _on(device):
            if compiled is not None:
                compiled[grid](*places, T, B, *apart, *known)
            else:
                kernel = getattr(self.module, function.name)[grid]
                self.compiled[key] = kernel(*taken, T, B, *apart, *known, num_warps=warps, num_stages=1)


def lines(tensor: Tensor) -> tuple[Tensor, int, int]:
    """A tensor [models, ..., n] as a table of lines: itself or a copy, lines from one model to the next, entries of a line."""
    shape, stride = tensor.shape, tensor.stride()
    E, n, row = shape[0], shape[-1], stride[-2]
    dense = row >= n and (n == 1 or stride[-1] == 1) and (E == 1 or stride[0] % row == 0)
    if not dense or (len(shape) == 4 and shape[1] > 1 and stride[1] != shape[2] * row):
        tensor, row = tensor.contiguous(), n
        return tensor, 0 if E == 1 else tensor.stride(0) // row, row
    return tensor, 0 if E == 1 else stride[0] // row, row


def packed(matrix: Tensor) -> Tensor:
    """With one row after the other; models that share a matrix still do."""
    if matrix.stride(-1) == 1 and matrix.stride(-2) >= matrix.shape[-1]:
        return matrix
    if matrix.shape[0] > 1 and matrix.stride(0) == 0:
        return matrix[:1].contiguous().expand_as(matrix)
    return matrix.contiguous()


def _on(device: torch.device) -> Any:
    """Triton launches on the current device, which is mostly the right one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
