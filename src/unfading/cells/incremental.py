"""Incremental RNN: the state moves K small steps towards the equilibrium of an ODE that depends on the new input.

Here D = H is the state size, r the rank, K the number of inner steps, m the time index. With g_0 = h_{m-1}, for k = 1..K:

    s   = g_{k-1} + h_{m-1}
    g_k = g_{k-1} + eta_{m,k} * (phi(P [U s + W x_m + b]) - alpha s)
    h_m = g_K

Kag, Zhang & Saligrama 2020, eq. 9, with P = U = I + V H, V [D, r], H [r, D]; eq. 5 is P = I. As in their experiments phi
is ReLU, alpha = 1, and eta is a table of unconstrained step sizes, one per time step and inner step, initially all 0.01.

Each inner step needs one product and not two: P [U s + W x + b] = (P U) s + P (W x + b), so `project` computes u = P (W x + b)
and `weights` computes M = P U = I + V (2 I + H V) H.

Properties (with A_k = I + eta_k (phi' P U - alpha I), and c = 2 for g_0 = h, c = 1 for g_0 = 0):

- dh_m/dh_{m-1} = c A_K ... A_1 - I. The paper's Theorem 1 is its limit -I for K -> infinity, if ||P U|| < alpha and
  eta alpha <= 1. Its norm passes near zero before the limit, so that a larger K is not always better.
- At the published initial values (eta = 0.01, g_0 = h) the Jacobian is about +I: an ordinary residual network. With g_0 = 0 it
  is about 0.01, and the cell hardly learns.
- U = I + V H with r < D has ||U|| >= 1 = alpha, so the published form violates the hypotheses of the theorem. A full U
  (rank = D) of norm below alpha satisfies them. (Section 3.2 of the paper writes alpha I + V H; eq. 9 and alpha = 1 make it I.)
- At the initial values the state grows by an order of exp(eta K T (lambda - 1)), lambda the top eigenvalue of P U: with 128
  units, rank 32 and K = 5 it can overflow float32 before T = 784. Shrink eta like 1 / (K T), or take a smaller rank.
- With -h in place of h the Jacobian is I - c' A_K ... A_1, c' = 1 for g_0 = 0 and 0 for g_0 = h. The latter is a pure
  accumulator, and for K = 1 with P = I its U has no gradient at all.
- With one row of eta per time step the table is a clock. A model trained on noisy MNIST, where the image is always in the first
  28 of 1,000 steps, has |eta| = 0.12 there and 0.001 on the noise, and is at chance when the image starts 10 steps later. It
  recognises the noise by its position (docs/papers/clock.md).

No released code is known. The authors' later TARNN code decides what the paper leaves open: g_0 = h, V, H, W ~ N(0, 0.1^2),
b = 0. A table of eta is made for sequences of its own length; past its end the last row is used here.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from typing_extensions import TypeVar

from unfading.cells.base import Activation, Cell, activation, known_activation
from unfading.cells.matrix import LowRank, Matrix, linear
from unfading.cells.recipe import Recipe
from unfading.errors import check_count, check_number, check_positive, check_rank
from unfading.initialise import gaussian_


class Inputs(NamedTuple):
    u: Tensor  # [T, B, D] P (W x + b)
    eta: Tensor  # [T, 1, K] step sizes


class Weights(NamedTuple):
    M: Tensor | LowRank  # [D, D] P U


class State(NamedTuple):
    h: Tensor  # [B, D]


# What to try where the published form diverges.
STABLE_FORM = "StableIncrementalRNN, which diverges far less often, a smaller learning rate, or --retries 3"

AnyWeights = TypeVar("AnyWeights", bound=tuple[Any, ...], default=Any)


class InnerStepsCell(Cell[Inputs, State, AnyWeights]):
    """The common part of incremental networks: the input matrix, the table of step sizes, and the K inner steps."""

    shared = ("eta",)
    # At the full rate the step sizes grow until training fails (docs/papers/findings.md).
    recipe = Recipe(rate=6e-3, rates={"eta": 0.1}, length_options=("steps",))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool,
        inner_steps: int,
        steps: int,
        eta: float,
        learn_eta: bool,
        bounded_eta: bool,
        alpha: float,
        activation: Activation,
        from_zero: bool,
        minus: bool,
    ):
        super().__init__(input_size, hidden_size)
        check_count("inner_steps", inner_steps)
        check_count("steps", steps)
        check_number("eta", eta)
        check_number("alpha", alpha)
        if bounded_eta and not (alpha > 0 and 0 < eta * alpha < 1):
            raise ValueError(f"bounded_eta=True keeps eta in (0, 1 / alpha); got eta={eta} with alpha={alpha}.")
        self.inner_steps = inner_steps
        self.eta_start = eta
        self.bounded_eta = bounded_eta
        self.alpha = alpha
        self.activation = known_activation(activation)
        self.from_zero = from_zero
        self.minus = minus
        self.from_input = nn.Linear(input_size, hidden_size, bias=bias)
        table = torch.empty(steps, inner_steps)
        if learn_eta:
            self.eta = nn.Parameter(table)
        else:
            self.register_buffer("eta", table)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        gaussian_(self.from_input.weight, 0.1, generator=generator)
        if self.from_input.bias is not None:
            nn.init.zeros_(self.from_input.bias)
        # With bounded_eta the table contains the arguments of the sigmoid.
        share = self.eta_start * self.alpha
        self.eta.detach().fill_(math.log(share / (1 - share)) if self.bounded_eta else self.eta_start)

    def step_sizes(self, start: int, stop: int) -> Tensor:
        """eta of the steps start..stop - 1, [T, 1, K]."""
        rows = torch.arange(start, stop, device=self.eta.device).clamp(max=self.eta.shape[0] - 1)
        table = self.eta[rows].unsqueeze(1)
        return torch.sigmoid(table) / self.alpha if self.bounded_eta else table

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        return Inputs(self.from_input(x), self.step_sizes(start, start + x.shape[0]))

    def initial_state(self, batch: int) -> State:
        return State(self.from_input.weight.new_zeros(batch, self.output_size))

    def pull(self, s: Tensor, u: Tensor, weights: Any) -> Tensor:
        """F(s) = phi(M s + u) - alpha s, which is zero at an equilibrium: the paper's F, with s = g + h."""
        return activation(self.activation)(linear(s, weights.M) + u) - self.alpha * s

    def step(self, inputs: Inputs, state: State, weights: AnyWeights) -> State:
        h = -state.h if self.minus else state.h
        g = torch.zeros_like(state.h) if self.from_zero else state.h
        for eta in inputs.eta.split(1, dim=-1):
            g = g + eta * self.pull(g + h, inputs.u, weights)
        return State(g)


