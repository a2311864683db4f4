"""Unitary networks on complex states: the structured uRNN, and the full one.

A complex vector z is stored as a real pair [Re z, Im z], a complex matrix M as [[Re M, -Im M], [Im M, Re M]]:

    z_t = W h_{t-1} + V x_t
    h_t = modReLU(z_t) = z_t * ReLU(|z_t| + b) / |z_t|

UnitaryRNN (Arjovsky et al. 2016): W = D_3 R_2 F^-1 D_2 Pi R_1 F D_1, with D diagonal phases, R reflections I - 2 v v^* / |v|^2,
F the Fourier transform, Pi a fixed permutation, (Pi z)_i = z_pi(i): 7 H real numbers. Its 16,394 parameters on pixel MNIST (512
units) include a learned initial state: `learn_initial_state=True`, which starts at 0 here and in U(+-sqrt(3 / 2H)) there.
FullUnitaryRNN (Wisdom et al. 2016): W any unitary matrix. They keep W on the manifold by multiplicative Cayley updates; here it
is parametrised, so that every optimiser works: W = (I - A/2)^-1 (I + A/2) or exp(A), with A = -A^* given by H^2 real numbers.

The output of both is all of h, real and imaginary parts: output size 2 H. |z| is sqrt(Re^2 + Im^2 + 1e-10), which has a
gradient at 0; the authors divide by |z| + 1e-5.
"""

import math
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.antisymmetric import skew_matrix
from unfading.cells.base import Cell, at_least_float32
from unfading.cells.matrix import linear
from unfading.initialise import gaussian_, uniform_


class Inputs(NamedTuple):
    a: Tensor  # [T, B, 2H] V x


class Weights(NamedTuple):
    W: Tensor  # [2H, 2H]
    b: Tensor  # [H]


class State(NamedTuple):
    h: Tensor  # [B, 2H] real half, then imaginary half


class ComplexCell(Cell[Inputs, State, Weights]):
    """The common part of unitary networks: everything except the construction of W."""

    orthogonal_recurrence = "W"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool):
        super().__init__(input_size, 2 * hidden_size)
        self.hidden_size = hidden_size
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=False)
        self.b = nn.Parameter(torch.empty(hidden_size)) if bias else None

    def reset_parameters(self, generator: Generator | None = None) -> None:
        uniform_(self.from_input.weight, math.sqrt(6 / (self.input_size + self.hidden_size)), generator=generator)
        if self.b is not None:
            uniform_(self.b, 0.01, generator=generator)

    @abstractmethod
    def unitary(self) -> Tensor:
        """W, complex [H, H]."""

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x))

    def weights(self) -> Weights:
        W = real_pair(self.unitary()).to(self.from_input.weight.dtype)
        return Weights(W, W.new_zeros(self.hidden_size) if self.b is None else self.b)

    def initial_state(self, batch: int) -> State:
        return State(self.from_input.weight.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(modrelu_pair(inputs.a + linear(state.h, weights.W), weights.b))


class UnitaryRNNCell(ComplexCell):
    """Unitary evolution recurrent network."""

    paper = "Arjovsky 2016"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True):
        super().__init__(input_size, hidden_size, bias=bias)
        self.phases = nn.Parameter(torch.empty(3, hidden_size))  # of D_1, D_2, D_3
        self.reflections = nn.Parameter(torch.empty(2, 2, hidden_size))  # of R_1, R_2; real, imaginary
        self.register_buffer("permutation", torch.empty(hidden_size, dtype=torch.int64))
        self.permutation: Tensor
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        uniform_(self.phases, math.pi, generator=generator)
        uniform_(self.reflections, math.sqrt(6 / (2 * self.hidden_size)), generator=generator)
        device = self.permutation.device if generator is None else generator.device
        self.permutation.copy_(torch.randperm(self.hidden_size, generator=generator, device=device))

    def unitary(self) -> Tensor:
        phases = at_least_float32(self.phases)
        d_1, d_2, d_3 = torch.polar(torch.ones_like(phases), phases)
        v_1, v_2 = (torch.complex(*at_least_float32(v)) for v in self.reflections)
        M = _reflect(torch.fft.fft(torch.diag(d_1), dim=0, norm="ortho"), v_1)
        M = d_2.unsqueeze(1) * M[self.permutation]
        return d_3.unsqueeze(1) * _reflect(torch.fft.ifft(M, dim=0, norm="ortho"), v_2)


class FullUnitaryRNNCell(ComplexCell):
    """Recurrent network with any unitary matrix.

    Args:
        exponential: W = exp(A) instead of the Cayley form, which needs one linear solve.
    """

    paper = "Wisdom 2016"

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, exponential: bool = False):
        super().__init__(input_size, hidden_size, bias=bias)
        self.exponential = exponential
        self.skew = nn.Parameter(torch.empty(hidden_size * (hidden_size - 1) // 2))  # Re A, above the diagonal
        self.symmetric = nn.Parameter(torch.empty(hidden_size * (hidden_size + 1) // 2))  # Im A, from the diagonal on
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        for entries in (self.skew, self.symmetric):
            gaussian_(entries, 1 / math.sqrt(self.hidden_size), generator=generator)

    def unitary(self) -> Tensor:
        skew, symmetric = at_least_float32(self.skew), at_least_float32(self.symmetric)
        H = self.hidden_size
        rows, columns = torch.triu_indices(H, H, device=skew.device)
        upper = symmetric.new_zeros(H, H).index_put((rows, columns), symmetric)
        A = torch.complex(skew_matrix(skew, H), upper + upper.triu(1).T)
        if self.exponential:
            return torch.linalg.matrix_exp(A)
        eye = torch.eye(H, dtype=A.dtype, device=A.device)
        return torch.linalg.solve(eye - A / 2, eye + A / 2)


def modrelu_pair(z: Tensor, b: Tensor) -> Tensor:
    """z * ReLU(|z| + b) / |z| of a complex vector stored as a real pair."""
    re, im = z.chunk(2, dim=-1)
    size = torch.sqrt(re * re + im * im + 1e-10)
    scale = torch.relu(size + b) / size
    return torch.cat([re * scale, im * scale], dim=-1)


def real_pair(M: Tensor) -> Tensor:
    """A complex matrix as the real one that acts on real pairs."""
    return torch.cat([torch.cat([M.real, -M.imag], dim=1), torch.cat([M.imag, M.real], dim=1)])


def _reflect(M: Tensor, v: Tensor) -> Tensor:
    """(I - 2 v v^* / |v|^2) M."""
    return M - 2 / (v * v.conj()).sum().real * torch.outer(v, v.conj() @ M)
