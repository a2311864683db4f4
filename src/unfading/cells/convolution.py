"""Convolutions of a cell over frames: of the input, of the state, and what all convolutional cells have in common.

Letters: C channels of the input, H channels of the state, h and w the height and width of a frame. A convolution is that of
torch, which does not mirror the kernel. The input's may change the size of the frames; the state's keeps it, with stride 1 and
a border of zeros, so that a step returns a state of the size that it was given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

from unfading.cells.base import Cell, Inputs, State, Weights
from unfading.cells.matrix import Masked
from unfading.errors import check_count
from unfading.initialise import orthogonal_

Pair = int | Sequence[int]


@dataclass(frozen=True)
class Convolution:
    """A convolution of the state that keeps the size of its frames.

    Args:
        weight: [n, m / groups, kernel height, kernel width], with odd kernels and n a multiple of m: gate by gate. Each gate is
            a convolution of the same groups.
        dilation: distance between the pixels that a kernel reads, vertically and horizontally.
        groups: number of groups of channels. A channel of a gate reads only the m / groups channels of its own group.
    """

    weight: Tensor
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m): the channels after and before it."""
        return self.weight.shape[0], self.weight.shape[1] * self.groups


# The only leaf is the weight, so that torch.func, compile and export see only tensors.
_pytree.register_pytree_node(
    Convolution,
    lambda convolution: ([convolution.weight], (convolution.dilation, convolution.groups)),
    lambda weight, settings: Convolution(*weight, *settings),
    serialized_type_name="unfading.Convolution",
)


def convolve(v: Tensor, W: Convolution | Masked) -> Tensor:
    """The convolution W of v [B, m, h, w], with a border of zeros: [B, n, h, w]."""
    if isinstance(W, Masked):
        return convolve(v * W.mask, W.matrix)  # type: ignore[arg-type]
    if not isinstance(v, Tensor) or not isinstance(W, Convolution):
        raise TypeError(f"convolve takes a Tensor v and a Convolution W; got {type(v).__name__} and {type(W).__name__}.")
    _, m = W.shape
    if W.weight.dim() != 4 or v.dim() != 4 or v.shape[1] != m:
        raise ValueError(
            f"convolve takes v [B, m, h, w] and a weight [n, m / groups, kernel height, kernel width]; got v {list(v.shape)}, "
            f"weight {list(W.weight.shape)} and groups={W.groups}."
        )
    _check_odd(W.weight.shape[2:])
    return _grouped(v, W.weight, None, (1, 1), _border(W.weight, W.dilation), W.dilation, W.groups, m)


