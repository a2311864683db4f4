"""Initial values: orthogonal, identity, Gaussian, uniform, chrono. Each function fills its tensor in place.

Functions that draw random numbers take a generator; None uses torch's global one. A generator may be on another device than the
tensor: the numbers are drawn on its device and copied, so that one CPU generator gives the same weights on every device.
"""

import torch
from torch import Generator, Tensor, nn

from unfading.errors import check_count


@torch.no_grad()
def orthogonal_(tensor: Tensor, *, blocks: int = 1, generator: Generator | None = None) -> Tensor:
    """Orthonormal rows or columns, whichever are fewer, for each of `blocks` matrices stacked along the rows."""
    for block in tensor.chunk(blocks):
        # In at least float32: there is no QR in half precision.
        draw = _blank(block, generator, torch.promote_types(block.dtype, torch.float32))
        block.copy_(nn.init.orthogonal_(draw, generator=generator))
    return tensor


def square_blocks(tensor: Tensor) -> int:
    """The number of square matrices stacked along the rows."""
    return tensor.shape[0] // tensor.shape[1]


def orthogonal_linear_(layer: nn.Linear, *, blocks: int, generator: Generator | None = None) -> None:
    """Make each of the `blocks` matrices stacked in the layer's weight orthogonal, and its bias zero."""
    orthogonal_(layer.weight, blocks=blocks, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


@torch.no_grad()
def identity_(tensor: Tensor, *, scale: float = 1.0, blocks: int = 1) -> Tensor:
    """`scale` on the diagonal, zero elsewhere, for each of `blocks` matrices stacked along the rows."""
    for block in tensor.zero_().chunk(blocks):
        block.diagonal().fill_(scale)
    return tensor


@torch.no_grad()
def gaussian_(tensor: Tensor, std: float, *, generator: Generator | None = None) -> Tensor:
    """Independent N(0, std^2)."""
    return tensor.copy_(_blank(tensor, generator).normal_(0.0, std, generator=generator))


@torch.no_grad()
def uniform_(tensor: Tensor, bound: float, *, generator: Generator | None = None) -> Tensor:
    """Independent U(-bound, bound)."""
    return tensor.copy_(_blank(tensor, generator).uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def chrono_(tensor: Tensor, max_lag: int, *, generator: Generator | None = None) -> Tensor:
    """log U[1, max_lag - 1]: a gate bias that spreads the forgetting times over [2, max_lag] (Tallec & Ollivier 2018).

    A gate sigmoid(b) that multiplies the old state keeps it for about 1 + e^b steps.
    """
    check_count("max_lag", max_lag, least=2)
    times = _blank(tensor, generator).uniform_(1.0, max_lag - 1.0, generator=generator)
    return tensor.copy_(times.log_())


def _blank(tensor: Tensor, generator: Generator | None, dtype: torch.dtype | None = None) -> Tensor:
    device = tensor.device if generator is None else generator.device
    # empty_like, so that under `torch.func.vmap` each of several cells draws its own numbers.
    return torch.empty_like(tensor, dtype=dtype or tensor.dtype, device=device, memory_format=torch.contiguous_format)
