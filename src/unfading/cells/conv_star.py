"""ConvSTAR: STAR over frames; the products with matrices become convolutions (*).

    Z_t = tanh(W_z * X_t + b_z)                       candidate, needs the input alone: in project
    K_t = sigmoid(W_x * X_t + W_h * H_{t-1} + b_k)    gate
    H_t = tanh((1 - K_t) H_{t-1} + K_t Z_t)           products pixel by pixel

Turkoglu et al. 2019, eq. 28-30. Every gate's kernels start orthogonal, as a matrix [H, C kh kw]; as a map of frames such a
convolution is not orthogonal, so STAR's claim about singular values holds for kernels of one pixel only.

The authors' released code for crops (multi-stage-convSTAR) differs: it has no outer tanh, its gate keeps the state where this
one replaces it, and that gate's bias starts at 1 (b_k = -1 here).
"""

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from unfading.cells.convolution import Convolution, ConvolutionalCell, Pair, convolve
from unfading.cells.recipe import Recipe
from unfading.errors import check_max_lag
from unfading.initialise import chrono_


class Inputs(NamedTuple):
    z: Tensor  # [T, B, H, h, w] candidate
    a: Tensor  # [T, B, H, h, w] gate, before the recurrent term


class Weights(NamedTuple):
    W_h: Convolution  # of H channels


class State(NamedTuple):
    h: Tensor  # [B, H, h, w]


class ConvSTARCell(ConvolutionalCell[Inputs, State, Weights]):
    """Stackable recurrent cell over frames.

    Args:
        kernel_size: height and width of the kernels, or one number for both; odd.
        stride: step of the input convolution, whose frames the state has; that of the state is always 1.
        padding: border of zeros of the input convolution; "same" keeps the size of frames at stride 1.
        dilation: distance between the pixels that a kernel reads, in both convolutions.
        groups: number of groups of channels that do not read each other, in both convolutions.
        max_lag: longest dependency expected, in steps. Initialises the gate's bias so that forgetting times are spread over
            [2, max_lag]; None initialises it to zero.
    """

    paper = "Turkoglu 2019"
    bounded_state = 1.0
    recipe = Recipe(length_options=("max_lag",))

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
        max_lag: int | None = None,
    ):
        super().__init__(
            in_channels, hidden_channels, input_gates=2, state_gates=1, bias=bias, kernel_size=kernel_size, stride=stride,
            padding=padding, dilation=dilation, groups=groups,
        )  # fmt: skip
        check_max_lag(max_lag, bias)
        self.max_lag = max_lag
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        if self.max_lag is not None and self.from_input.bias is not None:
            _, b_k = self.from_input.bias.detach().chunk(2)
            chrono_(b_k, self.max_lag, generator=generator).neg_()

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        z, a = self.convolved(x).chunk(2, dim=2)
        return Inputs(torch.tanh(z), a)

    def weights(self) -> Weights:
        return Weights(*self.state_convolutions(1))

    def initial_state(self, batch: int) -> State:
        return State(self.zeros(batch))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        k = torch.sigmoid(inputs.a + convolve(state.h, weights.W_h))
        return State(torch.tanh((1 - k) * state.h + k * inputs.z))
