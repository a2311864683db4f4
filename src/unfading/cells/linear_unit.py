"""LRU and GatedLRU: blocks for deep stacks around a linear recurrence of complex units that do not read each other.

    p_t = x_t where I = H, else W_p x_t + b_p
    z_t = B norm(p_t) + b
    LRU:       h_t = lambda * h_{t-1} + g * z_t,              lambda = exp(-nu + i theta),   g = sqrt(1 - |lambda|^2)
    GatedLRU:  h_t = lambda^r_t * h_{t-1} + g_t * z_t,        r_t = sigmoid(W_r norm(p_t) + b_r),
               g_t = sqrt(1 - |lambda|^(2 r_t))
    v_t = gelu(Re(C h_t))
    y_t = p_t + (W_v v_t + b_v) * sigmoid(W_s v_t + b_s)      the output

norm subtracts the mean over units and divides by the standard deviation. h, z, B and b are complex; nu > 0 and theta > 0 are
exponentials of parameters. Nonlinear functions stand between layers only, where nothing is sequential, and a GPU runs the
recurrence as a scan. LRU: Orvieto et al. 2023, eq. 5 to 8, in the block of their figure 1, with the norm before the recurrence;
the sum with p_t replaces their term D u_t, b is ours, and their g is a parameter that starts at this value. |lambda| starts
on the ring from r_min to r_max, uniform in its square, theta uniform in [0, max_phase]. The real and imaginary parts of B and
C start with variance 1 / (2 H); theirs of C have 1 / H.

GatedLRU is ours. r_t is a gate on the time step of each unit: r_t = 1 is a step of LRU, and at r_t = 0 the unit keeps its
state and reads nothing. Without the phase, |lambda|^r_t is the decay of De et al. 2024 (RG-LRU), which has a second gate, on
the input. b_r starts at 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from unfading.cells.base import Cell
from unfading.cells.base import Weights as AnyWeights
from unfading.cells.recipe import Recipe
from unfading.errors import check_number, check_positive
from unfading.initialise import gaussian_, orthogonal_linear_, uniform_

# Below this, 1 - |lambda|^(2 r) is constant: the derivative of its root is infinite at zero.
LEAST = 1e-12


class Inputs(NamedTuple):
    z: Tensor  # [T, B, 2 H] Re z, Im z; GatedLRU: [T, B, 3 H], then the argument of r
    p: Tensor  # [T, B, H]


class Weights(NamedTuple):
    re: Tensor  # [H] Re lambda
    im: Tensor  # [H] Im lambda
    g: Tensor  # [H]


class GatedWeights(NamedTuple):
    nu: Tensor  # [H]
    theta: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, 2 H] Re h, Im h
    p: Tensor  # [B, H] what the output adds


class LinearUnitCell(Cell[Inputs, State, AnyWeights]):
    """The common part of both forms: everything except lambda."""

    recipe = Recipe(rates={"nu": 0.25, "theta": 0.25})
    rows: int
    """Rows of the matrix of the input, divided by H."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = math.pi / 5,
    ):
        super().__init__(input_size, hidden_size)
        check_number("r_min", r_min)
        check_number("r_max", r_max)
        if not 0 <= r_min < r_max < 1:
            raise ValueError(f"r_min and r_max must satisfy 0 <= r_min < r_max < 1; got r_min={r_min} and r_max={r_max}.")
        check_positive("max_phase", max_phase)
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase
        H = hidden_size
        self.enter = nn.Identity() if input_size == H else nn.Linear(input_size, H, bias=bias)
        self.from_input = nn.Linear(H, self.rows * H, bias=bias)
        self.nu = nn.Parameter(torch.empty(H))  # holds log nu; theta holds log theta
        self.theta = nn.Parameter(torch.empty(H))
        self.C = nn.Linear(2 * H, H, bias=False)  # Re C, -Im C
        self.to_output = nn.Linear(H, 2 * H, bias=bias)  # W_v, W_s
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        if isinstance(self.enter, nn.Linear):
            orthogonal_linear_(self.enter, blocks=1, generator=generator)
        for layer in (self.from_input, self.C):
            gaussian_(layer.weight, math.sqrt(1 / (2 * self.output_size)), generator=generator)
        orthogonal_linear_(self.to_output, blocks=2, generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)
        with torch.no_grad():
            square = self.r_min**2 + _uniform(self.nu, generator) * (self.r_max**2 - self.r_min**2)
            self.nu.copy_(torch.log(-torch.log(square) / 2))
            self.theta.copy_(torch.log(self.max_phase * _uniform(self.theta, generator)))

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        p = self.enter(x)
        return Inputs(self.from_input(functional.layer_norm(p, (self.output_size,))), p)

    def initial_state(self, batch: int) -> State:
        return State(self.nu.new_zeros(batch, 2 * self.output_size), self.nu.new_zeros(batch, self.output_size))

    def output(self, state: State) -> Tensor:
        return state.p + functional.glu(self.to_output(functional.gelu(self.C(state.h))), dim=-1)


def _uniform(parameter: Tensor, generator: Generator | None) -> Tensor:
    """Uniform between 0 and 1, in at least float32: half precision rounds |lambda| to 1. Not 0, whose logarithm is infinite."""
    draw = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    return (uniform_(draw, 0.5, generator=generator) + 0.5).clamp_min(1e-6)


class LRUCell(LinearUnitCell[Weights]):
    """Linear recurrent unit, in a block with a norm, a gated readout and a skip connection.

    Args:
        r_min: least initial modulus of lambda.
        r_max: largest initial modulus of lambda, below 1.
        max_phase: largest initial phase of lambda.
    """

    paper = "Orvieto 2023"
    rows = 2

    def weights(self) -> Weights:
        nu, theta = torch.exp(self.nu), torch.exp(self.theta)
        modulus = torch.exp(-nu)
        return Weights(modulus * torch.cos(theta), modulus * torch.sin(theta), torch.sqrt(-torch.expm1(-2 * nu)))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        (re, im), (z_re, z_im) = state.h.chunk(2, dim=-1), inputs.z.chunk(2, dim=-1)
        new_re = weights.re * re - weights.im * im + weights.g * z_re
        new_im = weights.im * re + weights.re * im + weights.g * z_im
        return State(torch.cat([new_re, new_im], dim=-1), inputs.p)


class GatedLRUCell(LinearUnitCell[GatedWeights]):
    """Linear recurrent unit with a gate, computed from the input, on the time step of each unit.

    Args:
        r_min: least initial modulus of lambda.
        r_max: largest initial modulus of lambda, below 1.
        max_phase: largest initial phase of lambda.
    """

    paper = "unfading"
    rows = 3

    def weights(self) -> GatedWeights:
        return GatedWeights(torch.exp(self.nu), torch.exp(self.theta))

    def step(self, inputs: Inputs, state: State, weights: GatedWeights) -> State:
        (re, im), (z_re, z_im, a) = state.h.chunk(2, dim=-1), inputs.z.chunk(3, dim=-1)
        r = torch.sigmoid(a)
        modulus, phase = torch.exp(-weights.nu * r), weights.theta * r
        g = torch.sqrt((-torch.expm1(-2 * weights.nu * r)).clamp_min(LEAST))
        c, s = modulus * torch.cos(phase), modulus * torch.sin(phase)
        return State(torch.cat([c * re - s * im + g * z_re, s * re + c * im + g * z_im], dim=-1), inputs.p)
