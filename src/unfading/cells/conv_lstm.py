"""ConvLSTM, and ConvForgetLSTM with its forget gate only: the products with matrices become convolutions (*).

    I_t = sigmoid(W_xi * X_t + W_hi * H_{t-1} + b_i)       input gate
    F_t = sigmoid(W_xf * X_t + W_hf * H_{t-1} + b_f)       forget gate
    Z_t = tanh(W_xz * X_t + W_hz * H_{t-1} + b_z)          candidate
    O_t = sigmoid(W_xo * X_t + W_ho * H_{t-1} + b_o)       output gate
    ConvLSTM:        C_t = F_t C_{t-1} + I_t Z_t,   H_t = O_t tanh(C_t)        products pixel by pixel
    ConvForgetLSTM:  H_t = tanh(F_t H_{t-1} + (1 - F_t) Z_t)

ConvLSTM: Shi et al. 2015, without their peepholes, whose weights belong to single pixels and so to one size of frames; the
implementations in use leave them out. ConvForgetLSTM: STAR eq. 22-24 with convolutions, "convLSTM w/f" in its Table 5. Every
gate's kernels start orthogonal, as a matrix [H, C kh kw].
"""

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from unfading.cells.convolution import Convolution, ConvolutionalCell, Pair, convolve
from unfading.cells.recipe import Recipe
from unfading.errors import check_max_lag
from unfading.initialise import chrono_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 4H, h, w] gates before the recurrent term: i, f, z, o; only f, z without the others


class Weights(NamedTuple):
    W_h: Convolution  # of 4H channels: i, f, z, o; or of 2H: f, z


class State(NamedTuple):
    h: Tensor  # [B, H, h, w]
    c: Tensor  # [B, H, h, w]


class ForgetState(NamedTuple):
    h: Tensor  # [B, H, h, w]


class ConvLSTMCell(ConvolutionalCell[Inputs, State, Weights]):
    """Long short-term memory over frames.

    Args:
        kernel_size: height and width of the kernels, or one number for both; odd.
        stride: step of the input convolution, whose frames the state has; that of the state is always 1.
        padding: border of zeros of the input convolution; "same" keeps the size of frames at stride 1.
        dilation: distance between the pixels that a kernel reads, in both convolutions.
        groups: number of groups of channels that do not read each other, in both convolutions.
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1] and b_i = -b_f, so
            that channels remember for 2 to max_lag steps. None for b_f = 1 and other biases 0.
    """

    paper = "Shi 2015"
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
            in_channels, hidden_channels, input_gates=4, state_gates=4, bias=bias, kernel_size=kernel_size, stride=stride,
            padding=padding, dilation=dilation, groups=groups,
        )  # fmt: skip
        check_max_lag(max_lag, bias)
        self.max_lag = max_lag
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        if self.from_input.bias is not None:
            b_i, b_f, _, _ = self.from_input.bias.detach().chunk(4)
            if self.max_lag is None:
                b_f.fill_(1.0)
            else:
                chrono_(b_f, self.max_lag, generator=generator)
                b_i.copy_(-b_f)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.convolved(x))

    def weights(self) -> Weights:
        return Weights(*self.state_convolutions(4))

    def initial_state(self, batch: int) -> State:
        return State(self.zeros(batch), self.zeros(batch))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        i, f, z, o = (inputs.a + convolve(state.h, weights.W_h)).chunk(4, dim=1)
        c = torch.sigmoid(f) * state.c + torch.sigmoid(i) * torch.tanh(z)
        return State(torch.sigmoid(o) * torch.tanh(c), c)


class ConvForgetLSTMCell(ConvolutionalCell[Inputs, ForgetState, Weights]):
    """LSTM over frames with only a forget gate.

    Args:
        kernel_size: height and width of the kernels, or one number for both; odd.
        stride: step of the input convolution, whose frames the state has; that of the state is always 1.
        padding: border of zeros of the input convolution; "same" keeps the size of frames at stride 1.
        dilation: distance between the pixels that a kernel reads, in both convolutions.
        groups: number of groups of channels that do not read each other, in both convolutions.
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1], so that channels
            remember for 2 to max_lag steps. None for b_f = 1.
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
            in_channels, hidden_channels, input_gates=2, state_gates=2, bias=bias, kernel_size=kernel_size, stride=stride,
            padding=padding, dilation=dilation, groups=groups,
        )  # fmt: skip
        check_max_lag(max_lag, bias)
        self.max_lag = max_lag
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        if self.from_input.bias is not None:
            b_f, _ = self.from_input.bias.detach().chunk(2)
            if self.max_lag is None:
                b_f.fill_(1.0)
            else:
                chrono_(b_f, self.max_lag, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.convolved(x))

    def weights(self) -> Weights:
        return Weights(*self.state_convolutions(2))

    def initial_state(self, batch: int) -> ForgetState:
        return ForgetState(self.zeros(batch))

    def step(self, inputs: Inputs, state: ForgetState, weights: Weights) -> ForgetState:
        f, z = (inputs.a + convolve(state.h, weights.W_h)).chunk(2, dim=1)
        f = torch.sigmoid(f)
        return ForgetState(torch.tanh(f * state.h + (1 - f) * torch.tanh(z)))
