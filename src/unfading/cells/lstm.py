"""LSTM, and LSTM with peepholes.

    i_t = sigmoid(W_xi x_t + W_hi h_{t-1} + b_i)       input gate
    f_t = sigmoid(W_xf x_t + W_hf h_{t-1} + b_f)       forget gate
    z_t = tanh(W_xz x_t + W_hz h_{t-1} + b_z)          candidate
    o_t = sigmoid(W_xo x_t + W_ho h_{t-1} + b_o)       output gate
    c_t = f_t * c_{t-1} + i_t * z_t
    h_t = o_t * tanh(c_t)

Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al. 2000; STAR eq. 16-21 (its eq. 9 misprints W_xi for
W_hi). One bias per gate, as the papers count; `nn.LSTM` stores two. Claim (STAR): at zero, with orthogonal matrices,
dh/dx and dh/dh with c fixed have all singular values 0.25; the Jacobian of the whole state (h, c) does not.

With `normalise=True` a layer norm (`layer_norm.py`) acts on each gate before its sigmoid or tanh.

Peepholes (Gers & Schmidhuber 2000) let the gates read the cell state: p_i * c_{t-1} and p_f * c_{t-1} inside i and f,
p_o * c_t inside o. NRU's LSTM baseline has them: its parameter counts agree only with peepholes.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell, Gains
from unfading.cells.layer_norm import LayerNorm, Normalise, Plain
from unfading.cells.matrix import BlockDiagonal, block_diagonal, linear, recurrent_parameter
from unfading.cells.recipe import Recipe
from unfading.errors import check_max_lag
from unfading.initialise import chrono_, orthogonal_, orthogonal_linear_, square_blocks, uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 4H] gates before the recurrent term: i, f, z, o


class Weights(NamedTuple):
    W_h: Tensor | BlockDiagonal  # [4H, H] rows: i, f, z, o
    norm: LayerNorm | Plain


class PeepholeWeights(NamedTuple):
    W_h: Tensor | BlockDiagonal  # [4H, H] rows: i, f, z, o
    p_i: Tensor  # [H]
    p_f: Tensor  # [H]
    p_o: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, H]
    c: Tensor  # [B, H]


AnyWeights = TypeVar("AnyWeights", Weights, PeepholeWeights)


class _Gates(Cell[Inputs, State, AnyWeights]):
    """The common part of both forms: the input matrix, the recurrent matrix, and their initial values."""

    singular_values_at_zero: Gains | None = Gains(input=(0.25, 0.25), state=(0.25, 0.25))
    bounded_state = 1.0
    recipe = Recipe(rate=5e-3, length_options=("max_lag",))

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool, max_lag: int | None, heads: int):
        super().__init__(input_size, hidden_size)
        check_max_lag(max_lag, bias)
        self.max_lag = max_lag
        self.from_input = nn.Linear(input_size, 4 * hidden_size, bias=bias)  # rows: i, f, z, o
        self.W_h = recurrent_parameter(4, hidden_size, heads)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=4, generator=generator)
        orthogonal_(self.W_h, blocks=square_blocks(self.W_h), generator=generator)
        if self.from_input.bias is not None:
            b_i, b_f, _, _ = self.from_input.bias.detach().chunk(4)
            if self.max_lag is None:
                b_f.fill_(1.0)
            else:
                chrono_(b_f, self.max_lag, generator=generator)
                b_i.copy_(-b_f)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def initial_state(self, batch: int) -> State:
        zero = self.W_h.new_zeros(batch, self.output_size)
        return State(zero, zero)


class LSTMCell(_Gates[Weights]):
    """Long short-term memory.

    Args:
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1] and b_i = -b_f, so
            that units remember for 2 to max_lag steps. None for b_f = 1 and other biases 0.
        normalise: layer norm of each gate inside the step.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [4H, H / heads].
    """

    paper = "Hochreiter 1997"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        max_lag: int | None = None,
        normalise: bool = False,
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size, bias=bias, max_lag=max_lag, heads=heads)
        self.norm = Normalise(4, hidden_size, on=normalise)
        if normalise:
            self.singular_values_at_zero = None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        self.norm.reset_parameters()

    def weights(self) -> Weights:
        return Weights(block_diagonal(self.W_h, self.output_size), self.norm())

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        i, f, z, o = weights.norm(inputs.a + linear(state.h, weights.W_h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * state.c + torch.sigmoid(i) * torch.tanh(z)
        return State(torch.sigmoid(o) * torch.tanh(c), c)


class PeepholeLSTMCell(_Gates[PeepholeWeights]):
    """Long short-term memory whose gates read the cell state.

    The peepholes start in U(-0.1, 0.1); NRU's released code draws them from U(0, 1).

    Args:
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_f = log U[1, max_lag - 1] and b_i = -b_f, so
            that units remember for 2 to max_lag steps. None for b_f = 1 and other biases 0.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [4H, H / heads].
    """

    paper = "Gers 2000"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, max_lag: int | None = None, heads: int = 1):
        super().__init__(input_size, hidden_size, bias=bias, max_lag=max_lag, heads=heads)
        self.peepholes = nn.Parameter(torch.empty(3, hidden_size))  # rows: i, f, o
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        uniform_(self.peepholes, 0.1, generator=generator)

    def weights(self) -> PeepholeWeights:
        return PeepholeWeights(block_diagonal(self.W_h, self.output_size), *self.peepholes)

    def step(self, inputs: Inputs, state: State, weights: PeepholeWeights) -> State:
        i, f, z, o = (inputs.a + linear(state.h, weights.W_h)).chunk(4, dim=-1)
        i = torch.sigmoid(i + weights.p_i * state.c)
        f = torch.sigmoid(f + weights.p_f * state.c)
        c = f * state.c + i * torch.tanh(z)
        return State(torch.sigmoid(o + weights.p_o * c) * torch.tanh(c), c)
