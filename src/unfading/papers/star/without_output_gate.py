"""The LSTM without its output gate: the first step from LSTM to STAR (Turkoglu et al. 2019, section 4).

    i_t = sigmoid(W_xi x_t + W_hi h_{t-1} + b_i)       input gate
    f_t = sigmoid(W_xf x_t + W_hf h_{t-1} + b_f)       forget gate
    z_t = tanh(W_xz x_t + W_hz h_{t-1} + b_z)          candidate
    h_t = tanh(f_t * h_{t-1} + i_t * z_t)

Without the output gate h and c would be equal, so c is dropped and the tanh is applied to the state. Removing the input gate
too, i = 1 - f, gives `ForgetLSTM`; computing z from the input alone then gives `STAR`, whose k is 1 - f.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.initialise import orthogonal_, orthogonal_linear_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 3H] before the recurrent term: i, f, z


class Weights(NamedTuple):
    W_h: Tensor  # [3H, H] rows: i, f, z


class State(NamedTuple):
    h: Tensor  # [B, H]


class WithoutOutputGateCell(Cell[Inputs, State, Weights]):
    """Long short-term memory without output gate and without a second state."""

    paper = "Turkoglu 2019"
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, 3 * hidden_size)  # rows: i, f, z
        self.W_h = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=3, generator=generator)
        orthogonal_(self.W_h, blocks=3, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(self.W_h)

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        i, f, z = (inputs.a + linear(state.h, weights.W_h)).chunk(3, dim=-1)
        return State(torch.tanh(torch.sigmoid(f) * state.h + torch.sigmoid(i) * torch.tanh(z)))
