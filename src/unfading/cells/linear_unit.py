"""LRU and GatedLRU: blocks for deep stacks around a linear diagonal recurrence of complex units.

    p_t = x_t where I = H, else W_p x_t + b_p
    u_t = layer_norm(p_t)
    LRU:       h_t = lambda * h_{t-1} + g * (B u_t),                lambda = exp(-nu + i theta),   g = sqrt(1 - |lambda|^2)
    GatedLRU:  h_t = lambda^(r_t) * h_{t-1} + g_t * (B u_t),        r_t = sigmoid(W_r u_t + b_r),  g_t = sqrt(1 - |lambda|^(2 r_t))
    v_t = gelu(Re(C h_t))
    y_t = p_t + (W_v v_t + b_v) * sigmoid(W_s v_t + b_s)            the output

h has H complex units, nu > 0 and theta > 0 are exponentials of parameters. The recurrence is linear and mixes no units, so a GPU
runs it as a scan; everything nonlinear lies between layers, where nothing is sequential. LRU: Orvieto et al. 2023, eq. 5 to 8, in
the block of their section 2, with layer norm before the recurrence and without the term D u_t, which the sum with p_t replaces.
|lambda| starts uniform on the ring from r_min to r_max, theta in [0, max_phase], B and C with entries of variance 1 / (2 H).

GatedLRU is ours. The input sets how fast the time of each unit runs: r_t = 1 is a step of LRU, and at r_t = 0 a unit keeps its
state and reads nothing. Its modulus without the phase is the gate of De et al. 2024 (RG-LRU), where a second gate multiplies the
input. b_r starts at 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from unfading.cells.base import Cell
from unfading.cells.base import Inputs as AnyInputs
from unfading.cells.base import Weights as AnyWeights
from unfading.cells.recipe import Recipe
from unfading.errors import check_positive
from unfading.initialise import gaussian_, orthogonal_linear_, uniform_

# Below this, 1 - |lambda|^(2 r) counts as zero: the derivative of the root is infinite there.
LEAST_SHARE = 1e-12


class Inputs(NamedTuple):
    re: Tensor  # [T, B, H] g Re(B u)
    im: Tensor  # [T, B, H] g Im(B u)
    p: Tensor  # [T, B, H]


class GatedInputs(NamedTuple):
    re: Tensor  # [T, B, H]
    im: Tensor  # [T, B, H]
    p: Tensor  # [T, B, H]
    r: Tensor  # [T, B, H]


class Weights(NamedTuple):
    re: Tensor  # [H] Re lambda
    im: Tensor  # [H] Im lambda


class GatedWeights(NamedTuple):
    nu: Tensor  # [H]
    theta: Tensor  # [H]


class State(NamedTuple):
    re: Tensor  # [B, H] Re h
    im: Tensor  # [B, H] Im h
    p: Tensor  # [B, H] the input of the block, for its output


class LinearUnitCell(Cell[AnyInputs, State, AnyWeights]):
    """The common part of both forms: everything except lambda."""

    recipe = Recipe(rates={"nu": 0.25, "theta": 0.25})

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
        if not 0 <= r_min < r_max < 1:
            raise ValueError(f"r_min and r_max must satisfy 0 <= r_min < r_max < 1; got r_min={r_min}, r_max={r_max}.")
        check_positive("max_phase", max_phase)
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase
        self.build(bias)
        self.reset_parameters()

    def build(self, bias: bool) -> None:
        """Create the parameters."""
        H = self.output_size
        self.enter = nn.Identity() if self.input_size == H else nn.Linear(self.input_size, H, bias=bias)
        self.norm = nn.LayerNorm(H, bias=bias)
        self.from_input = nn.Linear(H, 2 * H, bias=False)  # Re B, Im B
        self.nu = nn.Parameter(torch.empty(H))  # log nu
        self.theta = nn.Parameter(torch.empty(H))  # log theta
        self.C = nn.Linear(2 * H, H, bias=False)  # Re C, -Im C
        self.to_output = nn.Linear(H, 2 * H, bias=bias)  # W_v, W_s

    def reset_parameters(self, generator: Generator | None = None) -> None:
        H = self.output_size
        if isinstance(self.enter, nn.Linear):
            orthogonal_linear_(self.enter, blocks=1, generator=generator)
        self.norm.reset_parameters()
        gaussian_(self.from_input.weight, math.sqrt(1 / (2 * H)), generator=generator)
        gaussian_(self.C.weight, math.sqrt(1 / (2 * H)), generator=generator)
        orthogonal_linear_(self.to_output, blocks=2, generator=generator)
        with torch.no_grad():
            share = uniform_(self.nu, 0.5, generator=generator) + 0.5  # U(0, 1), as the next
            square = self.r_min**2 + share * (self.r_max**2 - self.r_min**2)
            self.nu.copy_((-0.5 * square.log()).log())
            share = uniform_(self.theta, 0.5, generator=generator) + 0.5
            self.theta.copy_((self.max_phase * share).clamp_min(1e-6).log())

    def initial_state(self, batch: int) -> State:
        return State(*(self.nu.new_zeros(batch, self.output_size) for _ in State._fields))

    def output(self, state: State) -> Tensor:
        v = functional.gelu(self.C(torch.cat([state.re, state.im], dim=-1)))
        value, gate = self.to_output(v).chunk(2, dim=-1)
        return state.p + value * torch.sigmoid(gate)


class LRUCell(LinearUnitCell[Inputs, Weights]):
    """Linear recurrent unit, in a block with layer norm, a gated readout and a skip connection.

    Args:
        r_min: least initial modulus of lambda.
        r_max: largest initial modulus of lambda, below 1.
        max_phase: largest initial phase of lambda.
    """

    paper = "Orvieto 2023"

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        p = self.enter(x)
        re, im = self.from_input(self.norm(p)).chunk(2, dim=-1)
        g = torch.sqrt(-torch.expm1(-2 * torch.exp(self.nu)))
        return Inputs(g * re, g * im, p)

    def weights(self) -> Weights:
        modulus, theta = torch.exp(-torch.exp(self.nu)), torch.exp(self.theta)
        return Weights(modulus * torch.cos(theta), modulus * torch.sin(theta))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        re = weights.re * state.re - weights.im * state.im + inputs.re
        im = weights.im * state.re + weights.re * state.im + inputs.im
        return State(re, im, inputs.p)


class GatedLRUCell(LinearUnitCell[GatedInputs, GatedWeights]):
    """Linear recurrent unit whose input sets how fast the time of each unit runs.

    Args:
        r_min: least initial modulus of lambda.
        r_max: largest initial modulus of lambda, below 1.
        max_phase: largest initial phase of lambda.
    """

    paper = "unfading"

    def build(self, bias: bool) -> None:
        super().build(bias)
        self.to_rate = nn.Linear(self.output_size, self.output_size, bias=bias)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        orthogonal_linear_(self.to_rate, blocks=1, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> GatedInputs:
        p = self.enter(x)
        u = self.norm(p)
        re, im = self.from_input(u).chunk(2, dim=-1)
        r = torch.sigmoid(self.to_rate(u))
        g = torch.sqrt((-torch.expm1(-2 * torch.exp(self.nu) * r)).clamp_min(LEAST_SHARE))
        return GatedInputs(g * re, g * im, p, r)

    def weights(self) -> GatedWeights:
        return GatedWeights(torch.exp(self.nu), torch.exp(self.theta))

    def step(self, inputs: GatedInputs, state: State, weights: GatedWeights) -> State:
        modulus, phase = torch.exp(-weights.nu * inputs.r), weights.theta * inputs.r
        c, s = modulus * torch.cos(phase), modulus * torch.sin(phase)
        return State(c * state.re - s * state.im + inputs.re, s * state.re + c * state.im + inputs.im, inputs.p)
