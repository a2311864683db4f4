"""GRUs with one gate: MGU, whose gate also resets, and LiGRU, without a reset and with ReLU.

    MGU:    f_t = sigmoid(W_f x_t + U_f h_{t-1} + b_f)
            n_t = tanh(W_n x_t + U_n (f_t * h_{t-1}) + b_n)
            h_t = (1 - f_t) * h_{t-1} + f_t * n_t
    LiGRU:  z_t = sigmoid(W_z x_t + U_z h_{t-1} + b_z)
            n_t = ReLU(W_n x_t + U_n h_{t-1} + b_n)
            h_t = z_t * h_{t-1} + (1 - z_t) * n_t

MGU: Zhou et al. 2016, eq. 6 to 8. LiGRU: Ravanelli et al. 2018, eq. 7 to 9; the authors normalise both products with the input
over the batch, which a cell does not do. Matrices start orthogonal, biases at 0.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.initialise import orthogonal_, orthogonal_linear_, square_blocks


class Inputs(NamedTuple):
    gate: Tensor  # [T, B, H] before the recurrent term
    n: Tensor  # [T, B, H] before the recurrent term


class Weights(NamedTuple):
    U: Tensor  # [H, H] of the gate
    U_n: Tensor  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class OneGateCell(Cell[Inputs, State, Weights]):
    """The common part of both forms: everything except the equation."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=bias)  # rows: gate, n
        self.W_h = nn.Parameter(torch.empty(2 * hidden_size, hidden_size))  # rows: gate, n
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=2, generator=generator)
        orthogonal_(self.W_h, blocks=square_blocks(self.W_h), generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(*self.from_input(x).chunk(2, dim=-1))

    def weights(self) -> Weights:
        return Weights(*self.W_h.chunk(2))

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))


class MGUCell(OneGateCell):
    """Minimal gated unit."""

    paper = "Zhou 2016"
    bounded_state = 1.0

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        f = torch.sigmoid(inputs.gate + linear(state.h, weights.U))
        n = torch.tanh(inputs.n + linear(f * state.h, weights.U_n))
        return State((1 - f) * state.h + f * n)


class LiGRUCell(OneGateCell):
    """Light gated recurrent unit."""

    paper = "Ravanelli 2018"

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        z = torch.sigmoid(inputs.gate + linear(state.h, weights.U))
        n = torch.relu(inputs.n + linear(state.h, weights.U_n))
        return State(z * state.h + (1 - z) * n)
