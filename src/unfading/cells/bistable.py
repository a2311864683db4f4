"""Bistable cells: units that can hold one of two values without input. BR, and NBR, whose units control each other's gates.

    BR:   a_t = 1 + tanh(U_a x_t + w_a * h_{t-1} + b_a)
          c_t = sigmoid(U_c x_t + w_c * h_{t-1} + b_c)
          h_t = c_t * h_{t-1} + (1 - c_t) * tanh(U x_t + a_t * h_{t-1})
    NBR:  the same with W_a h_{t-1} and W_c h_{t-1} in the place of the products by w_a and w_c

Vecoven et al. 2021, who call them BRC and nBRC. A unit feeds itself with weight a in (0, 2): without input and with a fixed a,
0 is its only fixed point for a <= 1, and for a > 1 there are two stable ones, the solutions of h = tanh(a h) beside 0. The
paper writes no biases; those of a and c are in the authors' code, and so are the initial values: input matrices and W
Glorot-uniform, w = 1, biases 0. torchrecurrent's cells differ: they have a bias in the last line too, and w ~ N(0, 1).
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.initialise import uniform_


class Inputs(NamedTuple):
    gates: Tensor  # [T, B, 2H] before the recurrent term: a, c
    n: Tensor  # [T, B, H] U x


class Weights(NamedTuple):
    w: Tensor  # [2H] w_a, w_c; of NBR [2H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class BistableCell(Cell[Inputs, State, Weights]):
    """The common part of both forms: everything except how the gates read the state."""

    paper = "Vecoven 2021"
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=bias)  # rows: a, c
        self.to_candidate = nn.Linear(input_size, hidden_size, bias=False)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for layer in (self.from_input, self.to_candidate):
            uniform_(layer.weight, math.sqrt(6 / (self.input_size + self.output_size)), generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x), self.to_candidate(x))

    def initial_state(self, batch: int) -> State:
        return State(self.to_candidate.weight.new_zeros(batch, self.output_size))

    def update(self, gates: Tensor, inputs: Inputs, state: State) -> State:
        """The new state, from the arguments of both gates."""
        a, c = gates.chunk(2, dim=-1)
        a, c = 1 + torch.tanh(a), torch.sigmoid(c)
        return State(c * state.h + (1 - c) * torch.tanh(inputs.n + a * state.h))


class BRCell(BistableCell):
    """Bistable recurrent cell, without a recurrent matrix."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size, bias=bias)
        self.w = nn.Parameter(torch.empty(2 * hidden_size))  # a, c
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        nn.init.ones_(self.w)

    def weights(self) -> Weights:
        return Weights(self.w)

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return self.update(inputs.gates + weights.w * torch.cat([state.h, state.h], dim=-1), inputs, state)


class NBRCell(BistableCell):
    """Neuromodulated bistable recurrent cell: its gates read all units."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size, bias=bias)
        self.W_h = nn.Parameter(torch.empty(2 * hidden_size, hidden_size))  # rows: a, c
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        uniform_(self.W_h, math.sqrt(3 / self.output_size), generator=generator)

    def weights(self) -> Weights:
        return Weights(self.W_h)

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return self.update(inputs.gates + linear(state.h, weights.w), inputs, state)
