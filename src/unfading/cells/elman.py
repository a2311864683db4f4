"""Plain recurrent networks: Elman, and relatives that differ in their initial values and in phi.

    h_t = phi(norm(W_x x_t + W_h h_{t-1} + b))

Elman (1990; STAR eq. 15): phi = tanh, or ReLU. Every matrix starts orthogonal, as in STAR's experiments; `nn.RNN` starts
uniform and stores a second bias, which is redundant.
IdentityRNN (Le et al. 2015): phi = ReLU, W_h starts as the identity, W_x as N(0, 0.001^2). NRU's RNN-id, with `normalise=True`.
OrthogonalRNN (Henaff et al. 2016): phi = ReLU, W_h starts orthogonal and is then free. NRU's RNN-orth, with `normalise=True`.
LinearRNN: no phi, so that h_T is an affine function of the input and the Jacobian is W_h itself.

norm is layer norm (`layer_norm.py`) with `normalise=True`, and absent otherwise.
"""

from typing import NamedTuple

from torch import Generator, Tensor, nn

from unfading.cells.base import Activation, Cell, Gains, activation, known_activation
from unfading.cells.layer_norm import LayerNorm, Normalise, Plain
from unfading.cells.matrix import BlockDiagonal, block_diagonal, linear, recurrent_parameter
from unfading.initialise import gaussian_, identity_, orthogonal_, orthogonal_linear_, square_blocks


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] W_x x + b


class Weights(NamedTuple):
    W_h: Tensor | BlockDiagonal  # [H, H]
    norm: LayerNorm | Plain


class State(NamedTuple):
    h: Tensor  # [B, H]


class PlainCell(Cell[Inputs, State, Weights]):
    """The common part of plain networks: everything except phi."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool, normalise: bool, heads: int):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.W_h = recurrent_parameter(1, hidden_size, heads)
        self.norm = Normalise(1, hidden_size, on=normalise)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=1, generator=generator)
        orthogonal_(self.W_h, blocks=square_blocks(self.W_h), generator=generator)
        self.norm.reset_parameters()

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        return Weights(block_diagonal(self.W_h, self.output_size), self.norm())

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))


class ElmanCell(PlainCell):
    """Plain recurrent cell.

    Args:
        activation: the function phi of the equation.
        normalise: layer norm inside the step.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [H, H / heads].
    """

    paper = "Elman 1990"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        activation: Activation = "tanh",
        normalise: bool = False,
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size, bias=bias, normalise=normalise, heads=heads)
        self.activation = known_activation(activation)
        if activation == "tanh" and not normalise:
            self.singular_values_at_zero = Gains(input=(1.0, 1.0), state=(1.0, 1.0))
        if activation in ("tanh", "sigmoid"):
            self.bounded_state = 1.0

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        phi = activation(self.activation)
        return State(phi(weights.norm(inputs.a + linear(state.h, weights.W_h))))


class OrthogonalRNNCell(ElmanCell):
    """Plain ReLU cell whose recurrent matrix starts orthogonal and is then free.

    Args:
        activation: the function phi of the equation.
        normalise: layer norm inside the step, as in NRU's experiments.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [H, H / heads].
    """

    paper = "Henaff 2016"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        activation: Activation = "relu",
        normalise: bool = False,
        heads: int = 1,
    ):
        super().__init__(input_size, hidden_size, bias=bias, activation=activation, normalise=normalise, heads=heads)


class IdentityRNNCell(ElmanCell):
    """Plain ReLU cell whose recurrent matrix starts as the identity.

    Args:
        activation: the function phi of the equation.
        normalise: layer norm inside the step, as in NRU's experiments.
        scale: initial multiple of the identity; Le et al. take 0.01 where short memory is enough.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [H, H / heads].
    """

    paper = "Le 2015"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        activation: Activation = "relu",
        normalise: bool = False,
        scale: float = 1.0,
        heads: int = 1,
    ):
        self.scale = scale  # first, since the base class initialises the parameters
        super().__init__(input_size, hidden_size, bias=bias, activation=activation, normalise=normalise, heads=heads)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        gaussian_(self.from_input.weight, 0.001, generator=generator)
        identity_(self.W_h, scale=self.scale, blocks=square_blocks(self.W_h))


class LinearRNNCell(PlainCell):
    """Plain cell without a nonlinearity; its matrix starts orthogonal.

    Args:
        normalise: layer norm inside the step; the cell is then not linear.
        heads: number of groups of H / heads units. A unit's recurrent weights read only the units of its own group: the
            recurrent matrix is block-diagonal, and W_h contains its blocks, [H, H / heads].
    """

    paper = "Henaff 2016"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, normalise: bool = False, heads: int = 1):
        super().__init__(input_size, hidden_size, bias=bias, normalise=normalise, heads=heads)
        if not normalise:
            self.singular_values_at_zero = Gains(input=(1.0, 1.0), state=(1.0, 1.0))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(weights.norm(inputs.a + linear(state.h, weights.W_h)))
