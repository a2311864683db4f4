"""STAR: a gated cell whose candidate depends on the input only, made for deep stacks.

    z_t = tanh(W_z x_t + b_z)                      candidate, needs the input alone: in project
    k_t = sigmoid(W_x x_t + W_h h_{t-1} + b_k)     gate
    h_t = tanh((1 - k_t) * h_{t-1} + k_t * z_t)

Turkoglu et al. 2019, eq. 10-12. Claim: at zero state with orthogonal weights both Jacobians have all singular values 0.5, so
that the gradients from the layer above and from the next step together keep their size. Along one direction of the lattice
alone a gradient still fades like 0.5^n, and with a chrono bias the claim does not hold.

The authors' released code differs: with a_t the argument of the sigmoid it computes

    h_t = tanh((1 - sigmoid(a_t)) * h_{t-1} + sigmoid(a_t + shift) * z_t),   shift = 1

(written there with the forget gate's sign, after JANET), adds dropout of 0.1 to each layer's output, draws the chrono
bias from U[1, 784] for every task, and evaluates its batch-normalised form with the statistics of the test batch.
`shift=1.0`, or `STAR.released(...)`, gives that gate; `max_lag` gives the chrono bias of the paper.
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
    z: Tensor  # [T, B, H] candidate
    a: Tensor  # [T, B, H] gate, before the recurrent term


class Weights(NamedTuple):
    W_h: Tensor | BlockDiagonal  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class STARCell(Cell[Inputs, State, Weights]):
    """Stackable recurrent cell.

    Args:
        max_lag: longest dependency expected, in steps. Initialises the gate's bias so that forgetting times are spread over
            [2, max_lag]; None initialises it to zero.
        shift: constant that the released code adds inside the gate on the candidate (there 1).
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [H, H / heads].
    """

    paper = "Turkoglu 2019"
    released = {"shift": 1.0}
    bounded_state = 1.0
    recipe = Recipe(rate=5e-3, length_options=("max_lag",))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        max_lag: int | None = None,
        shift: float = 0.0,
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size)
        check_max_lag(max_lag, bias)
        check_number("shift", shift)
        self.max_lag = max_lag
        self.shift = shift
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=bias)  # rows: z, then k
        self.W_h = recurrent_parameter(1, hidden_size, heads)
        if shift == 0.0:
            self.singular_values_at_zero = Gains(input=(0.5, 0.5), state=(0.5, 0.5))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=2, generator=generator)
        orthogonal_(self.W_h, blocks=square_blocks(self.W_h), generator=generator)
        if self.max_lag is not None:
            _, b_k = self.from_input.bias.detach().chunk(2)
            chrono_(b_k, self.max_lag, generator=generator).neg_()

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        z, a = self.from_input(x).chunk(2, dim=-1)
        return Inputs(torch.tanh(z), a)

    def weights(self) -> Weights:
        return Weights(block_diagonal(self.W_h, self.output_size))

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        a = inputs.a + linear(state.h, weights.W_h)
        k = torch.sigmoid(a)
        write = k if self.shift == 0.0 else torch.sigmoid(a + self.shift)
        return State(torch.tanh((1 - k) * state.h + write * inputs.z))
