"""Launch a Triton kernel: look up the compiled variant for the tensors of a call, and pass their addresses.

Triton looks its variant up at every call, by a text made of all arguments. Here the key is only what a variant depends on: the
distance between lines, which tensors are given, and which begin at a multiple of 16 bytes; never T or B.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.fuse.triton.emit import TritonFunction


class LaunchConstants(NamedTuple):
    """The constants of a compiled kernel, beside the layout of its tensors."""

    rows: int  # of the batch in one block of the grid
    reverse: bool
    resident: int  # how many matrices stay on chip
    precision: str  # of a dot: tf32, tf32x3, bf16 or fp16
    fast: bool  # whether tanh and sigmoid are hardware instructions


class Launcher:
    """The compiled variants of the kernels of one module."""

    def __init__(self, module: Any):
        self.module = module
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        function: TritonFunction,
        tensors: Sequence[Tensor | None],
        grid: tuple[int, int, int],
        further: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int,
        models: bool,
        *,
        cooperative: bool = False,
    ) -> None:
        """Run a kernel on its tensors, in the order of its arguments; the last ones are its matrices, then lengths.

        Args:
            further: the arguments that follow: T, B and those of the frame.
            constants: those of the frame.
            models: whether the tensors have a first axis of models.
            cooperative: whether all programs of the grid must run at the same time.
        """
        tensors, first, last = list(tensors), len(function.pointers), len(tensors) - 1
        addresses: list[int | None] = []  # each followed by the lines from one model to the next
        layout: list[int | None] = []  # of each tensor, the entries from one line to the next, and whether it is aligned
        for k, tensor in enumerate(tensors):
            if tensor is None:
                addresses += (None, 0)
                layout += (1, None)
                continue
            if k >= first:
                row = tensor.stride(-2) if k < last else 1
                between = tensor.stride(0) // row if models else 0
            elif not models and tensor.is_contiguous() and (tensor.dim() == 1 or tensor.stride(-2) == tensor.shape[-1]):
                between, row = 0, tensor.shape[-1]  # not a slice of one line, which would ask for a variant of its own
            else:
                tensor, between, row = lines(tensor, models)
                tensors[k] = tensor  # a copy lives until the launch
            address = tensor.data_ptr()
            addresses += (address, between)
            layout += (row, address % 16 == 0)
        apart = layout[:-2:2]
        device = next(tensor.device for tensor in tensors if tensor is not None)
        key = (function.name, device.index, constants, warps, *layout)
        compiled = self.compiled.get(key)
        if compiled is not None:
            further = tuple([part.data_ptr() if isinstance(part, Tensor) else part for part in further])
            # Triton launches on the current device.
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                compiled[grid](*addresses, *further, *apart, *constants)
            else:
                with torch.cuda.device(device):
                    compiled[grid](*addresses, *further, *apart, *constants)
            return
        kernel = getattr(self.module, function.name)[grid]
        options = {"launch_cooperative_grid": True} if cooperative else {}
        arguments = [part for pair in zip(tensors, addresses[1::2], strict=True) for part in pair]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.compiled[key] = kernel(*arguments, *further, *apart, *constants, num_warps=warps, num_stages=1, **options)


def lines(tensor: Tensor, models: bool) -> tuple[Tensor, int, int]:
    """A tensor [..., n] as a table of lines: itself or a copy, the lines from one model to the next, and the entries from one
    line to the next. With `models` its first axis is that of models."""
    shape, stride = tensor.shape, tensor.stride()
    E, n, row = shape[0] if models else 1, shape[-1], stride[-2]
    dense = row >= n and (n == 1 or stride[-1] == 1) and (E == 1 or stride[0] % row == 0)
    if not dense or (len(shape) == 3 + models and shape[-3] > 1 and stride[-3] != shape[-2] * row):
        tensor, row = tensor.contiguous(), n
        return tensor, 0 if E == 1 else tensor.stride(0) // row, row
    return tensor, 0 if E == 1 else stride[0] // row, row


def packed(matrix: Tensor) -> Tensor:
    """The matrix with contiguous rows, and whole rows from one model to the next. Models that share one still share it."""
    *models, down, right = matrix.stride()
    if right == 1 and down >= matrix.shape[-1] and (not models or matrix.shape[0] == 1 or models[0] % down == 0):
        return matrix
    if matrix.dim() == 3 and matrix.shape[0] > 1 and matrix.stride(0) == 0:
        return matrix[:1].contiguous().expand_as(matrix)
    return matrix.contiguous()


def does_not_fit(error: Exception) -> bool:
    """Whether a kernel was refused before it ran: it needs more of a multiprocessor, or more of them, than there is."""
    from triton.runtime.errors import OutOfResources

    if isinstance(error, OutOfResources):
        return True
    return is_unsupported(error) or (isinstance(error, RuntimeError) and "cooperative launch" in str(error))


def is_unsupported(error: Exception) -> bool:
    """Whether the driver has no such launch, as for programs that must run at the same time on some virtual GPUs."""
    return isinstance(error, RuntimeError) and "operation not supported" in str(error)
