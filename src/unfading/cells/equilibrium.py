"""EquilibriumRNN: the incremental RNN with its inner iteration run to convergence and differentiated implicitly.

    s_m = the solution of alpha s = phi(U s + W x_m + b)        unique where ||U|| < alpha and phi is 1-Lipschitz
    h_m = s_m - h_{m-1}                                         (+ h_{m-1} in the -h form)

Kag et al. 2020, eq. 5 for K -> infinity. The solution does not depend on h_{m-1}: the increments cancel it. Three things
follow.

- dh_m/dh_{m-1} = -I exactly: Theorem 1 holds, and does not depend on the parameters.
- h_T = sum_m (-1)^(T-m) s(x_m): the cell depends only on the parity of a step's distance to the end. It cannot solve adding or
  copying, which need the order of the inputs. What the paper trains is the iteration stopped early.
- All T equations can be solved at once. `project` does this; the remaining recurrence is a subtraction.

s is computed by iterating s <- phi(U s + u) / alpha, each row until it stops changing, at most `iterations` times. The gradient
solves the adjoint equation by the same iteration, so that no iterate is stored.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from unfading.cells.base import Activation, Cell, activation, at_least_float32, known_activation
from unfading.cells.matrix import linear
from unfading.errors import check_count, check_number, check_positive
from unfading.initialise import gaussian_
from unfading.torch_state import traced


class Inputs(NamedTuple):
    s: Tensor  # [T, B, H] equilibria


class Weights(NamedTuple):
    """Empty: the recurrence has no parameters."""


class State(NamedTuple):
    h: Tensor  # [B, H]


class EquilibriumRNNCell(Cell[Inputs, State, Weights]):
    """Incremental RNN whose equilibrium is solved exactly at each step.

    Args:
        iterations: the largest number of iterations per equilibrium and per adjoint.
        tolerance: a row has converged when no entry changes by more than this many rounding units of the row's largest entry.
        alpha: factor of s in the equation; U starts with norm about 0.6 alpha and may grow past alpha in training.
        activation: the function phi of the equation.
        minus: compute h_m = s_m + h_{m-1} instead, which changes the Jacobian from -I to I.
    """

    paper = "Kag 2020, eq. 5"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        iterations: int = 200,
        tolerance: float = 4.0,
        alpha: float = 1.0,
        activation: Activation = "relu",
        minus: bool = False,
    ):
        super().__init__(input_size, hidden_size)
        check_count("iterations", iterations)
        check_number("tolerance", tolerance)
        check_positive("alpha", alpha)
        self.iterations, self.tolerance, self.alpha = iterations, tolerance, alpha
        self.activation = known_activation(activation)
        self.minus = minus
        self.jacobian_at_equilibrium = 1.0 if minus else -1.0
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        self.U = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        gaussian_(self.from_input.weight, 0.1, generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)
        # A Gaussian matrix with entries of variance 1 / H has norm about 2.
        gaussian_(self.U, 0.3 * self.alpha / math.sqrt(self.output_size), generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        u = at_least_float32(self.from_input(x))
        with torch.autocast(x.device.type, enabled=False):
            s = Equilibrium.apply(u, self.U.to(u.dtype), self.alpha, self.activation, self.iterations, self.tolerance)
        return Inputs(s.to(self.U.dtype))

    def weights(self) -> Weights:
        return Weights()

    def initial_state(self, batch: int) -> State:
        return State(self.U.new_zeros(batch, self.output_size))

    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        return State(inputs.s + state.h if self.minus else inputs.s - state.h)


class Equilibrium(torch.autograd.Function):
    """s with alpha s = phi(U s + u), row by row over the last axis of u, and its implicit derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, U: Tensor, alpha: float, name: Activation, iterations: int, tolerance: float) -> Tensor:
        phi = activation(name)
        return _settle(lambda s: phi(u + linear(s, U)) / alpha, torch.zeros_like(u), iterations, tolerance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, U, *ctx.settings = inputs
        ctx.save_for_backward(U, output)

    @staticmethod
    def backward(ctx: Any, ds: Tensor) -> tuple[Tensor | None, ...]:
        # ds = q (U ds + dU s + du) with q = phi'(.) / alpha, so the adjoint w solves w = ds + U^T (q w).
        U, s = ctx.saved_tensors
        alpha, name, iterations, tolerance = ctx.settings
        y = alpha * s
        slope = {"relu": lambda: (y > 0).to(y.dtype), "tanh": lambda: 1 - y * y, "sigmoid": lambda: y * (1 - y)}[name]()
        q = slope / alpha
        du = q * Adjoint.apply(ds, q, U, iterations, tolerance)
        return du, du.flatten(0, -2).T @ s.flatten(0, -2), None, None, None, None


class Adjoint(torch.autograd.Function):
    """w with w = r + U^T (q w), row by row; linear in r, and differentiable itself, for second derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(r: Tensor, q: Tensor, U: Tensor, iterations: int, tolerance: float) -> Tensor:
        return _settle(lambda w: r + linear(q * w, U.T), torch.zeros_like(r), iterations, tolerance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, q, U, *ctx.settings = inputs
        ctx.save_for_backward(q, U, output)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        q, U, w = ctx.saved_tensors
        v = _settle(lambda v: dw + q * linear(v, U), torch.zeros_like(dw), *ctx.settings)
        return v, w * linear(v, U), (q * w).flatten(0, -2).T @ v.flatten(0, -2), None, None


def _settle(f: Callable[[Tensor], Tensor], s: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Iterate s <- f(s) from 0; a row that has converged keeps its value, independently of the other rows."""
    epsilon = tolerance * torch.finfo(s.dtype).eps
    moving = torch.ones_like(s[..., :1], dtype=torch.bool)
    for _ in range(iterations):
        new = torch.where(moving, f(s), s)
        # Relative to the largest entry of the row: gradients have any size.
        moving = moving & ((new - s).abs().amax(-1, keepdim=True) > epsilon * new.abs().amax(-1, keepdim=True))
        s = new
        if not traced() and not moving.any():
            break
    return s