class IncrementalRNNCell(InnerStepsCell[Weights]):
    """Recurrent cell that evolves its state towards an equilibrium.

    Args:
        inner_steps: K, the number of inner steps per time step.
        rank: r of U = I + V H; None takes an eighth of the hidden size, rounded up. With the full hidden size V H is one dense
            matrix.
        projection_rank: rank of a separate P = I + V_P H_P; 0 omits P (eq. 5); None ties P = U (eq. 9).
        steps: number of rows of the table of eta. Row m is used at time step m, the last row at all later ones. The paper
            has one row per step of its sequences; 1 gives one eta per inner step for all time.
        eta: initial value of every step size.
        learn_eta: learn the step sizes; otherwise they are fixed.
        bounded_eta: keep every step size in [0, 1 / alpha]: eta = sigmoid(.) / alpha, with the argument in the table.
        alpha: factor of the leak term, -alpha s.
        activation: the function phi of the equation.
        std: initial standard deviation of the entries of V and H; None takes 0.1, as in the authors' code, and 0.3 / sqrt(D)
            for a dense V H.
        from_zero: start the inner steps at g_0 = 0 instead of g_0 = h.
        minus: use -h_{m-1} in place of h_{m-1}, which changes the limit of the Jacobian from -I to I.
    """

    paper = "Kag 2020"
    recipe = InnerStepsCell.recipe._replace(options={"inner_steps": 1}, if_diverged=STABLE_FORM)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        inner_steps: int = 5,
        rank: int | None = None,
        projection_rank: int | None = None,
        steps: int = 1,
        eta: float = 0.01,
        learn_eta: bool = True,
        bounded_eta: bool = False,
        alpha: float = 1.0,
        activation: Activation = "relu",
        std: float | None = None,
        from_zero: bool = False,
        minus: bool = False,
    ):
        super().__init__(
            input_size,
            hidden_size,
            bias=bias,
            inner_steps=inner_steps,
            steps=steps,
            eta=eta,
            learn_eta=learn_eta,
            bounded_eta=bounded_eta,
            alpha=alpha,
            activation=activation,
            from_zero=from_zero,
            minus=minus,
        )
        rank = math.ceil(hidden_size / 8) if rank is None else rank
        check_rank("rank", rank, hidden_size)
        if projection_rank is not None:
            check_rank("projection_rank", projection_rank, hidden_size, least=0)
        if std is not None:
            check_positive("std", std)
        self.std = std
        self.U = _near_identity(hidden_size, rank)
        self.tied = projection_rank is None
        self.P = _near_identity(hidden_size, projection_rank) if projection_rank else None
        self.reset_parameters()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        super().reset_parameters(generator)
        for matrix in (self.U, self.P):
            if matrix is not None:
                # A dense V H starts with norm about 0.6; two factors start as in the authors' code.
                usual = 0.1 if len(matrix.factors) == 2 else 0.3 / math.sqrt(self.output_size)
                for factor in matrix.factors:
                    gaussian_(factor, usual if self.std is None else self.std, generator=generator)

    def project(self, x: Tensor, start: int = 0) -> Inputs:
        inputs = super().project(x, start)
        P = self.U if self.tied else self.P
        return inputs if P is None else inputs._replace(u=linear(inputs.u, P()))

    def weights(self) -> Weights:
        U = self.U()
        if self.tied:
            return Weights(_square(U))
        return Weights(U if self.P is None else _product(self.P(), U))


