"""Cells with a forget gate only: JANET, and the forget-gate LSTM of the STAR paper ("LSTM w/f").

    f_t = sigmoid(a_t),   a_t = W_xf x_t + W_hf h_{t-1} + b_f
    z_t = tanh(W_xz x_t + W_hz h_{t-1} + b_z)
    JANET:       h_t = f_t * h_{t-1} + (1 - sigmoid(a_t - beta)) * z_t
    ForgetLSTM:  h_t = tanh(f_t * h_{t-1} + (1 - f_t) * z_t)

JANET: van der Westhuizen & Lasenby 2018; beta = 1 in their later text and in their code, 0 in their first text and in
NRU's baseline (whose code also draws the chrono bias from integers 1..T_max). ForgetLSTM: STAR eq. 22-24, with the tanh inside
the recurrence; STAR's released code has another cell under this name, JANET with beta = 1 and a tanh on the output.
At zero, with orthogonal matrices, dh/dx of ForgetLSTM has singular values 0.5, dh/dh has them in 0..1.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell, Gains
from unfading.cells.matrix import BlockDiagonal, block_diagonal, linear, recurrent_parameter
from unfading.cells.recipe import Recipe
from unfading.errors import check_max_lag, check_number
from unfading.initialise import chrono_, orthogonal_, orthogonal_linear_, square_blocks


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 2H] before the recurrent term: f, z


class Weights(NamedTuple):
    W_h: Tensor | BlockDiagonal  # [2H, H] rows: f, z


class State(NamedTuple):
    h: Tensor  # [B, H]


class ForgetGateCell(Cell[Inputs, State, Weights]):
    """The common part of cells with a forget gate and a candidate: everything except the last line of the equation."""

    recipe = Recipe(rate=5e-3, length_options=("max_lag",))

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool, max_lag: int | None, heads: int):
        super().__init__(input_size, hidden_size)
        check_max_lag(max_lag, bias)
        self.max_lag = max_lag
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=bias)  # rows: f, z
        self.W_h = recurrent_parameter(2, hidden_size, heads)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=2, generator=generator)
        orthogonal_(self.W_h, blocks=square_blocks(self.W_h), generator=generator)
        if self.from_input.bias is not None:
            b_f, _ = self.from_input.bias.detach().chunk(2)
            if self.max_lag is None:
                b_f.fill_(1.0)
            else:
                chrono_(b_f, self.max_lag, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(block_diagonal(self.W_h, self.output_size))

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))


class JANETCell(ForgetGateCell):
    """JANET ("just another network"): the LSTM with only its forget gate.

    Args:
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1], so that units
            remember for 2 to max_lag steps. None for b_f = 1.
        beta: subtracted inside the gate on the candidate, so that more is written than forgotten.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [2H, H / heads].
    """

    paper = "Westhuizen 2018"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        max_lag: int | None = None,
        beta: float = 1.0,
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size, bias=bias, max_lag=max_lag, heads=heads)
        check_number("beta", beta)
        self.beta = beta
        if beta == 0.0:
            self.bounded_state = 1.0
            self.singular_values_at_zero = Gains(input=(0.5, 0.5), state=(0.0, 1.0))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        a, z = (inputs.a + linear(state.h, weights.W_h)).chunk(2, dim=-1)
        return State(torch.sigmoid(a) * state.h + (1 - torch.sigmoid(a - self.beta)) * torch.tanh(z))


class ForgetLSTMCell(ForgetGateCell):
    """LSTM with only a forget gate, as STAR writes it.

    Args:
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1], so that units
            remember for 2 to max_lag steps. None for b_f = 1.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [2H, H / heads].
    """

    paper = "Turkoglu 2019"
    singular_values_at_zero = Gains(input=(0.5, 0.5), state=(0.0, 1.0))
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, max_lag: int | None = None, heads: int = 1):
        super().__init__(input_size, hidden_size, bias=bias, max_lag=max_lag, heads=heads)

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        f, z = (inputs.a + linear(state.h, weights.W_h)).chunk(2, dim=-1)
        f = torch.sigmoid(f)
        return State(torch.tanh(f * state.h + (1 - f) * torch.tanh(z)))
