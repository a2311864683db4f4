"""MinGRU and MinLSTM: gates and candidate read the input only, so the recurrence is linear and diagonal.

    MinGRU:   z_t = sigmoid(W_z x_t + b_z)
              h_t = (1 - z_t) * h_{t-1} + z_t * g(W_h x_t + b_h)
    MinLSTM:  f_t = sigmoid(W_f x_t + b_f),   i_t = sigmoid(W_i x_t + b_i)
              h_t = f_t / (f_t + i_t) * h_{t-1} + i_t / (f_t + i_t) * g(W_h x_t + b_h)

Feng et al. 2024, section 3, with g(a) = a; the form that the authors compute in logarithms has
g(a) = a + 1/2 for a >= 0 and sigmoid(a) below, which is positive (`positive=True`). `project` computes the matrix products of
the whole sequence. The gates are computed in the step, so that a compiled loop reads their arguments and nothing else. A single
layer cannot look at its state to decide what to keep; the paper stacks several. Matrices start orthogonal. b_z = -1 and
b_f = 1, so that a unit begins by remembering; the paper does not say how its biases start, and has no `max_lag`.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.recipe import Recipe
from unfading.errors import check_max_lag
from unfading.initialise import chrono_, orthogonal_linear_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 2 H] or [T, B, 3 H]: the gates before their sigmoid, then the candidate


class Weights(NamedTuple):
    """Empty: the recurrence has no parameters."""


class State(NamedTuple):
    h: Tensor  # [B, H]


class LinearGateCell(Cell[Inputs, State, Weights]):
    """The common part of both forms: everything except the gates."""

    paper = "Feng 2024"
    recipe = Recipe(length_options=("max_lag",))

    rows: int
    """H-fold rows of the matrix of the input."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        positive: bool = False,
        max_lag: int | None = None,
    ):
        super().__init__(input_size, hidden_size)
        check_max_lag(max_lag, bias)
        self.positive, self.max_lag = positive, max_lag
        self.from_input = nn.Linear(input_size, self.rows * hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=self.rows, generator=generator)
        if self.from_input.bias is not None:
            self.initial_gates(list(self.from_input.bias.detach().chunk(self.rows)), generator)

    @abstractmethod
    def initial_gates(self, biases: list[Tensor], generator: Generator | None) -> None:
        """Initialise the biases of the gates, which come before that of the candidate."""

    def candidate(self, a: Tensor) -> Tensor:
        """g(a)"""
        return torch.where(a >= 0, a + 0.5, torch.sigmoid(a)) if self.positive else a

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights()

    def initial_state(self, batch: int) -> State:
        return State(self.from_input.weight.new_zeros(batch, self.output_size))


class MinGRUCell(LinearGateCell):
    """Minimal gated recurrent unit.

    Args:
        positive: the candidate is g(a) of the authors' form in logarithms instead of a.
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_z = -log U[1, max_lag - 1], so that units
            remember for 2 to max_lag steps. None for b_z = -1.
    """

    rows = 2  # z, h

    def initial_gates(self, biases: list[Tensor], generator: Generator | None) -> None:
        b_z, _ = biases
        if self.max_lag is None:
            b_z.fill_(-1.0)
        else:
            chrono_(b_z, self.max_lag, generator=generator).neg_()

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        z, a = inputs.a.chunk(2, dim=-1)
        return State(torch.sigmoid(-z) * state.h + torch.sigmoid(z) * self.candidate(a))


class MinLSTMCell(LinearGateCell):
    """Minimal long short-term memory.

    Args:
        positive: the candidate is g(a) of the authors' form in logarithms instead of a.
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1] and b_i = -b_f, so
            that units remember for 2 to max_lag steps. None for b_f = 1 and b_i = 0.
    """

    rows = 3  # f, i, h

    def initial_gates(self, biases: list[Tensor], generator: Generator | None) -> None:
        b_f, b_i, _ = biases
        if self.max_lag is None:
            b_f.fill_(1.0)
        else:
            chrono_(b_f, self.max_lag, generator=generator)
            b_i.copy_(-b_f)

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        f, i, a = inputs.a.chunk(3, dim=-1)
        # f / (f + i) = sigmoid(log f - log i), which has no quotient of two small numbers.
        keep = torch.nn.functional.logsigmoid(f) - torch.nn.functional.logsigmoid(i)
        return State(torch.sigmoid(keep) * state.h + torch.sigmoid(-keep) * self.candidate(a))