class SiRNNCell(IncrementalRNNCell):
    """Incremental RNN with a single inner step, K = 1 (eq. 6).

    Args:
        rank: r of U = I + V H; None takes an eighth of the hidden size, rounded up.
        projection_rank: rank of a separate P = I + V_P H_P; 0 omits P; None ties P = U.
        steps: number of rows of the table of eta. Row m is used at time step m, the last row at all later ones.
        eta: initial value of every step size.
        learn_eta: learn the step sizes; otherwise they are fixed.
        bounded_eta: keep every step size in [0, 1 / alpha]: eta = sigmoid(.) / alpha, with the argument in the table.
        alpha: factor of the leak term, -alpha s.
        activation: the function phi of the equation.
        std: initial standard deviation of the entries of V and H; None takes 0.1, as in the authors' code, and 0.3 / sqrt(D)
            for a dense V H.
        from_zero: start at g_0 = 0 instead of g_0 = h.
        minus: use -h_{m-1} in place of h_{m-1}.
    """

    recipe = InnerStepsCell.recipe._replace(if_diverged=STABLE_FORM)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        rank: int | None = None,
        projection_rank: int | None = None,
        steps: int = 1,
        eta: float = 0.01,
        learn_eta: bool = True,
        bounded_eta: bool = False,
        alpha: float = 1.0,
        activation: Activation = "relu",
        std: float | None = None,
        from_zero: bool = False,
        minus: bool = False,
    ):
        super().__init__(
            input_size,
            hidden_size,
            bias=bias,
            inner_steps=1,
            rank=rank,
            projection_rank=projection_rank,
            steps=steps,
            eta=eta,
            learn_eta=learn_eta,
            bounded_eta=bounded_eta,
            alpha=alpha,
            activation=activation,
            std=std,
            from_zero=from_zero,
            minus=minus,
        )


def _near_identity(size: int, rank: int) -> Matrix:
    """I + V H; at full rank V H is one matrix."""
    return Matrix(size, size, rank=None if rank == size else rank, identity=1.0)


def _square(U: Tensor | LowRank) -> Tensor | LowRank:
    """U U; of I + V H it is I + V (2 I + H V) H, of the same rank."""
    if isinstance(U, Tensor):
        return U @ U
    return LowRank(torch.addmm(U.left, U.left, U.right @ U.left, beta=2), U.right)


def _product(P: Tensor | LowRank, U: Tensor | LowRank) -> Tensor | LowRank:
    """P U; of I + V_P H_P and I + V H it is I + [V_P, V + V_P H_P V] [H_P; H]."""
    if isinstance(P, LowRank) and isinstance(U, LowRank):
        left = torch.cat([P.left, U.left + P.left @ (P.right @ U.left)], dim=1)
        return LowRank(left, torch.cat([P.right, U.right]))
    P = P.dense() if isinstance(P, LowRank) else P
    U = U.dense() if isinstance(U, LowRank) else U
    return P @ U
