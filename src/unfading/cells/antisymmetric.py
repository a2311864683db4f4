"""AntisymmetricRNN: Euler steps of an ODE with an antisymmetric recurrent matrix and a little damping.

    A   = S - gamma I,   S = -S^T                        eigenvalues -gamma + i R
    h_t = h_{t-1} + epsilon * tanh(A h_{t-1} + V x_t + b)
    gated:  z_t = sigmoid(A h_{t-1} + V_z x_t + b_z)
            h_t = h_{t-1} + epsilon * z_t * tanh(A h_{t-1} + V x_t + b)

Chang et al. 2019. Both lines of the gated form share one matrix. The parameters are the n (n - 1) / 2 free entries of S, as
STAR's "10k" counts them (9,674 with 128 units and a head of 10; gated 9,930); public ports store n^2. Initial values:
V ~ N(0, 1 / I), the entries of S are differences of two N(0, sigma^2 / n), biases 0. No code was released; the paper searches
epsilon and gamma on grids. An Euler step shrinks a mode of frequency w only if epsilon (gamma^2 + w^2) <= 2 gamma, which does
not hold for all modes with the defaults.
"""

import math
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.errors import check_number
from unfading.initialise import gaussian_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] V x + b


class GatedInputs(NamedTuple):
    a: Tensor  # [T, B, H] V x + b
    z: Tensor  # [T, B, H] V_z x + b_z


class Weights(NamedTuple):
    A: Tensor  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


AnyInputs = TypeVar("AnyInputs", Inputs, GatedInputs)


class SkewCell(Cell[AnyInputs, State, Weights]):
    """The common part of both forms: everything except the gate."""

    paper = "Chang 2019"
    blocks: ClassVar[int] = 1
    """Matrices that read the input: V, and in the gated form V_z below it."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        epsilon: float = 0.1,
        gamma: float = 0.01,
        sigma: float = 1.0,
    ):
        super().__init__(input_size, hidden_size)
        for name, value in (("epsilon", epsilon), ("gamma", gamma), ("sigma", sigma)):
            check_number(name, value)
        self.epsilon, self.gamma, self.sigma = epsilon, gamma, sigma
        self.from_input = nn.Linear(input_size, self.blocks * hidden_size, bias=bias)
        self.skew = nn.Parameter(torch.empty(hidden_size * (hidden_size - 1) // 2))  # above the diagonal, row by row
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        gaussian_(self.from_input.weight, 1 / math.sqrt(self.input_size), generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)
        gaussian_(self.skew, self.sigma * math.sqrt(2 / self.output_size), generator=generator)

    def weights(self) -> Weights:
        S = skew_matrix(self.skew, self.output_size)
        return Weights(S - self.gamma * torch.eye(self.output_size, dtype=S.dtype, device=S.device))

    def initial_state(self, batch: int) -> State:
        return State(self.skew.new_zeros(batch, self.output_size))


class AntisymmetricRNNCell(SkewCell[Inputs]):
    """Antisymmetric recurrent cell.

    Args:
        epsilon: step size; 0.01, 0.1 and 1 are the paper's grid.
        gamma: damping.
        sigma: initial scale of the recurrent matrix.
    """

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(state.h + self.epsilon * torch.tanh(inputs.a + linear(state.h, weights.A)))


class GatedAntisymmetricRNNCell(SkewCell[GatedInputs]):
    """Antisymmetric recurrent cell with a gate on its update.

    Args:
        epsilon: step size; 0.01, 0.1 and 1 are the paper's grid.
        gamma: damping.
        sigma: initial scale of the recurrent matrix.
    """

    blocks = 2

    def project(self, x: Tensor, start: int = 0) -> GatedInputs:
        return GatedInputs(*self.from_input(x).chunk(2, dim=-1))

    def step(self, inputs: GatedInputs, state: State, weights: Weights) -> State:
        turn = linear(state.h, weights.A)
        z = torch.sigmoid(turn + inputs.z)
        return State(state.h + self.epsilon * z * torch.tanh(turn + inputs.a))


def skew_matrix(entries: Tensor, size: int) -> Tensor:
    """The skew-symmetric matrix with `entries` above its diagonal, row by row."""
    rows, columns = torch.triu_indices(size, size, 1, device=entries.device)
    upper = entries.new_zeros(size, size).index_put((rows, columns), entries)
    return upper - upper.T
