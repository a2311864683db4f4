"""Networks whose recurrent matrix is a product of plane rotations: EURNN and GORU.

Q is a product of layers. Each layer rotates disjoint pairs of coordinates (i, j), each by its own angle:

    (z_i, z_j) <- (e^(i phi) (cos theta z_i - sin theta z_j), sin theta z_i + cos theta z_j)        phi = 0 in the real form

FFT style: log2 H layers, pairs at stride H/2, H/4, ..., 1. Tunable style: `capacity` layers, pairs (0, 1), (2, 3), ... and
(1, 2), (3, 4), ... in turn. Layers act in this order; the complex form ends with diagonal phases. Jing et al. 2017.

    EURNN:  h_t = modReLU(Q h_{t-1} + U x_t)
    GORU:   r_t = sigmoid(U_r x_t + W_r h_{t-1} + b_r),  g_t = sigmoid(U_g x_t + W_g h_{t-1} + b_g)
            c_t = modReLU(r_t * (Q h_{t-1}) + U_c x_t)
            h_t = g_t * h_{t-1} + (1 - g_t) * c_t

In the complex form a state, and the rows of U, are real pairs [Re, Im], and modReLU is that of `unitary.py`. The real modReLU
is sign(z) ReLU(|z| + b). The authors' code has |z| + 0.01 (EURNN) and |z| + 0.001 (GORU) in place of |z|, which adds to every
entry even at b = 0, and puts the phase e^(i phi) on z_j instead. Initial values as in their code: angles U(-pi, pi), U and W
in U(-0.01, 0.01), b_r = 2, modReLU's b = 0 (EURNN) and 0.01 (GORU); b_g, for which they use a default, starts at 0. NRU's
EURNN with 17,418 parameters on psMNIST is the real FFT form with 1024 units.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.allocation import check_fits
from unfading.cells.base import Cell, at_least_float32
from unfading.cells.matrix import linear
from unfading.cells.unitary import modrelu_pair, real_pair
from unfading.errors import check_count
from unfading.initialise import uniform_

# What a layer of rotations takes in Python, beside two bytes per unit for its angles.
LAYER_BYTES = 200


class Rotations(nn.Module):
    """The matrix Q, built once per forward from its angles."""

    def __init__(self, size: int, capacity: int | None, *, complex_state: bool):
        super().__init__()
        self.size = size
        # Of each layer: the index of the first pair, and the distance between the two coordinates of a pair.
        if capacity is None:
            _check_power_of_two(size)
            self.layers = [(0, size >> level) for level in range(1, size.bit_length())]
        else:
            check_count("capacity", capacity)
            if size % 2:
                raise ValueError(
                    f"the tunable style pairs coordinates; hidden_size must be even, got {size}. Nearest: {size + 1}."
                )
            # Before the list of layers is made: a list that does not fit takes minutes to fail.
            check_fits(f"Q with capacity={capacity}", capacity * (LAYER_BYTES + 2 * size), "capacity")
            self.layers = [(layer % 2, 1) for layer in range(capacity)]
        self.angles_of = [(size - 2 * begin) // 2 for begin, _ in self.layers]
        self.theta = nn.Parameter(torch.empty(sum(self.angles_of)))
        self.phi = nn.Parameter(torch.empty(sum(self.angles_of))) if complex_state else None
        self.omega = nn.Parameter(torch.empty(size)) if complex_state else None

    def reset_parameters(self, generator: Generator | None = None) -> None:
        for angles in (self.theta, self.phi, self.omega):
            if angles is not None:
                uniform_(angles, math.pi, generator=generator)

    def forward(self) -> Tensor:
        theta = at_least_float32(self.theta)
        cos, sin = torch.cos(theta).split(self.angles_of), torch.sin(theta).split(self.angles_of)
        if self.phi is None or self.omega is None:
            M = torch.eye(self.size, dtype=theta.dtype, device=theta.device)
            for (begin, stride), c, s in zip(self.layers, cos, sin, strict=True):
                M = _turn(M, begin, stride, c, s, None)
            return M.to(self.theta.dtype)
        phases = _phases(self.phi).split(self.angles_of)
        M = torch.eye(self.size, dtype=phases[0].dtype, device=theta.device)
        for (begin, stride), c, s, phase in zip(self.layers, cos, sin, phases, strict=True):
            M = _turn(M, begin, stride, c, s, phase)
        return real_pair(_phases(self.omega).unsqueeze(1) * M).to(self.theta.dtype)


class Inputs(NamedTuple):
    a: Tensor  # [T, B, H] U x; [T, B, 2H] in the complex form


class Weights(NamedTuple):
    Q: Tensor  # [H, H]; [2H, 2H] in the complex form
    b: Tensor  # [H]


class GatedInputs(NamedTuple):
    rg: Tensor  # [T, B, 2H] gates before the recurrent term: r, g
    c: Tensor  # [T, B, H] U_c x


class GatedWeights(NamedTuple):
    W: Tensor  # [2H, H] rows: r, g
    Q: Tensor  # [H, H]
    b: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, H]; [B, 2H] in the complex form


class EURNNCell(Cell[Inputs, State, Weights]):
    """Efficient unitary network. The output of its complex form is the real part of h.

    Args:
        capacity: layers of the tunable style; None takes the FFT style, for which hidden_size must be a power of two.
        complex_state: hidden_size complex units instead of real ones.
    """

    paper = "Jing 2017"
    orthogonal_recurrence = "Q"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        capacity: int | None = None,
        complex_state: bool = False,
    ):
        super().__init__(input_size, hidden_size)
        self.complex_state = complex_state
        self.from_input = nn.Linear(input_size, hidden_size * (2 if complex_state else 1), bias=False)
        self.Q = Rotations(hidden_size, capacity, complex_state=complex_state)
        self.b = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        uniform_(self.from_input.weight, 0.01, generator=generator)
        self.Q.reset_parameters(generator)
        if self.b is not None:
            nn.init.zeros_(self.b)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        Q = self.Q()
        return Weights(Q, Q.new_zeros(self.output_size) if self.b is None else self.b)

    def initial_state(self, batch: int) -> State:
        weight = self.from_input.weight
        return State(weight.new_zeros(batch, weight.shape[0]))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        z = inputs.a + linear(state.h, weights.Q)
        return State(modrelu_pair(z, weights.b) if self.complex_state else modrelu(z, weights.b))

    def output(self, state: State) -> Tensor:
        return state.h[..., : self.output_size]


class GORUCell(Cell[GatedInputs, State, GatedWeights]):
    """Gated orthogonal recurrent unit.

    Args:
        capacity: layers of the tunable style; None takes the FFT style, for which hidden_size must be a power of two.
    """

    paper = "Jing 2017"
    orthogonal_recurrence = "Q"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, capacity: int | None = None):
        super().__init__(input_size, hidden_size)
        self.from_input = nn.Linear(input_size, 3 * hidden_size, bias=False)  # rows: r, g, c
        self.W = nn.Parameter(torch.empty(2 * hidden_size, hidden_size))  # rows: r, g
        self.Q = Rotations(hidden_size, capacity, complex_state=False)
        self.b = nn.Parameter(torch.empty(3 * hidden_size)) if bias else None  # r, g, and modReLU's
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        uniform_(self.from_input.weight, 0.01, generator=generator)
        uniform_(self.W, 0.01, generator=generator)
        self.Q.reset_parameters(generator)
        if self.b is not None:
            for part, start in zip(self.b.detach().chunk(3), (2.0, 0.0, 0.01), strict=True):
                part.fill_(start)

    def project(self, x: Tensor, start: int = 0) -> GatedInputs:
        rg, c = self.from_input(x).split([2 * self.output_size, self.output_size], dim=-1)
        return GatedInputs(rg if self.b is None else rg + self.b[: 2 * self.output_size], c)

    def weights(self) -> GatedWeights:
        b = self.W.new_zeros(self.output_size) if self.b is None else self.b[2 * self.output_size :]
        return GatedWeights(self.W, self.Q(), b)

    def initial_state(self, batch: int) -> State:
        return State(self.W.new_zeros(batch, self.output_size))

    def step(self, inputs: GatedInputs, state: State, weights: GatedWeights) -> State:
        r, g = torch.sigmoid(inputs.rg + linear(state.h, weights.W)).chunk(2, dim=-1)
        c = modrelu(r * linear(state.h, weights.Q) + inputs.c, weights.b)
        return State(g * state.h + (1 - g) * c)


def modrelu(z: Tensor, b: Tensor) -> Tensor:
    """sign(z) ReLU(|z| + b)."""
    return torch.sign(z) * torch.relu(torch.abs(z) + b)


def _phases(angles: Tensor) -> Tensor:
    """e^(i angle)."""
    wide = at_least_float32(angles)
    return torch.polar(torch.ones_like(wide), wide)


def _turn(M: Tensor, begin: int, stride: int, c: Tensor, s: Tensor, phase: Tensor | None) -> Tensor:
    """Apply one layer of rotations to the rows of M."""
    n = M.shape[0]
    pairs = M[begin : n - begin].reshape(-1, 2, stride, n)
    c, s = c.reshape(-1, stride, 1), s.reshape(-1, stride, 1)
    first, second = pairs[:, 0], pairs[:, 1]
    turned = c * first - s * second
    if phase is not None:
        turned = phase.reshape(-1, stride, 1) * turned
    rows = torch.stack([turned, s * first + c * second], dim=1).reshape(-1, n)
    return torch.cat([M[:begin], rows, M[n - begin :]]) if begin else rows


def _check_power_of_two(size: int) -> None:
    if size & (size - 1) or size < 2:
        below = 1 << max(size.bit_length() - 1, 1)
        nearest = below if size - below <= 2 * below - size else 2 * below
        raise ValueError(
            f"the FFT style pairs coordinates at strides H/2, H/4, ..., 1, so hidden_size must be a power of two, at least 2; "
            f"got {size}. Nearest: {nearest}; or give a capacity for the tunable style."
        )
