"""Elman, the plain recurrent network ("vanilla RNN").

    h_t = phi(W_x x_t + W_h h_{t-1} + b)           phi = tanh, or ReLU

Elman 1990; STAR eq. 15. `nn.RNN` stores a second bias, which adds nothing to the function. Every matrix starts
orthogonal, as in STAR's experiments; nn.RNN starts uniform.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Activation, Cell, Gains, activation, linear
from unfading.initialise import orthogonal_, orthogonal_linear_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] W_x x + b


class Weights(NamedTuple):
    W_h: Tensor  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class ElmanCell(Cell):
    """Plain recurrent cell.

    Args:
        activation: phi.
    """

    paper = "Elman 1990"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, activation: Activation = "tanh"):
        super().__init__(input_size, hidden_size)
        self.activation: Activation = activation
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        if activation == "tanh":
            self.singular_values_at_zero = Gains(input=(1.0, 1.0), state=(1.0, 1.0))
        if activation in ("tanh", "sigmoid"):
            self.bounded_state = 1.0
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
        phi = activation(self.activation)
        return State(phi(inputs.a + linear(state.h, weights.W_h)))
