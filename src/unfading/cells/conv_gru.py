"""ConvGRU: GRU over frames; the products with matrices become convolutions (*).

    R_t = sigmoid(W_xr * X_t + W_hr * H_{t-1} + b_r)           reset
    Z_t = sigmoid(W_xz * X_t + W_hz * H_{t-1} + b_z)           keep
    N_t = tanh(W_xn * X_t + W_hn * (R_t H_{t-1}) + b_n)        products pixel by pixel
    H_t = Z_t H_{t-1} + (1 - Z_t) N_t

Ballas et al. 2016, whose reset gate acts before the convolution; they print the gate mirrored (z for 1 - z), as STAR does.
Every gate's kernels start orthogonal, as a matrix [H, C kh kw].
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unfading.cells.convolution import Convolution, ConvolutionalCell, Pair, convolve


class Inputs(NamedTuple):
    rz: Tensor  # [T, B, 2H, h, w] gates before the recurrent term: r, z
    n: Tensor  # [T, B, H, h, w] candidate before the recurrent term


class Weights(NamedTuple):
    W_rz: Convolution  # of 2H channels: r, z
    W_n: Convolution  # of H channels


class State(NamedTuple):
    h: Tensor  # [B, H, h, w]


class ConvGRUCell(ConvolutionalCell[Inputs, State, Weights]):
    """Gated recurrent unit over frames.

    Args:
        kernel_size: height and width of the kernels, or one number for both; odd.
        stride: step of the input convolution, whose frames the state has; that of the state is always 1.
        padding: border of zeros of the input convolution; "same" keeps the size of frames at stride 1.
        dilation: distance between the pixels that a kernel reads, in both convolutions.
        groups: number of groups of channels that do not read each other, in both convolutions.
    """

    paper = "Ballas 2016"
    bounded_state = 1.0

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        *,
        bias: bool = True,
        kernel_size: Pair = 3,
        stride: Pair = 1,
        padding: Pair | Literal["same"] = "same",
        dilation: Pair = 1,
        groups: int = 1,
    ):
        super().__init__(
            in_channels, hidden_channels, input_gates=3, state_gates=3, bias=bias, kernel_size=kernel_size, stride=stride,
            padding=padding, dilation=dilation, groups=groups,
        )  # fmt: skip
        self.reset_parameters()

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        H = self.output_size
        return Inputs(*self.convolved(x).split([2 * H, H], dim=2))

    def weights(self) -> Weights:
        return Weights(*self.state_convolutions(2, 1))

    def initial_state(self, batch: int) -> State:
        return State(self.zeros(batch))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        r, z = torch.sigmoid(inputs.rz + convolve(state.h, weights.W_rz)).chunk(2, dim=1)
        n = torch.tanh(inputs.n + convolve(r * state.h, weights.W_n))
        return State(z * state.h + (1 - z) * n)
