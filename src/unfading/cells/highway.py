"""RecurrentHighway: several highway layers inside one time step.

With s_0 = h_{t-1}, for l = 1..L (the input enters at l = 1 alone):

    y_l = tanh(W_y x_t [l = 1] + R_y,l s_{l-1} + b_y,l)            candidate
    t_l = sigmoid(W_t x_t [l = 1] + R_t,l s_{l-1} + b_t,l)         transform
    c_l = 1 - t_l (coupled), or sigmoid(W_c x_t [l = 1] + R_c,l s_{l-1} + b_c,l)        carry
    s_l = y_l * t_l + s_{l-1} * c_l
    h_t = s_L

Zilly et al. 2017, coupled in their experiments. "RHN, L layers" in STAR's tables is one cell of recurrence depth L with three
transforms, not coupled: only this form has the printed parameter counts. The state of the uncoupled form is not bounded, so
that NaN at depth (a "0" in STAR's tables) is expected. Matrices start orthogonal as in STAR; the authors' code draws them from
U(-0.04, 0.04).
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.cells.recipe import Recipe
from unfading.errors import check_count, check_max_lag
from unfading.initialise import chrono_, orthogonal_, orthogonal_linear_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, G H] contribution of the input to l = 1, with biases: y, t (, c); G = 2 if coupled, else 3


class Weights(NamedTuple):
    R: Tensor  # [L G H, H] rows: l = 1: y, t (, c); l = 2: ...
    b: Tensor  # [(L - 1) G H] biases of l = 2..L


class State(NamedTuple):
    h: Tensor  # [B, H]


class RecurrentHighwayCell(Cell[Inputs, State, Weights]):
    """Recurrent highway network.

    Args:
        depth: L, micro-steps per time step.
        coupled: tie the carry gate to the transform gate, c = 1 - t.
        max_lag: longest dependency expected, in steps. Chrono initialisation: b_t = -log U[1, max_lag - 1] (and b_c = -b_t),
            so that units remember for 2 to max_lag steps. None for b_t = -2 (and b_c = 2), as the authors use on Penn Treebank.
    """

    paper = "Zilly 2017"
    recipe = Recipe(length_options=("max_lag",))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        depth: int = 2,
        coupled: bool = True,
        max_lag: int | None = None,
    ):
        super().__init__(input_size, hidden_size)
        check_count("depth", depth)
        check_max_lag(max_lag, bias)
        self.depth, self.coupled, self.max_lag = depth, coupled, max_lag
        self.transforms = 2 if coupled else 3
        if coupled:
            self.bounded_state = 1.0
        self.from_input = nn.Linear(input_size, self.transforms * hidden_size, bias=bias)
        self.R = nn.Parameter(torch.empty(depth * self.transforms * hidden_size, hidden_size))
        self.b = nn.Parameter(torch.empty((depth - 1) * self.transforms * hidden_size)) if bias and depth > 1 else None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=self.transforms, generator=generator)
        orthogonal_(self.R, blocks=self.depth * self.transforms, generator=generator)
        for bias in (self.from_input.bias, self.b):
            if bias is None:
                continue
            by_gate = nn.init.zeros_(bias).detach().view(-1, self.transforms, self.output_size)  # [micro-steps, gates, H]
            b_t = by_gate[:, 1]
            if self.max_lag is None:
                b_t.fill_(-2.0)
            else:
                chrono_(b_t, self.max_lag, generator=generator).neg_()
            if not self.coupled:
                by_gate[:, 2] = -b_t

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        rows = self.transforms * self.output_size
        return Weights(self.R, self.R.new_zeros((self.depth - 1) * rows) if self.b is None else self.b)

    def initial_state(self, batch: int) -> State:
        return State(self.R.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        s, H = state.h, self.output_size
        rows = self.transforms * H
        for l in range(self.depth):
            outside = weights.b[(l - 1) * rows : l * rows] if l else inputs.a
            gates = outside + linear(s, weights.R[l * rows : (l + 1) * rows])
            t = torch.sigmoid(gates[:, H : 2 * H])
            c = 1 - t if self.coupled else torch.sigmoid(gates[:, 2 * H :])
            s = torch.tanh(gates[:, :H]) * t + s * c
        return State(s)
