"""IndRNN, the independently recurrent network: each unit reads its own past and no other unit's.

    h_t = phi(W x_t + u * h_{t-1} + b)

Li et al. 2018. The recurrence has no matrix, so each unit's gradient over T steps is a product of T numbers phi' u; units mix
in the next layer. With ReLU a unit neither grows nor fades over T steps where |u| is close to one, at most 2^(1 / T). The
authors clip u to that bound in training, which this cell does not do. Initial values: u ~ U(0, 1), or U(0, 2^(1 / max_lag))
for a longest dependency of max_lag steps; W ~ U(-1 / sqrt(I), 1 / sqrt(I)), b = 0. torchrecurrent's default phi differs: tanh.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Activation, Cell, activation, known_activation
from unfading.cells.recipe import Recipe
from unfading.errors import check_count
from unfading.initialise import uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] W x + b


class Weights(NamedTuple):
    u: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class IndRNNCell(Cell[Inputs, State, Weights]):
    """Independently recurrent cell.

    Args:
        activation: the function phi of the equation.
        max_lag: longest dependency expected, in steps: u starts in U(0, 2^(1 / max_lag)). None for U(0, 1).
    """

    paper = "Li 2018"
    recipe = Recipe(length_options=("max_lag",))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        activation: Activation = "relu",
        max_lag: int | None = None,
    ):
        super().__init__(input_size, hidden_size)
        if max_lag is not None:
            check_count("max_lag", max_lag, least=2)
        self.activation = known_activation(activation)
        self.max_lag = max_lag
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.u = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        uniform_(self.from_input.weight, 1 / math.sqrt(self.input_size), generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)
        half = 0.5 if self.max_lag is None else 0.5 * 2 ** (1 / self.max_lag)
        with torch.no_grad():
            uniform_(self.u, half, generator=generator).add_(half)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(self.u)

    def initial_state(self, batch: int) -> State:
        return State(self.u.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(activation(self.activation)(inputs.a + weights.u * state.h))
