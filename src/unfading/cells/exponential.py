"""ExpRNN: a plain network with a real orthogonal recurrent matrix, the exponential of a skew-symmetric one.

    W   = exp(S),   S = -S^T
    h_t = modReLU(W h_{t-1} + V x_t, b),   modReLU(z, b) = sign(z) ReLU(|z| + b)

Lezcano-Casado & Martinez-Rubio 2019. Every rotation is exp(S) of some S, so the parametrisation loses no matrix of determinant
one, and training by plain gradient descent keeps W orthogonal. Initial values, as in the authors' code for MNIST: S has 2 x 2
blocks [[0, s], [-s, 0]] on its diagonal with s = -tan(u / 2), u ~ U(0, pi / 2), and zeros elsewhere; V Kaiming-normal,
b ~ U(-0.01, 0.01). The authors train S at a tenth of the learning rate.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.antisymmetric import skew_matrix
from unfading.cells.base import Cell, at_least_float32
from unfading.cells.matrix import linear
from unfading.cells.recipe import Recipe
from unfading.cells.rotation import modrelu
from unfading.initialise import gaussian_, uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] V x


class Weights(NamedTuple):
    W: Tensor  # [H, H]
    b: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class ExpRNNCell(Cell[Inputs, State, Weights]):
    """Orthogonal recurrent network by the matrix exponential."""

    paper = "Lezcano-Casado 2019"
    orthogonal_recurrence = "W"
    recipe = Recipe(rates={"skew": 0.1})

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, hidden_size, bias=False)
        self.skew = nn.Parameter(torch.empty(hidden_size * (hidden_size - 1) // 2))  # above the diagonal, row by row
        self.b = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        gaussian_(self.from_input.weight, math.sqrt(2 / self.input_size), generator=generator)
        if self.b is not None:
            uniform_(self.b, 0.01, generator=generator)
        H = self.output_size
        u = uniform_(self.skew.new_empty(H // 2), math.pi / 4, generator=generator) + math.pi / 4
        # Entry (i, i + 1) stands i (2 H - i - 1) / 2 places after the first.
        rows = torch.arange(0, H - 1, 2, device=self.skew.device)
        with torch.no_grad():
            self.skew.zero_()[rows * (2 * H - rows - 1) // 2] = -torch.tan(u / 2)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        W = torch.matrix_exp(skew_matrix(at_least_float32(self.skew), self.output_size)).to(self.skew.dtype)
        return Weights(W, W.new_zeros(self.output_size) if self.b is None else self.b)

    def initial_state(self, batch: int) -> State:
        return State(self.from_input.weight.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(modrelu(inputs.a + linear(state.h, weights.W), weights.b))
