"""Networks with singular values near one: SpectralRNN by construction, SoftOrthogonalRNN by a penalty.

    h_t = phi(W_x x_t + W_h h_{t-1} + b)

SpectralRNN (Zhang et al. 2018): W_h = U S V^T, with U and V products of `reflectors` Householder reflections each, and
S = 1 + 2 margin (sigmoid(p) - 1/2), so that every singular value lies in 1 +- margin. phi = ReLU. The k-th reflection leaves
the first k - 1 coordinates unchanged, as in the authors' code. A product H_1 ... H_r is I - Y T^-1 Y^T, where Y has the
reflections' vectors as columns and T = striu(Y^T Y) + diag(Y^T Y) / 2, so that it needs one small triangular solve.
SoftOrthogonalRNN (Vorontsov et al. 2017): W_h is free, and `penalty()` = strength * ||W_h^T W_h - I||_F^2 is added to the loss.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Activation, Cell, activation, at_least_float32, known_activation
from unfading.cells.elman import ElmanCell
from unfading.cells.matrix import linear
from unfading.errors import check_number, check_rank, check_share
from unfading.initialise import gaussian_, orthogonal_linear_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] W_x x + b


class Weights(NamedTuple):
    W_h: Tensor  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class SpectralRNNCell(Cell[Inputs, State, Weights]):
    """Recurrent cell with bounded singular values.

    Args:
        reflectors: number of reflections in U and in V; None takes a quarter of the hidden size, rounded up, as the authors do.
        margin: largest distance of a singular value from one.
        activation: the function phi of the equation.
    """

    paper = "Zhang 2018"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        reflectors: int | None = None,
        margin: float = 0.01,
        activation: Activation = "relu",
    ):
        super().__init__(input_size, hidden_size)
        reflectors = math.ceil(hidden_size / 4) if reflectors is None else reflectors
        check_rank("reflectors", reflectors, hidden_size)
        check_share("margin", margin)
        self.reflectors, self.margin = reflectors, margin
        self.activation = known_activation(activation)
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        free = hidden_size * reflectors - reflectors * (reflectors - 1) // 2
        self.U = nn.Parameter(torch.empty(free))  # the reflections' vectors, on and below the diagonal, row by row
        self.V = nn.Parameter(torch.empty(free))
        self.p = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=1, generator=generator)
        gaussian_(self.U, 1.0, generator=generator)
        gaussian_(self.V, 1.0, generator=generator)
        nn.init.zeros_(self.p)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        U, V = self._reflect(self.U), self._reflect(self.V)
        S = 1 + 2 * self.margin * (torch.sigmoid(self.p) - 0.5)
        return Weights(((U * S) @ V.T).to(self.p.dtype))

    def initial_state(self, batch: int) -> State:
        return State(self.p.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        phi = activation(self.activation)
        return State(phi(inputs.a + linear(state.h, weights.W_h)))

    def _reflect(self, entries: Tensor) -> Tensor:
        """The product of the reflections, [H, H]."""
        entries = at_least_float32(entries)
        H, r = self.output_size, self.reflectors
        rows, columns = torch.tril_indices(H, r, device=entries.device)
        Y = entries.new_zeros(H, r).index_put((rows, columns), entries)
        gram = Y.T @ Y
        T = gram.triu(1) + torch.diag(gram.diagonal() / 2)
        eye = torch.eye(H, dtype=Y.dtype, device=Y.device)
        return eye - Y @ torch.linalg.solve_triangular(T, Y.T, upper=True)


class SoftOrthogonalRNNCell(ElmanCell):
    """Plain cell with a penalty that keeps its recurrent matrix nearly orthogonal.

    Args:
        activation: the function phi of the equation.
        normalise: layer norm inside the step.
        strength: weight of the penalty.
    """

    paper = "Vorontsov 2017"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        activation: Activation = "tanh",
        normalise: bool = False,
        strength: float = 0.001,
    ):
        super().__init__(input_size, hidden_size, bias=bias, activation=activation, normalise=normalise)
        check_number("strength", strength)
        self.strength = strength

    def penalty(self) -> Tensor:
        eye = torch.eye(self.output_size, dtype=self.W_h.dtype, device=self.W_h.device)
        return self.strength * (self.W_h.T @ self.W_h - eye).square().sum()
