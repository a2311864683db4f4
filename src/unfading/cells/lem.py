"""LEM, long expressive memory: two coupled states, each with a step size of its own that depends on input and state.

    d_t = dt sigmoid(W_d y_{t-1} + V_d x_t + b_d)
    e_t = dt sigmoid(W_e y_{t-1} + V_e x_t + b_e)
    z_t = (1 - d_t) * z_{t-1} + d_t * tanh(W_z y_{t-1} + V_z x_t + b_z)
    y_t = (1 - e_t) * y_{t-1} + e_t * tanh(W_y z_t + V_y x_t + b_y)

Rusch et al. 2022, eq. 3. y is the output. All values start from U(-1 / sqrt(H), 1 / sqrt(H)), as in the authors' code, which
has a second bias in each product with a state; here there is one bias per line in the place of their sum, which starts with
half the variance. torchrecurrent's y_t differs: it reads z_{t-1}; the paper and the authors' code read z_t.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.errors import check_positive
from unfading.initialise import uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 3H] V x + b of d, e, z
    a_y: Tensor  # [T, B, H] V_y x + b_y


class Weights(NamedTuple):
    W: Tensor  # [3H, H] rows: d, e, z
    W_y: Tensor  # [H, H]


class State(NamedTuple):
    y: Tensor  # [B, H]
    z: Tensor  # [B, H]


class LEMCell(Cell[Inputs, State, Weights]):
    """Long expressive memory.

    Args:
        dt: largest step size; with 1 both states are averages and stay within -1 and 1.
    """

    paper = "Rusch 2022"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, dt: float = 1.0):
        super().__init__(input_size, hidden_size)
        check_positive("dt", dt)
        self.dt = dt
        if dt <= 1.0:
            self.bounded_state = 1.0
        self.from_input = nn.Linear(input_size, 4 * hidden_size, bias=bias)  # rows: d, e, z, y
        self.W = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.W_y = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for parameter in self.parameters():
            uniform_(parameter, 1 / math.sqrt(self.output_size), generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(*self.from_input(x).split([3 * self.output_size, self.output_size], dim=-1))

    def weights(self) -> Weights:
        return Weights(self.W, self.W_y)

    def initial_state(self, batch: int) -> State:
        return State(self.W.new_zeros(batch, self.output_size), self.W.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        d, e, z = (inputs.a + linear(state.y, weights.W)).chunk(3, dim=-1)
        d, e = self.dt * torch.sigmoid(d), self.dt * torch.sigmoid(e)
        z = (1 - d) * state.z + d * torch.tanh(z)
        return State((1 - e) * state.y + e * torch.tanh(inputs.a_y + linear(z, weights.W_y)), z)
