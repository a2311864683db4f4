"""SLSTM: the LSTM with exponential gates, a normaliser and heads.

    z_t = tanh(W_z x_t + R_z h_{t-1} + b_z)             o_t = sigmoid(W_o x_t + R_o h_{t-1} + b_o)
    i_t = exp(W_i x_t + R_i h_{t-1} + b_i)              f_t = sigmoid(...) or exp(W_f x_t + R_f h_{t-1} + b_f)
    c_t = f_t * c_{t-1} + i_t * z_t,   n_t = f_t * n_{t-1} + i_t,   h_t = o_t * c_t / n_t

Beck et al. 2024, eq. 8 to 14: c / n is an average of the z with weights that may grow without bound, so a late step can
outweigh all before it. c and n are stored divided by exp(m_t), m_t = max(log f_t + m_{t-1}, log i_t), which cancels in c / n
and keeps both within floating point (eq. 15 to 17); n is kept above 1e-30, where it has underflowed. R is block-diagonal with
`heads` blocks. Matrices start orthogonal; b_f = 3 to 6 in equal steps over the units, as in the authors' code, other biases 0.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import logsigmoid

from unfading.cells.base import Cell
from unfading.cells.matrix import BlockDiagonal, block_diagonal, linear, recurrent_parameter
from unfading.initialise import orthogonal_, orthogonal_linear_, square_blocks

LEAST = 1e-30


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 4H] before the recurrent term: i, f, z, o


class Weights(NamedTuple):
    R: Tensor | BlockDiagonal  # [4H, H] rows: i, f, z, o


class State(NamedTuple):
    h: Tensor  # [B, H]
    c: Tensor  # [B, H] divided by exp(m)
    n: Tensor  # [B, H] divided by exp(m)
    m: Tensor  # [B, H]


class SLSTMCell(Cell[Inputs, State, Weights]):
    """LSTM with exponential gates.

    Args:
        exponential_forget: f_t = exp(...) instead of sigmoid(...).
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [4H, H / heads].
    """

    paper = "Beck 2024"
    bounded_state = 1.0

    def __init__(
        self, input_size: int, hidden_size: int, *, bias: bool = True, exponential_forget: bool = False, heads: int = 1
    ):
        super().__init__(input_size, hidden_size)
        self.exponential_forget = exponential_forget
        self.from_input = nn.Linear(input_size, 4 * hidden_size, bias=bias)  # rows: i, f, z, o
        self.W_h = recurrent_parameter(4, hidden_size, heads)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=4, generator=generator)
        orthogonal_(self.W_h, blocks=square_blocks(self.W_h), generator=generator)
        if self.from_input.bias is not None:
            _, b_f, _, _ = self.from_input.bias.detach().chunk(4)
            b_f.copy_(torch.linspace(3.0, 6.0, self.output_size))

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(block_diagonal(self.W_h, self.output_size))

    def initial_state(self, batch: int) -> State:
        return State(*(self.W_h.new_zeros(batch, self.output_size) for _ in State._fields))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        i, f, z, o = (inputs.a + linear(state.h, weights.R)).chunk(4, dim=-1)
        f = state.m + (f if self.exponential_forget else logsigmoid(f))
        m = torch.maximum(f, i)
        f, i = torch.exp(f - m), torch.exp(i - m)
        c = f * state.c + i * torch.tanh(z)
        n = f * state.n + i
        return State(torch.sigmoid(o) * c / n.clamp(min=LEAST), c, n, m)
