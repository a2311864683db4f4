"""ContinuousRNN: the neural ODE behind the incremental RNN, with steps over regular or irregular times.

    tau dg/dt = -alpha g(t) + phi(U g(t) + W x(t) + b)

Kag et al. 2020, eq. 1 (after Rosenblatt 1962). Over a gap d between two samples, with x constant, a step is

    Euler:        g <- (1 - alpha d / tau) g + (d / tau) phi(U g + W x + b)
    exponential:  g <- e^(-alpha d / tau) g + (1 - e^(-alpha d / tau)) / alpha * phi(U g + W x + b)

Both are of first order in d. The exponential step is exact for the leak and cannot overshoot with d >= 0. U starts orthogonal.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Activation, Cell, activation, known_activation
from unfading.cells.matrix import linear
from unfading.errors import check_positive
from unfading.initialise import orthogonal_, orthogonal_linear_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] W x + b
    keep: Tensor  # [T, B, 1] factor of g; [T, 1, 1] where all gaps are equal
    gain: Tensor  # [T, B, 1] factor of phi; [T, 1, 1] likewise


class Weights(NamedTuple):
    U: Tensor  # [H, H]


class State(NamedTuple):
    h: Tensor  # [B, H]


class ContinuousRNNCell(Cell[Inputs, State, Weights]):
    """Continuous-time recurrent cell.

    Args:
        activation: the function phi of the equation.
        tau: time constant.
        alpha: leak.
        gap: time between two samples.
        gaps_in_input: take each gap from the last feature of the input instead; input_size includes it. A reverse direction
            reads the gap of the same sample, which should then be the time to the next sample.
        exponential: exponential steps instead of Euler steps.
    """

    paper = "Kag 2020, eq. 1"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        activation: Activation = "tanh",
        tau: float = 1.0,
        alpha: float = 1.0,
        gap: float = 0.1,
        gaps_in_input: bool = False,
        exponential: bool = False,
    ):
        super().__init__(input_size, hidden_size)
        check_positive("tau", tau)
        check_positive("alpha", alpha)
        check_positive("gap", gap)
        if gaps_in_input and input_size < 2:
            raise ValueError("gaps_in_input=True takes the last feature as the gap, so input_size must be at least 2; got 1.")
        self.activation = known_activation(activation)
        self.tau, self.alpha, self.gap = tau, alpha, gap
        self.gaps_in_input = gaps_in_input
        self.exponential = exponential
        self.from_input = nn.Linear(input_size - gaps_in_input, hidden_size, bias=bias)
        self.U = nn.Parameter(torch.empty(hidden_size, hidden_size))
        if not gaps_in_input:
            self.shared = ("keep", "gain")
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        orthogonal_linear_(self.from_input, blocks=1, generator=generator)
        orthogonal_(self.U, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        if self.gaps_in_input:
            x, d = x[..., :-1], x[..., -1:] / self.tau
        else:
            d = self.U.new_full((x.shape[0], 1, 1), self.gap / self.tau)
        if self.exponential:
            return Inputs(self.from_input(x), torch.exp(-self.alpha * d), -torch.expm1(-self.alpha * d) / self.alpha)
        return Inputs(self.from_input(x), 1 - self.alpha * d, d)

    def weights(self) -> Weights:
        return Weights(self.U)

    def initial_state(self, batch: int) -> State:
        return State(self.U.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        phi = activation(self.activation)
        return State(inputs.keep * state.h + inputs.gain * phi(inputs.a + linear(state.h, weights.U)))
