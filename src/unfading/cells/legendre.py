"""LMU, the Legendre memory unit: a fixed linear system that stores a window of one signal as Legendre polynomials.

    u_t = e_x . x_t + e_h . h_{t-1} + e_m . m_{t-1}
    m_t = A m_{t-1} + B u_t
    h_t = tanh(W_x x_t + W_h h_{t-1} + W_m m_t + b)

Voelker et al. 2019, eq. 1 to 8. A = exp(A_c / theta) and B = A_c^-1 (A - I) B_c, the exact solution over one step with constant
u, of the D-dimensional system A_c[i, j] = (2 i + 1) (-1 if i < j else (-1)^(i - j + 1)), B_c[i] = (2 i + 1) (-1)^i, which
delays u by up to theta steps. A and B are not trained. Initial values as in the authors' code: e_x and e_h LeCun-uniform,
e_m = 0, W_x, W_h and W_m Xavier-normal; the bias is ours and starts at 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Cell
from unfading.cells.matrix import linear
from unfading.cells.recipe import Recipe
from unfading.errors import check_count, check_positive
from unfading.initialise import gaussian_, uniform_


class Inputs(NamedTuple):
    u: Tensor  # [T, B, 1] e_x . x
    a: Tensor  # [T, B, H] W_x x + b


class Weights(NamedTuple):
    e_h: Tensor  # [1, H]
    e_m: Tensor  # [1, D]
    A: Tensor  # [D, D]
    B: Tensor  # [D]
    W_h: Tensor  # [H, H]
    W_m: Tensor  # [H, D]


class State(NamedTuple):
    h: Tensor  # [B, H]
    m: Tensor  # [B, D]


class LMUCell(Cell[Inputs, State, Weights]):
    """Legendre memory unit.

    Args:
        memory_size: D, the number of polynomials.
        theta: length of the window in steps.
    """

    paper = "Voelker 2019"
    recipe = Recipe(length_options=("theta",))
    A: Tensor
    B: Tensor

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, memory_size: int = 32, theta: float = 100.0):
        super().__init__(input_size, hidden_size)
        check_count("memory_size", memory_size)
        check_positive("theta", theta)
        self.memory_size, self.theta = memory_size, theta
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.to_memory = nn.Linear(input_size, 1, bias=False)
        self.e_h = nn.Parameter(torch.empty(1, hidden_size))
        self.e_m = nn.Parameter(torch.empty(1, memory_size))
        self.W_h = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.W_m = nn.Parameter(torch.empty(hidden_size, memory_size))
        A, B = delay_system(memory_size, theta)
        # Buffers: numbers that come from the host at every call cannot be captured in a CUDA graph.
        self.register_buffer("A", A.to(self.W_h.dtype), persistent=False)
        self.register_buffer("B", B.to(self.W_h.dtype), persistent=False)
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for e in (self.to_memory.weight, self.e_h):
            uniform_(e, math.sqrt(3 / e.shape[1]), generator=generator)
        nn.init.zeros_(self.e_m)
        for W in (self.from_input.weight, self.W_h, self.W_m):
            gaussian_(W, math.sqrt(2 / sum(W.shape)), generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.to_memory(x), self.from_input(x))

    def weights(self) -> Weights:
        return Weights(self.e_h, self.e_m, self.A, self.B, self.W_h, self.W_m)

    def initial_state(self, batch: int) -> State:
        return State(self.W_h.new_zeros(batch, self.output_size), self.W_h.new_zeros(batch, self.memory_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        u = inputs.u + linear(state.h, weights.e_h) + linear(state.m, weights.e_m)
        m = linear(state.m, weights.A) + u * weights.B
        return State(torch.tanh(inputs.a + linear(state.h, weights.W_h) + linear(m, weights.W_m)), m)


def delay_system(size: int, theta: float) -> tuple[Tensor, Tensor]:
    """A [size, size] and B [size] of one step, in float64."""
    i = torch.arange(size, dtype=torch.float64)
    scale = (2 * i + 1) / theta
    alternating = 1 - 2 * (i % 2)  # (-1)^i
    above = torch.triu(torch.ones(size, size, dtype=torch.float64), 1)
    A = scale.unsqueeze(1) * torch.where(above > 0, -1.0, -torch.outer(alternating, alternating))
    B = scale * alternating
    # exp([[A, B], [0, 0]]) holds both exact solutions, without the inverse of A.
    joined = torch.zeros(size + 1, size + 1, dtype=torch.float64)
    joined[:size, :size], joined[:size, size] = A, B
    solved = torch.matrix_exp(joined)
    return solved[:size, :size], solved[:size, size]
