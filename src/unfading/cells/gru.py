"""GRU in its two published forms, which differ in where the reset gate acts.

    r_t = sigmoid(W_xr x_t + W_hr h_{t-1} + b_r)                   reset
    z_t = sigmoid(W_xz x_t + W_hz h_{t-1} + b_z)                   keep
    n_t = tanh(W_xn x_t + W_hn (r_t * h_{t-1}) + b_n)              reset before the product (default)
    n_t = tanh(W_xn x_t + b_n + r_t * (W_hn h_{t-1} + c_n))        reset after it, with a second bias c_n
    h_t = z_t * h_{t-1} + (1 - z_t) * n_t

Before: Cho et al. 2014, STAR eq. 25-27, NRU's baseline. After: `nn.GRU` and cuDNN. With equal weights the two differ by
about 0.1. STAR prints the gate mirrored (z for 1 - z): the same functions, with W_xz, W_hz, b_z negated.
At zero, with orthogonal matrices, dh/dx has singular values 0.5 and dh/dh has them in 0.25..0.75, in both forms. With
`normalise=True` a layer norm (`layer_norm.py`) acts on each gate and on the candidate before their sigmoid or tanh.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell, Gains
from unfading.cells.layer_norm import LayerNorm, Normalise, Plain
from unfading.cells.matrix import BlockDiagonal, block_diagonal, linear, recurrent_parameter
from unfading.cells.recipe import Recipe
from unfading.initialise import orthogonal_, orthogonal_linear_, square_blocks


class Inputs(NamedTuple):
    rz: Tensor  # [T, B, 2H] gates before the recurrent term: r, z
    n: Tensor  # [T, B, H] candidate before the recurrent term


class Weights(NamedTuple):
    W_rz: Tensor | BlockDiagonal  # [2H, H] rows: r, z
    W_n: Tensor | BlockDiagonal  # [H, H]
    norm_rz: LayerNorm | Plain
    norm_n: LayerNorm | Plain


class WeightsAfter(NamedTuple):
    W_rz: Tensor | BlockDiagonal  # [2H, H] rows: r, z
    W_n: Tensor | BlockDiagonal  # [H, H]
    norm_rz: LayerNorm | Plain
    norm_n: LayerNorm | Plain
    c_n: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class GRUCell(Cell[Inputs, State, Weights | WeightsAfter]):
    """Gated recurrent unit.

    Args:
        reset_after: reset the product W_hn h + c_n instead of h, as `nn.GRU` does.
        normalise: layer norm of each gate and of the candidate inside the step.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [3H, H / heads].
    """

    paper = "Cho 2014"
    singular_values_at_zero: Gains | None = Gains(input=(0.5, 0.5), state=(0.25, 0.75))
    bounded_state = 1.0
    recipe = Recipe(rate=5e-3)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        reset_after: bool = False,
        normalise: bool = False,
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size)
        self.reset_after = reset_after
        self.from_input = nn.Linear(input_size, 3 * hidden_size, bias=bias)  # rows: r, z, n
        self.W_h = recurrent_parameter(3, hidden_size, heads)  # rows: r, z, n
        self.c_n = nn.Parameter(torch.empty(hidden_size)) if reset_after and bias else None
        self.norm_rz = Normalise(2, hidden_size, on=normalise)
        self.norm_n = Normalise(1, hidden_size, on=normalise)
        if normalise:
            self.singular_values_at_zero = None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=3, generator=generator)
        orthogonal_(self.W_h, blocks=square_blocks(self.W_h), generator=generator)
        if self.c_n is not None:
            nn.init.zeros_(self.c_n)
        self.norm_rz.reset_parameters()
        self.norm_n.reset_parameters()

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        H = self.output_size
        return Inputs(*self.from_input(x).split([2 * H, H], dim=-1))

    def weights(self) -> Weights | WeightsAfter:
        H = self.output_size
        W_rz, W_n = (block_diagonal(W, H) for W in self.W_h.split([2 * H, H]))
        if not self.reset_after:
            return Weights(W_rz, W_n, self.norm_rz(), self.norm_n())
        c_n = self.W_h.new_zeros(H) if self.c_n is None else self.c_n
        return WeightsAfter(W_rz, W_n, self.norm_rz(), self.norm_n(), c_n)

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights | WeightsAfter) -> State:
        r, z = torch.sigmoid(weights.norm_rz(inputs.rz + linear(state.h, weights.W_rz))).chunk(2, dim=-1)
        if isinstance(weights, WeightsAfter):
            n = inputs.n + r * (linear(state.h, weights.W_n) + weights.c_n)
        else:
            n = inputs.n + linear(r * state.h, weights.W_n)
        return State(z * state.h + (1 - z) * torch.tanh(weights.norm_n(n)))
