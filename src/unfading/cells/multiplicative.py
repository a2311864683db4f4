"""MultiplicativeLSTM: an LSTM whose gates read a product of input and state in the place of the state.

    m_t = (W_xm x_t) * (W_hm h_{t-1})
    i_t = sigmoid(W_xi x_t + W_mi m_t + b_i)
    f_t = sigmoid(W_xf x_t + W_mf m_t + b_f)
    z_t = tanh(W_xz x_t + W_mz m_t + b_z)
    o_t = sigmoid(W_xo x_t + W_mo m_t + b_o)
    c_t = f_t * c_{t-1} + i_t * z_t
    h_t = o_t * tanh(c_t)

Krause et al. 2016: each input selects its own transition matrix W_m diag(W_xm x) W_hm. At x = 0 the gates do not see the state.
Some code has another ending, after a first version of the paper: z without tanh, and h_t = tanh(o_t * c_t). torchrecurrent's m
differs: it has a bias in each factor. Matrices start orthogonal, b_f at 1, other biases at 0.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.initialise import orthogonal_, orthogonal_linear_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 4H] gates before the recurrent term: i, f, z, o
    m: Tensor  # [T, B, H] W_xm x


class Weights(NamedTuple):
    W_h: Tensor  # [H, H]
    W_m: Tensor  # [4H, H] rows: i, f, z, o


class State(NamedTuple):
    h: Tensor  # [B, H]
    c: Tensor  # [B, H]


class MultiplicativeLSTMCell(Cell[Inputs, State, Weights]):
    """Multiplicative long short-term memory."""

    paper = "Krause 2016"
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, 4 * hidden_size, bias=bias)  # rows: i, f, z, o
        self.to_m = nn.Linear(input_size, hidden_size, bias=False)
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.W_m = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))  # rows: i, f, z, o
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=4, generator=generator)
        orthogonal_linear_(self.to_m, blocks=1, generator=generator)
        orthogonal_(self.W_h, generator=generator)
        orthogonal_(self.W_m, blocks=4, generator=generator)
        if self.from_input.bias is not None:
            self.from_input.bias.detach().chunk(4)[1].fill_(1.0)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x), self.to_m(x))

    def weights(self) -> Weights:
        return Weights(self.W_h, self.W_m)

    def initial_state(self, batch: int) -> State:
        zero = self.W_h.new_zeros(batch, self.output_size)
        return State(zero, zero)

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        m = inputs.m * linear(state.h, weights.W_h)
        i, f, z, o = (inputs.a + linear(m, weights.W_m)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * state.c + torch.sigmoid(i) * torch.tanh(z)
        return State(torch.sigmoid(o) * torch.tanh(c), c)