class InputConvolution(nn.Module):
    """The convolutions of the input for all gates, stacked: [N, C, h, w] -> [N, gates H, h', w']. Its cell initialises it."""

    def __init__(self, cell: "ConvolutionalCell", gates: int, *, bias: bool):
        super().__init__()
        C, self.H = cell.input_size, cell.output_size
        self.weight = nn.Parameter(torch.empty(gates * self.H, C // cell.groups, *cell.kernel_size))
        self.bias = nn.Parameter(torch.empty(gates * self.H)) if bias else None
        self.stride, self.padding, self.dilation, self.groups = cell.stride, cell.padding, cell.dilation, cell.groups

    def forward(self, x: Tensor) -> Tensor:
        return _grouped(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.H)

    def extra_repr(self) -> str:
        channels = f"{self.weight.shape[1] * self.groups}, {self.weight.shape[0]}, kernel_size={tuple(self.weight.shape[2:])}"
        return f"{channels}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}, groups={self.groups}"


class ConvolutionalCell(Cell[Inputs, State, Weights]):
    """The common part of the convolutional cells: the convolutions of the input and of the state, and the sizes of frames.

    Args:
        in_channels: C, the channels of the input.
        hidden_channels: H, the channels of the state.
        input_gates: the number of convolutions of the input.
        state_gates: the number of convolutions of the state.
        bias: whether the convolutions of the input have biases.
        kernel_size: height and width of the kernels, or one number for both; odd.
        stride: step of the input convolution.
        padding: border of zeros of the input convolution; "same" keeps the size of frames at stride 1.
        dilation: distance between the pixels that a kernel reads.
        groups: number of groups of channels that do not read each other.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        *,
        input_gates: int,
        state_gates: int,
        bias: bool,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair | Literal["same"],
        dilation: Pair,
        groups: int,
    ):
        check_count("in_channels", in_channels)
        check_count("hidden_channels", hidden_channels)
        super().__init__(in_channels, hidden_channels)
        check_count("groups", groups)
        for name, channels in (("in_channels", in_channels), ("hidden_channels", hidden_channels)):
            if channels % groups:
                raise ValueError(f"groups must be a divisor of {name}; got groups={groups} for {name}={channels}.")
        self.groups = groups
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.stride = _pair("stride", stride)
        self.dilation = _pair("dilation", dilation)
        _check_odd(self.kernel_size)
        self.W_h = nn.Parameter(torch.empty(state_gates * hidden_channels, hidden_channels // groups, *self.kernel_size))
        if isinstance(padding, str):
            if padding != "same":
                raise ValueError(f"padding must be 'same', an int or a pair of ints; got {padding!r}.")
            self.padding = _border(self.W_h, self.dilation)
        else:
            self.padding = _pair("padding", padding, least=0)
        self.from_input = InputConvolution(self, input_gates, bias=bias)
        self.example_frame = tuple(n + 2 for n in self.smallest_frame)

    @property
    def smallest_frame(self) -> tuple[int, int]:
        """Height and width of the smallest input frame: the pixels that a kernel spans, less the border."""
        sizes = zip(self.kernel_size, self.dilation, self.padding, strict=True)
        height, width = (max(1, (k - 1) * d + 1 - 2 * p) for k, d, p in sizes)
        return height, width

    def state_frame(self, frame: tuple[int, ...]) -> tuple[int, ...]:
        least = self.smallest_frame
        if any(n < m for n, m in zip(frame, least, strict=True)):
            raise ValueError(
                f"{type(self).__name__.removesuffix('Cell')} with kernel_size={self.kernel_size}, padding={self.padding} and "
                f"dilation={self.dilation} needs frames of at least {least[0]} x {least[1]}; got {frame[0]} x {frame[1]}."
            )
        sizes = zip(frame, self.kernel_size, self.dilation, self.padding, self.stride, strict=True)
        return tuple((n + 2 * p - (k - 1) * d - 1) // s + 1 for n, k, d, p, s in sizes)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Orthogonal rows or columns of each gate's kernels, as a matrix [H, C / groups * kernel pixels]; biases zero."""
        for weight in (self.from_input.weight, self.W_h):
            orthogonal_(weight, blocks=weight.shape[0] // self.output_size, generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)

    def convolved(self, x: Tensor) -> Tensor:
        """The input convolutions of all steps at once, [T, B, C, h, w] -> [T, B, gates H, h', w']."""
        convolved: Tensor = self.from_input(x.flatten(0, 1))
        return convolved.unflatten(0, x.shape[:2])

    def state_convolutions(self, *gates: int) -> list[Convolution]:
        """The convolutions of the state, each with this number of gates."""
        blocks = self.W_h.split([n * self.output_size for n in gates])
        return [Convolution(block, self.dilation, self.groups) for block in blocks]

    def zeros(self, batch: int) -> Tensor:
        """One part of the initial state, [batch, H, 1, 1]."""
        return self.W_h.new_zeros(batch, self.output_size, 1, 1)


def _grouped(
    v: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    channels: int,
) -> Tensor:
    """The convolutions of all gates, each of `channels` channels and `groups` groups."""
    if groups == 1:
        return functional.conv2d(v, weight, bias, stride, padding, dilation)
    # One by one: the groups of one convolution with all gates would give each gate to another group.
    biases = [None] * (weight.shape[0] // channels) if bias is None else bias.split(channels)
    gates = zip(weight.split(channels), biases, strict=True)
    return torch.cat([functional.conv2d(v, W, b, stride, padding, dilation, groups) for W, b in gates], dim=1)


def _pair(name: str, value: Pair, *, least: int = 1) -> tuple[int, int]:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        for each in value:
            check_count(name, each, least=least)
        return value[0], value[1]
    if isinstance(value, Sequence):
        raise TypeError(f"{name} must be an int or a pair of ints, for height and width; got {value!r}.")
    check_count(name, value, least=least)
    return value, value


def _check_odd(kernel_size: Sequence[int]) -> None:
    for size in kernel_size:
        if size % 2 == 0:
            raise ValueError(
                "kernel_size must be odd, since the convolution of the state keeps the size of its frames with an equal border "
                f"on both sides; got {size}. Nearest valid: {size - 1} and {size + 1}."
            )


def _border(weight: Tensor, dilation: tuple[int, int]) -> tuple[int, int]:
    """The zeros on each side with which a convolution keeps the size of frames."""
    height, width = ((k - 1) * d // 2 for k, d in zip(weight.shape[2:], dilation, strict=True))
    return height, width
