"""LipschitzRNN: Euler steps of an ODE with a linear part, whose matrices mix a symmetric and a skew-symmetric one.

    A   = (1 - beta) (M_A + M_A^T) + beta (M_A - M_A^T) - gamma I,   W likewise from M_W
    h_t = h_{t-1} + epsilon (A h_{t-1} + tanh(W h_{t-1} + U x_t + b))

Erichson et al. 2021, eq. 1 to 3. The paper has a beta and a gamma for each matrix; here, as in the authors' code, both share
them. The skew part carries memory, gamma and the symmetric part damp it. Initial values: entries of M_A and M_W from
N(0, (sigma / H)^2), U Xavier-normal, b = 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.errors import check_number, check_share
from unfading.initialise import gaussian_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] U x + b


class Weights(NamedTuple):
    A: Tensor  # [H, H]
    W: Tensor  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class LipschitzRNNCell(Cell[Inputs, State, Weights]):
    """Lipschitz recurrent cell.

    Args:
        epsilon: step size.
        beta: share of the skew-symmetric part, from 0 to 1; 0.5 leaves M as it is.
        gamma: damping.
        sigma: initial scale of the recurrent matrices.
    """

    paper = "Erichson 2021"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        epsilon: float = 0.03,
        beta: float = 0.75,
        gamma: float = 0.001,
        sigma: float = 1.0,
    ):
        super().__init__(input_size, hidden_size)
        check_share("beta", beta)
        for name, value in (("epsilon", epsilon), ("gamma", gamma), ("sigma", sigma)):
            check_number(name, value)
        self.epsilon, self.beta, self.gamma, self.sigma = epsilon, beta, gamma, sigma
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.M_A = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.M_W = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        gaussian_(self.from_input.weight, math.sqrt(2 / (self.input_size + self.output_size)), generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)
        for M in (self.M_A, self.M_W):
            gaussian_(M, self.sigma / self.output_size, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(self._mixed(self.M_A), self._mixed(self.M_W))

    def _mixed(self, M: Tensor) -> Tensor:
        """(1 - beta) (M + M^T) + beta (M - M^T) - gamma I"""
        eye = torch.eye(self.output_size, dtype=M.dtype, device=M.device)
        return M + (1 - 2 * self.beta) * M.T - self.gamma * eye

    def initial_state(self, batch: int) -> State:
        return State(self.M_A.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        slope = linear(state.h, weights.A) + torch.tanh(inputs.a + linear(state.h, weights.W))
        return State(state.h + self.epsilon * slope)
