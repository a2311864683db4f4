"""The convolutions of a step on the pixels of a batch, [pixels, channels], and their gradients: of the input, of the kernels.

Kernels of 3 x 3 pixels without dilation and groups run on the CPU by Winograd's minimal filtering (`c/winograd.c`), which needs
16 multiplications where the definition has 36. All others, and all on a GPU, are torch's own (oneDNN, cuDNN).
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from unfading.fuse.c.cache import library
from unfading.fuse.c.emit import shared
from unfading.fuse.c.kernel import REAL, products
from unfading.fuse.c.threads import on_threads, threads_for
from unfading.fuse.frames.frame_program import FrameConvolution

BLOCK, GRADIENT_BLOCK = 24, 128  # tiles that are transformed together; the second for the gradient of the kernels
STORED_STEPS = 8  # whose gradients are collected for one gradient of the kernels, on a GPU


class Frames(NamedTuple):
    """The sizes of a batch of frames."""

    batch: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.batch * self.height * self.width

    def images(self, pixels: Tensor) -> Tensor:
        """[pixels, n] as [B, n, height, width], without a copy; more batches for more pixels."""
        return pixels.reshape(-1, self.height, self.width, pixels.shape[-1]).permute(0, 3, 1, 2)


class Convolver(Protocol):
    """One convolution with its weights, for one call of a loop."""

    def forward(self, v: Tensor) -> Tensor:
        """The convolution of v [pixels, m]: [pixels, n]. The next call may overwrite it."""

    def add_input_gradient(self, d: Tensor, total: Tensor) -> None:
        """Add the gradient of v to a total [pixels, m], for the gradient d [pixels, n] of the result."""

    def add_kernel_gradient(self, v: Tensor, d: Tensor) -> None:
        """Add the gradient of the kernels from one step."""

    def kernel_gradient(self) -> Tensor:
        """The gradient of the kernels [n, m / groups, height, width] from all steps."""


def is_small(convolution: FrameConvolution) -> bool:
    """Whether a convolution runs by Winograd's filtering on a CPU."""
    return convolution.kernel == (3, 3) and convolution.dilation == (1, 1) and convolution.groups == 1


def convolver(convolution: FrameConvolution, weight: Tensor, frames: Frames, precision: torch.dtype | None = None) -> Convolver:
    """The implementation for one convolution.

    Args:
        precision: in which it is computed, if not in that of its weight.
    """
    kernels = weight[convolution.r0 : convolution.r1]
    if is_small(convolution) and weight.device.type == "cpu" and weight.dtype in REAL:
        return WinogradConvolver(kernels, frames)
    return TorchConvolver(convolution, kernels, frames, precision or weight.dtype)


class TorchConvolver:
    """A convolution by torch, with channels side by side in memory."""

    def __init__(self, convolution: FrameConvolution, kernels: Tensor, frames: Frames, precision: torch.dtype):
        self.frames, self.channels, self.precision = frames, convolution.channels, precision
        self.settings = ([1, 1], list(convolution.border), list(convolution.dilation), False, [0, 0], convolution.groups)
        self.kernels = kernels.to(precision).contiguous(memory_format=torch.channels_last)
        self.steps = 1 if kernels.device.type == "cpu" else STORED_STEPS
        self.collected: list[tuple[Tensor, Tensor]] = []
        self.total = torch.zeros_like(kernels, memory_format=torch.contiguous_format)

    def forward(self, v: Tensor) -> Tensor:
        out = torch.ops.aten.convolution(self._images(v), self.kernels, None, *self.settings)
        return out.permute(0, 2, 3, 1).reshape(-1, out.shape[1])

    def add_input_gradient(self, d: Tensor, total: Tensor) -> None:
        images = self._images(d)
        like = self.frames.images(images.new_empty((self.frames.pixels, self.channels)))  # only its shape and layout are read
        self.frames.images(total).add_(self._gradients(images, like, 0))

    def add_kernel_gradient(self, v: Tensor, d: Tensor) -> None:
        if self.steps == 1:
            self.total += self._gradients(self._images(d), self._images(v), 1)
            return
        copy = d.clone() if d.dtype == self.precision else d.to(self.precision)  # the next step writes to the same memory
        self.collected.append((v.to(self.precision), copy))
        if len(self.collected) == self.steps:
            self._add_collected()

    def _add_collected(self) -> None:
        v, d = (torch.cat(parts) for parts in zip(*self.collected, strict=True))
        self.collected.clear()
        self.total += self._gradients(self._images(d), self._images(v), 1)

    def kernel_gradient(self) -> Tensor:
        if self.collected:
            self._add_collected()
        return self.total

    def _images(self, pixels: Tensor) -> Tensor:
        return self.frames.images(pixels.to(self.precision))

    def _gradients(self, d: Tensor, v: Tensor, which: int) -> Tensor:
        """The gradient of the input (0) or of the kernels (1)."""
        wanted = [which == 0, which == 1, False]
        gradients = torch.ops.aten.convolution_backward(d, v, self.kernels, None, *self.settings, wanted)
        gradient: Tensor = gradients[which]
        return gradient


