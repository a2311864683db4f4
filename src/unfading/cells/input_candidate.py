"""Gated cells whose candidate reads the input only: MinimalRNN, the chaos-free network and the recurrent additive network.

    MinimalRNN:  z_t = tanh(W_z x_t + b_z)
                 u_t = sigmoid(U_h h_{t-1} + U_z z_t + b_u)
                 h_t = u_t * h_{t-1} + (1 - u_t) * z_t
    CFN:         f_t = sigmoid(W_f x_t + U_f h_{t-1} + b_f),   i_t = sigmoid(W_i x_t + U_i h_{t-1} + b_i)
                 h_t = f_t * tanh(h_{t-1}) + i_t * tanh(W_n x_t)
    RAN:         f_t, i_t as in CFN
                 c_t = f_t * c_{t-1} + i_t * (W_n x_t),   h_t = tanh(c_t)

MinimalRNN: Chen 2017. CFN: Laurent & von Brecht 2017, eq. 1 and 2: without input every state falls to zero, so it cannot be
chaotic; b_f starts at 1 and b_i at -1, as there. RAN: Lee et al. 2017, eq. 1 to 4: the state is a weighted sum of the inputs.
STAR is the cell of this family made for deep stacks. Matrices start orthogonal, other biases at 0.
"""

from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.initialise import orthogonal_, orthogonal_linear_


class GateInputs(NamedTuple):
    u: Tensor  # [T, B, H] U_z z + b_u
    z: Tensor  # [T, B, H]


class GatesInputs(NamedTuple):
    gates: Tensor  # [T, B, 2H] before the recurrent term: f, i
    n: Tensor  # [T, B, H] the candidate


class Weights(NamedTuple):
    U: Tensor  # [H, H], of CFN and RAN [2H, H] with rows f, i


class State(NamedTuple):
    h: Tensor  # [B, H]


class Sum(NamedTuple):
    c: Tensor  # [B, H]


AnyState = TypeVar("AnyState", State, Sum)


class MinimalRNNCell(Cell[GateInputs, State, Weights]):
    """Minimal recurrent network."""

    paper = "Chen 2017"
    bounded_state = 1.0

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.from_candidate = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=1, generator=generator)
        orthogonal_linear_(self.from_candidate, blocks=1, generator=generator)
        orthogonal_(self.W_h, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> GateInputs:
        z = torch.tanh(self.from_input(x))
        return GateInputs(self.from_candidate(z), z)

    def weights(self) -> Weights:
        return Weights(self.W_h)

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: GateInputs, state: State, weights: Weights) -> State:
        u = torch.sigmoid(inputs.u + linear(state.h, weights.U))
        return State(u * state.h + (1 - u) * inputs.z)


class ForgetAndInputGates(nn.Module):
    """The parameters of CFN and RAN: two gates that read input and state, and a matrix for the candidate."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool):
        super().__init__()
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=bias)  # rows: f, i
        self.to_candidate = nn.Linear(input_size, hidden_size, bias=False)
        self.W_h = nn.Parameter(torch.empty(2 * hidden_size, hidden_size))  # rows: f, i


class ForgetAndInputCell(Cell[GatesInputs, AnyState, Weights]):
    """The common part of CFN and RAN: everything except the candidate, the state and the last line."""

    first_biases: ClassVar[tuple[float, float]]
    """Initial biases of f and i."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size)
        self.gates = ForgetAndInputGates(input_size, hidden_size, bias=bias)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.gates.from_input, blocks=2, generator=generator)
        orthogonal_linear_(self.gates.to_candidate, blocks=1, generator=generator)
        orthogonal_(self.gates.W_h, blocks=2, generator=generator)
        if self.gates.from_input.bias is not None:
            for part, value in zip(self.gates.from_input.bias.detach().chunk(2), self.first_biases, strict=True):
                part.fill_(value)

    def weights(self) -> Weights:
        return Weights(self.gates.W_h)


class CFNCell(ForgetAndInputCell[State]):
    """Chaos-free network."""

    paper = "Laurent 2017"
    first_biases = (1.0, -1.0)

    def project(self, x: Tensor, start: int = 0) -> GatesInputs:
        return GatesInputs(self.gates.from_input(x), torch.tanh(self.gates.to_candidate(x)))

    def initial_state(self, batch: int) -> State:
        return State(self.gates.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: GatesInputs, state: State, weights: Weights) -> State:
        f, i = torch.sigmoid(inputs.gates + linear(state.h, weights.U)).chunk(2, dim=-1)
        return State(f * torch.tanh(state.h) + i * inputs.n)


class RANCell(ForgetAndInputCell[Sum]):
    """Recurrent additive network."""

    paper = "Lee 2017"
    bounded_state = 1.0
    first_biases = (0.0, 0.0)

    def project(self, x: Tensor, start: int = 0) -> GatesInputs:
        return GatesInputs(self.gates.from_input(x), self.gates.to_candidate(x))

    def initial_state(self, batch: int) -> Sum:
        return Sum(self.gates.W_h.new_zeros(batch, self.output_size))

    def step(self, inputs: GatesInputs, state: Sum, weights: Weights) -> Sum:
        f, i = torch.sigmoid(inputs.gates + linear(torch.tanh(state.c), weights.U)).chunk(2, dim=-1)
        return Sum(f * state.c + i * inputs.n)

    def output(self, state: Sum) -> Tensor:
        return torch.tanh(state.c)
