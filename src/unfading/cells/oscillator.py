"""Networks of oscillators: coRNN, whose units are coupled, and UnICORNN, whose units are independent.

    CoRNN:     z_t = z_{t-1} + dt (tanh(W y_{t-1} + V z_{t-1} + U x_t + b) - gamma y_{t-1} - epsilon z_{t-1})
               y_t = y_{t-1} + dt z_t
    UnICORNN:  z_t = z_{t-1} - s * (tanh(w * y_{t-1} + U x_t + b) + alpha y_{t-1}),   s = dt sigmoid(c)
               y_t = y_{t-1} + s * z_t

y is the position of an oscillator and the output, z its velocity. CoRNN: Rusch & Mishra 2021, eq. 3, with the damping taken
at t - 1 as in their code (their second form takes it at t); gamma is the squared frequency, epsilon the damping. The defaults
are theirs for pixel MNIST; for permuted MNIST they take dt = 0.076, gamma = 0.4 and epsilon = 8. All values start from
U(-k, k), k = 1 / sqrt(I + 2 H). UnICORNN: Rusch & Mishra 2021 (ICML), eq. 3 to 5: a Hamiltonian system, integrated by the
symplectic Euler method, with a learned step size of each unit. Its recurrence has no matrix. Initial values are those of the
authors' code: w ~ U(0, 1), c ~ U(-0.1, 0.1), U from U(-k, k) with k = sqrt(6 / (65 I)), biases 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.errors import check_number, check_positive
from unfading.initialise import uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] U x + b


class State(NamedTuple):
    y: Tensor  # [B, H] positions
    z: Tensor  # [B, H] velocities


class CoRNNWeights(NamedTuple):
    W: Tensor  # [H, H]
    V: Tensor  # [H, H]


class UnICORNNWeights(NamedTuple):
    w: Tensor  # [H]
    s: Tensor  # [H] step sizes


class CoRNNCell(Cell[Inputs, State, CoRNNWeights]):
    """Coupled oscillatory recurrent cell.

    Args:
        dt: step size.
        gamma: squared frequency of the oscillators.
        epsilon: damping.
    """

    paper = "Rusch 2021"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        dt: float = 0.042,
        gamma: float = 2.7,
        epsilon: float = 4.7,
    ):
        super().__init__(input_size, hidden_size)
        check_positive("dt", dt)
        check_number("gamma", gamma)
        check_number("epsilon", epsilon)
        self.dt, self.gamma, self.epsilon = dt, gamma, epsilon
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.W = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.V = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        k = 1 / math.sqrt(self.input_size + 2 * self.output_size)
        for parameter in self.parameters():
            uniform_(parameter, k, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> CoRNNWeights:
        return CoRNNWeights(self.W, self.V)

    def initial_state(self, batch: int) -> State:
        return State(self.W.new_zeros(batch, self.output_size), self.W.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: CoRNNWeights) -> State:
        force = torch.tanh(inputs.a + linear(state.y, weights.W) + linear(state.z, weights.V))
        z = state.z + self.dt * (force - self.gamma * state.y - self.epsilon * state.z)
        return State(state.y + self.dt * z, z)


class UnICORNNCell(Cell[Inputs, State, UnICORNNWeights]):
    """Undamped independent controlled oscillators.

    Args:
        dt: largest step size.
        alpha: squared frequency of an oscillator without input.
    """

    paper = "Rusch 2021b"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, dt: float = 0.1, alpha: float = 1.0):
        super().__init__(input_size, hidden_size)
        check_positive("dt", dt)
        check_number("alpha", alpha)
        self.dt, self.alpha = dt, alpha
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.w = nn.Parameter(torch.empty(hidden_size))
        self.c = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        uniform_(self.from_input.weight, math.sqrt(6 / (65 * self.input_size)), generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)
        with torch.no_grad():
            uniform_(self.w, 0.5, generator=generator).add_(0.5)
        uniform_(self.c, 0.1, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> UnICORNNWeights:
        return UnICORNNWeights(self.w, self.dt * torch.sigmoid(self.c))

    def initial_state(self, batch: int) -> State:
        return State(self.w.new_zeros(batch, self.output_size), self.w.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: UnICORNNWeights) -> State:
        z = state.z - weights.s * (torch.tanh(weights.w * state.y + inputs.a) + self.alpha * state.y)
        return State(state.y + weights.s * z, z)