class WinogradConvolver:
    """A convolution with kernels of 3 x 3 pixels, by c/winograd.c."""

    def __init__(self, kernels: Tensor, frames: Frames):
        self.kernels, self.frames = kernels.detach(), frames
        self.n, self.m = kernels.shape[:2]
        self.result: Tensor | None = None
        self.forward_matrices: Tensor | None = None
        self.backward_matrices: Tensor | None = None
        self.total: Tensor | None = None

    def forward(self, v: Tensor) -> Tensor:
        if self.forward_matrices is None:
            self.forward_matrices = packed(transformed(self.kernels))
        if self.result is None:
            self.result = v.new_empty((self.frames.pixels, self.n))
        run("convolve", self.frames, self.result, BLOCK, [(v, self.forward_matrices)], add=False)
        return self.result

    def add_input_gradient(self, d: Tensor, total: Tensor) -> None:
        if self.backward_matrices is None:
            self.backward_matrices = packed(transformed(self.kernels.flip(2, 3).transpose(0, 1)))
        run("convolve", self.frames, total, BLOCK, [(d, self.backward_matrices)], add=True)

    def add_kernel_gradient(self, v: Tensor, d: Tensor) -> None:
        self.add_together([(self, v)], d)

    @staticmethod
    def add_together(pairs: Sequence[tuple["WinogradConvolver", Tensor]], d: Tensor) -> None:
        """Add the gradients of the kernels of several convolutions whose results have the same gradient."""
        sources = []
        for own, v in pairs:
            if own.total is None:
                own.total = v.new_zeros((16, own.n, own.m))
            sources.append((v, own.total))
        run("kernel_gradient", pairs[0][0].frames, d, GRADIENT_BLOCK, sources, add=True)

    def kernel_gradient(self) -> Tensor:
        if self.total is None:
            return torch.zeros_like(self.kernels)
        G = _kernel_transform(self.total.dtype)
        return torch.einsum("ia,ijnm,jb->nmab", G, self.total.unflatten(0, (4, 4)), G)


def add_kernel_gradients(group: Sequence[tuple[Convolver, Tensor, Tensor]]) -> None:
    """Add the gradients of the kernels of some convolutions, each with its input v and the gradient d of its result: the same
    tensor for all."""
    together = [(own, v) for own, v, _ in group if isinstance(own, WinogradConvolver)]
    if together:
        WinogradConvolver.add_together(together, group[0][2])
    for own, v, d in group:
        if not isinstance(own, WinogradConvolver):
            own.add_kernel_gradient(v, d)


def transformed(kernels: Tensor) -> Tensor:
    """G kernel G^T of every pair of channels: [16, n, m]."""
    G = _kernel_transform(kernels.dtype)
    return torch.einsum("ia,nmab,jb->ijnm", G, kernels, G).flatten(0, 1).contiguous()


@cache
def _kernel_transform(dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=dtype)


def packed(matrices: Tensor) -> Tensor:
    """Matrices [16, n, m] as products read them: [16, size]."""
    functions = products(matrices.dtype)
    count, n, m = matrices.shape
    to = matrices.new_empty((count, (functions.packed_size(m, n) + 15) // 16 * 16))
    numbers = [number for q in range(count) for number in (0, q * n * m, 1, m, m, n, q * to.shape[1])]
    addresses = (ctypes.c_void_p * 1)(matrices.data_ptr())
    functions.pack_all((ctypes.c_int64 * len(numbers))(*numbers), count, addresses, to.data_ptr(), 0, 1)
    return to


def run(
    function: str, frames: Frames, pixels: Tensor, block: int, sources: Sequence[tuple[Tensor, Tensor]], *, add: bool
) -> None:
    """Call a function of winograd.c on pixels [pixels, n], and pixels [pixels, m] with 16 matrices for every source."""
    addresses = _functions(pixels.dtype)
    n = pixels.shape[1]
    product = addresses["product" if function == "convolve" else "outer"]
    numbers = [product, *frames, n, pixels.data_ptr(), block, int(add), len(sources)]
    for v, matrices in sources:
        numbers += [v.data_ptr(), v.shape[1], matrices.data_ptr(), matrices[0].numel()]
    work = 4 * frames.pixels * n * sum(v.shape[1] for v, _ in sources)
    call = (ctypes.c_int64 * len(numbers))(*numbers)
    on_threads(addresses[function], call, threads_for(work, torch.get_num_threads()))


@cache
def _functions(dtype: torch.dtype) -> dict[str, int]:
    """The addresses of the functions of winograd.c, and of those of products.c that they call."""
    own, of_products = library(shared(REAL[dtype], "winograd.c")), products(dtype)
    _libraries.append(own)
    functions = {"convolve": own.convolve, "kernel_gradient": own.kernel_gradient}
    functions |= {"product": of_products.product, "outer": of_products.outer}
    addresses = {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in functions.items()}
    return {name: address for name, address in addresses.items() if address is not None}


_libraries: list[ctypes.CDLL] = []  # held, so that the addresses of their functions stay valid
