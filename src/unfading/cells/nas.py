"""NAS: the cell that a search over architectures found on Penn Treebank.

    x_0 .. x_7 = W x_t,   u_0 .. u_7 = U h_{t-1} + b
    r_t = tanh(sigmoid(x_0 + u_0) * ReLU(x_1 + u_1))
    s_t = tanh(sigmoid(x_2 + u_2) + ReLU(x_3 * u_3))
    v_t = tanh(tanh(x_4 + u_4) * sigmoid(x_5 + u_5))
    w_t = sigmoid(tanh(x_6 + u_6) + sigmoid(x_7 + u_7))
    c_t = tanh(r_t + c_{t-1}) * s_t
    h_t = tanh(c_t * tanh(v_t + w_t))

Zoph & Le 2017; the paper draws the cell, and the equations are those of NASCell in TensorFlow, which has the bias on the side
of the state, off by default, and an optional projection, which this cell does not have. torchrecurrent's cell differs:
x_3 + u_3 in the place of the product. Matrices start orthogonal, biases at 0.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.initialise import orthogonal_


class Inputs(NamedTuple):
    x: Tensor  # [T, B, 8H] W x


class Weights(NamedTuple):
    W_h: Tensor  # [8H, H]
    b: Tensor  # [8H]


class State(NamedTuple):
    h: Tensor  # [B, H]
    c: Tensor  # [B, H]


class NASCell(Cell[Inputs, State, Weights]):
    """Cell found by neural architecture search."""

    paper = "Zoph 2017"
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, 8 * hidden_size, bias=False)
        self.W_h = nn.Parameter(torch.empty(8 * hidden_size, hidden_size))
        self.b = nn.Parameter(torch.empty(8 * hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_(self.from_input.weight, blocks=8, generator=generator)
        orthogonal_(self.W_h, blocks=8, generator=generator)
        if self.b is not None:
            nn.init.zeros_(self.b)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(self.W_h, self.W_h.new_zeros(8 * self.output_size) if self.b is None else self.b)

    def initial_state(self, batch: int) -> State:
        zero = self.W_h.new_zeros(batch, self.output_size)
        return State(zero, zero)

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        u = linear(state.h, weights.W_h) + weights.b
        a_0, a_1, a_2, _, a_4, a_5, a_6, a_7 = (inputs.x + u).chunk(8, dim=-1)
        a_3 = inputs.x.chunk(8, dim=-1)[3] * u.chunk(8, dim=-1)[3]
        r = torch.tanh(torch.sigmoid(a_0) * torch.relu(a_1))
        s = torch.tanh(torch.sigmoid(a_2) + torch.relu(a_3))
        v = torch.tanh(torch.tanh(a_4) * torch.sigmoid(a_5))
        w = torch.sigmoid(torch.tanh(a_6) + torch.sigmoid(a_7))
        c = torch.tanh(r + state.c) * s
        return State(torch.tanh(c * torch.tanh(v + w)), c)
