"""Cells with one matrix for the input and one for the state: ATR, with twin gates, and SGRN, with one gate.

    ATR:   p_t = W x_t,   q_t = U h_{t-1} + b
           i_t = sigmoid(p_t + q_t),   f_t = sigmoid(p_t - q_t)
           h_t = i_t * p_t + f_t * h_{t-1}
    SGRN:  p_t = W x_t + b
           f_t = sigmoid(p_t + U h_{t-1})
           h_t = tanh((1 - f_t) * p_t + f_t * h_{t-1})

ATR: Zhang et al. 2018, whose equation has no bias; the bias of q is that of the authors' code. torchrecurrent's p differs: it
has a bias too. The state of ATR is not bounded. SGRN: Zu & Wei 2021 (doi 10.1049/gtd2.12056), as torchrecurrent writes it; we
know of no released code. Matrices start orthogonal, biases at 0.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.initialise import orthogonal_, orthogonal_linear_


class Inputs(NamedTuple):
    p: Tensor  # [T, B, H]


class Weights(NamedTuple):
    U: Tensor  # [H, H]


class BiasedWeights(NamedTuple):
    U: Tensor  # [H, H]
    b: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class ATRCell(Cell[Inputs, State, BiasedWeights]):
    """Addition-subtraction twin-gated recurrent cell."""

    paper = "Zhang 2018"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, hidden_size, bias=False)
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.b = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_(self.from_input.weight, generator=generator)
        orthogonal_(self.W_h, generator=generator)
        if self.b is not None:
            nn.init.zeros_(self.b)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> BiasedWeights:
        return BiasedWeights(self.W_h, self.W_h.new_zeros(self.output_size) if self.b is None else self.b)

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: BiasedWeights) -> State:
        q = linear(state.h, weights.U) + weights.b
        i, f = torch.sigmoid(inputs.p + q), torch.sigmoid(inputs.p - q)
        return State(i * inputs.p + f * state.h)


class SGRNCell(Cell[Inputs, State, Weights]):
    """Simple gated recurrent network."""

    paper = "Zu 2021"
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=1, generator=generator)
        orthogonal_(self.W_h, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(self.W_h)

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        f = torch.sigmoid(inputs.p + linear(state.h, weights.U))
        return State(torch.tanh((1 - f) * inputs.p + f * state.h))
