"""MinGRU and MinLSTM: gates and candidate read the input only, so the recurrence is linear and diagonal.

    MinGRU:   z_t = sigmoid(W_z x_t + b_z)
              h_t = (1 - z_t) * h_{t-1} + z_t * g(W_h x_t + b_h)
    MinLSTM:  f_t = sigmoid(W_f x_t + b_f),   i_t = sigmoid(W_i x_t + b_i)
              h_t = f_t / (f_t + i_t) * h_{t-1} + i_t / (f_t + i_t) * g(W_h x_t + b_h)

Feng et al. 2024, section 3, with g(a) = a; the form that the authors compute in logarithms has
g(a) = a + 1/2 for a >= 0 and sigmoid(a) below, which is positive (`positive=True`). All of this except the last line is
computed for the whole sequence at once, by `project`. A single layer cannot look at its state to decide what to keep; the
paper stacks several. Matrices start orthogonal. b_z = -1 and b_f = 1, so that a unit begins by remembering; the paper does not
say how its biases start.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.initialise import orthogonal_linear_


class Inputs(NamedTuple):
    keep: Tensor  # [T, B, H] the factor of h
    add: Tensor  # [T, B, H]


class Weights(NamedTuple):
    """Empty: the recurrence has no parameters."""


class State(NamedTuple):
    h: Tensor  # [B, H]


class LinearGateCell(Cell[Inputs, State, Weights]):
    """The common part of both forms: everything except the gates."""

    paper = "Feng 2024"

    def __init__(self, input_size: int, hidden_size: int, *, rows: int, bias: bool, positive: bool):
        super().__init__(input_size, hidden_size)
        self.positive = positive
        self.from_input = nn.Linear(input_size, rows * hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        H = self.output_size
        orthogonal_linear_(self.from_input, blocks=self.from_input.out_features // H, generator=generator)
        if self.from_input.bias is not None:
            self.from_input.bias.detach()[:H].fill_(self.first_bias)

    first_bias: float
    """Initial bias of the first gate."""

    def candidate(self, a: Tensor) -> Tensor:
        """g(a)"""
        return torch.where(a >= 0, a + 0.5, torch.sigmoid(a)) if self.positive else a

    def weights(self) -> Weights:
        return Weights()

    def initial_state(self, batch: int) -> State:
        return State(self.from_input.weight.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(inputs.keep * state.h + inputs.add)


class MinGRUCell(LinearGateCell):
    """Minimal gated recurrent unit.

    Args:
        positive: the candidate is g(a) of the authors' form in logarithms instead of a.
    """

    first_bias = -1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, positive: bool = False):
        super().__init__(input_size, hidden_size, rows=2, bias=bias, positive=positive)  # z, h

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        z, a = self.from_input(x).chunk(2, dim=-1)
        return Inputs(torch.sigmoid(-z), torch.sigmoid(z) * self.candidate(a))


class MinLSTMCell(LinearGateCell):
    """Minimal long short-term memory.

    Args:
        positive: the candidate is g(a) of the authors' form in logarithms instead of a.
    """

    first_bias = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, positive: bool = False):
        super().__init__(input_size, hidden_size, rows=3, bias=bias, positive=positive)  # f, i, h

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        f, i, a = self.from_input(x).chunk(3, dim=-1)
        # f / (f + i) = sigmoid(log f - log i), which has no quotient of two small numbers.
        keep = torch.nn.functional.logsigmoid(f) - torch.nn.functional.logsigmoid(i)
        return Inputs(torch.sigmoid(keep), torch.sigmoid(-keep) * self.candidate(a))
