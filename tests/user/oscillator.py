"""A user's cell whose state holds pairs: a damped rotation of each pair, as in linear recurrent units."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

import unfading


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 2 H] real parts, then imaginary parts


class State(NamedTuple):
    s: Tensor  # [B, 2 H]


class Weights(NamedTuple):
    radius: Tensor  # [H]
    angle: Tensor  # [H]


class RotatingCell(unfading.Cell[Inputs, State, Weights]):
    """s_t = radius exp(i angle) s_{t-1} + W x_t, with complex s."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=bias)
        self.angle = nn.Parameter(torch.linspace(0.1, 1.5, hidden_size))
        self.logit = nn.Parameter(torch.linspace(1.0, 3.0, hidden_size))

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(torch.sigmoid(self.logit), self.angle)

    def initial_state(self, batch: int) -> State:
        return State(self.angle.new_zeros(batch, 2 * self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        re, im = state.s.chunk(2, dim=-1)
        c, d = weights.radius * torch.cos(weights.angle), weights.radius * torch.sin(weights.angle)
        return State(torch.cat([c * re - d * im, d * re + c * im], dim=-1) + inputs.a)

    def output(self, state: State) -> Tensor:
        return state.s[..., : self.output_size]
