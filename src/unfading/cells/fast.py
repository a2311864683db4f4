"""FastRNN and FastGRNN: a weighted residual, and a gate that shares one matrix, for models of a few kilobytes.

    FastRNN:   h_t = beta * h_{t-1} + alpha * phi(W x_t + U h_{t-1} + b)
    FastGRNN:  a_t = W x_t + U h_{t-1}
               z_t = gamma(a_t + b_z)
               h_t = z_t * h_{t-1} + (zeta * (1 - z_t) + nu) * tanh(a_t + b_h)

alpha, beta, zeta and nu are scalars in (0, 1), each the sigmoid of a parameter. Kusupati et al. 2018, with the initial values
of the authors' code: alpha = sigmoid(-3), beta = sigmoid(3), zeta = sigmoid(1), nu = sigmoid(-4), matrices (or each of their
factors) 0.1 N(0, 1), all biases 1. torchrecurrent and a port to Julia swap the initial alpha and beta.

FastGRNN shares one W and one U between gate and candidate; with ranks they are products W = W_1 W_2, U = U_1 U_2. The
paper's further steps (sparsity by hard thresholding, 8 bits) belong to training and export, not to the cell.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Activation, Cell, activation, known_activation
from unfading.cells.matrix import BlockDiagonal, LowRank, Matrix, block_diagonal, linear, recurrent_parameter
from unfading.errors import check_heads, check_rank, check_share
from unfading.initialise import gaussian_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] before the recurrent term


class Weights(NamedTuple):
    U: Tensor | BlockDiagonal  # [H, H]
    alpha: Tensor  # []
    beta: Tensor  # []


class GatedWeights(NamedTuple):
    U: Tensor | LowRank | BlockDiagonal  # [H, H]
    b_z: Tensor  # [H]
    b_h: Tensor  # [H]
    zeta: Tensor  # []
    nu: Tensor  # []


class State(NamedTuple):
    h: Tensor  # [B, H]


class FastRNNCell(Cell[Inputs, State, Weights]):
    """Recurrent cell with a weighted residual connection.

    Args:
        activation: the function phi of the equation.
        alpha: initial weight of the update, in (0, 1).
        beta: initial weight of the old state, in (0, 1).
        trainable: learn alpha and beta. Otherwise they are fixed, in [0, 1] (the incremental RNN's ablation).
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: U is
            block-diagonal, and its parameter contains the blocks, [H, H / heads].
    """

    paper = "Kusupati 2018"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        activation: Activation = "tanh",
        alpha: float = 1 / (1 + math.exp(3.0)),
        beta: float = 1 / (1 + math.exp(-3.0)),
        trainable: bool = True,
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size)
        self.activation = known_activation(activation)
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.U = recurrent_parameter(1, hidden_size, heads)
        self.start = [_logit("alpha", alpha, trainable), _logit("beta", beta, trainable)]
        if trainable:
            self.logits = nn.Parameter(torch.empty(2))  # of alpha, beta
        else:
            self.register_buffer("logits", torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        gaussian_(self.from_input.weight, 0.1, generator=generator)
        gaussian_(self.U, 0.1, generator=generator)
        if self.from_input.bias is not None:
            nn.init.ones_(self.from_input.bias)
        self.logits.detach().copy_(self.logits.new_tensor(self.start))

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(block_diagonal(self.U, self.output_size), *torch.sigmoid(self.logits))

    def initial_state(self, batch: int) -> State:
        return State(self.U.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        phi = activation(self.activation)
        return State(weights.beta * state.h + weights.alpha * phi(inputs.a + linear(state.h, weights.U)))


class FastGRNNCell(Cell[Inputs, State, GatedWeights]):
    """Gated cell with one matrix for gate and candidate.

    Args:
        rank: rank of U; None for a dense matrix.
        input_rank: rank of W; None for a dense matrix.
        gate_activation: the function gamma of the equation.
        zeta: initial zeta, in (0, 1).
        nu: initial nu, in (0, 1).
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: U is
            block-diagonal, and its parameter contains the blocks, [H, H / heads]. Not together with `rank`.
    """

    paper = "Kusupati 2018"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        rank: int | None = None,
        input_rank: int | None = None,
        gate_activation: Activation = "sigmoid",
        zeta: float = 1 / (1 + math.exp(-1.0)),
        nu: float = 1 / (1 + math.exp(4.0)),
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size)
        if rank is not None:
            check_rank("rank", rank, hidden_size)
        if input_rank is not None:
            check_rank("input_rank", input_rank, min(input_size, hidden_size))
        check_heads(heads, hidden_size)
        if heads > 1 and rank is not None:
            raise ValueError(f"heads={heads} makes U block-diagonal and rank={rank} makes it low-rank. Drop one of the two.")
        self.gate_activation = known_activation(gate_activation)
        self.start = [_logit("zeta", zeta, True), _logit("nu", nu, True)]
        self.W = Matrix(hidden_size, input_size, rank=input_rank)
        self.U = Matrix(hidden_size, hidden_size // heads, rank=rank)
        self.b = nn.Parameter(torch.empty(2, hidden_size)) if bias else None  # rows: z, h
        self.logits = nn.Parameter(torch.empty(2))  # of zeta, nu
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for factor in [*self.W.factors, *self.U.factors]:
            gaussian_(factor, 0.1, generator=generator)
        if self.b is not None:
            nn.init.ones_(self.b)
        self.logits.detach().copy_(self.logits.new_tensor(self.start))

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(linear(x, self.W()))

    def weights(self) -> GatedWeights:
        b_z, b_h = self.logits.new_zeros(2, self.output_size) if self.b is None else self.b
        U = self.U()
        U = block_diagonal(U, self.output_size) if isinstance(U, Tensor) else U
        return GatedWeights(U, b_z, b_h, *torch.sigmoid(self.logits))

    def initial_state(self, batch: int) -> State:
        return State(self.logits.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: GatedWeights) -> State:
        gamma = activation(self.gate_activation)
        a = inputs.a + linear(state.h, weights.U)
        z = gamma(a + weights.b_z)
        return State(z * state.h + (weights.zeta * (1 - z) + weights.nu) * torch.tanh(a + weights.b_h))


def _logit(name: str, share: float, trainable: bool) -> float:
    check_share(name, share)
    if trainable and share in (0.0, 1.0):
        raise ValueError(f"{name}={share} is an end of a sigmoid's range and cannot be learned; take a value inside (0, 1).")
    if share in (0.0, 1.0):
        return math.inf if share else -math.inf
    return math.log(share / (1 - share))
