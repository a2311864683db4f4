"""SCRN, the structurally constrained recurrent network: a plain network beside units that are slow averages of the input.

    s_t = alpha s_{t-1} + (1 - alpha) B x_t
    h_t = sigmoid(A x_t + R h_{t-1} + P s_t + b)
    y_t = U h_t + V s_t + c

Mikolov et al. 2014, eq. 3 to 5; y is the output. The slow units are a diagonal linear recurrence with a fixed factor. Matrices
start at U(-1 / sqrt(n), 1 / sqrt(n)) for n inputs, biases at 0. torchrecurrent's cell differs: it reads y_{t-1} in the place of
h_{t-1}, applies tanh to y, learns alpha, and has as many slow units as hidden ones.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.errors import check_count, check_share
from unfading.initialise import uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] A x + b
    s: Tensor  # [T, B, C] (1 - alpha) B x


class Weights(NamedTuple):
    R: Tensor  # [H, H]
    P: Tensor  # [H, C]


class State(NamedTuple):
    h: Tensor  # [B, H]
    s: Tensor  # [B, C]


class SCRNCell(Cell[Inputs, State, Weights]):
    """Structurally constrained recurrent network.

    Args:
        context_size: C, the number of slow units.
        alpha: the share of a slow unit's value that it keeps at each step, in [0, 1).
    """

    paper = "Mikolov 2014"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, context_size: int = 40, alpha: float = 0.95):
        super().__init__(input_size, hidden_size)
        check_count("context_size", context_size)
        check_share("alpha", alpha)
        self.alpha, self.context_size = alpha, context_size
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.to_context = nn.Linear(input_size, context_size, bias=False)
        self.R = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.P = nn.Parameter(torch.empty(hidden_size, context_size))
        self.to_output = nn.Linear(hidden_size + context_size, hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for W in (self.from_input.weight, self.to_context.weight, self.R, self.P, self.to_output.weight):
            uniform_(W, 1 / math.sqrt(W.shape[1]), generator=generator)
        for layer in (self.from_input, self.to_output):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x), (1 - self.alpha) * self.to_context(x))

    def weights(self) -> Weights:
        return Weights(self.R, self.P)

    def initial_state(self, batch: int) -> State:
        return State(self.R.new_zeros(batch, self.output_size), self.R.new_zeros(batch, self.context_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        s = self.alpha * state.s + inputs.s
        return State(torch.sigmoid(inputs.a + linear(state.h, weights.R) + linear(s, weights.P)), s)

    def output(self, state: State) -> Tensor:
        return self.to_output(torch.cat([state.h, state.s], dim=-1))
