"""The contract of a cell.

Letters, everywhere: T time, B batch, I input size, H hidden size; another file that needs more says so in its docstring.
One layout, [T, B, ...], everywhere inside the library.

A cell is one recurrent update and nothing else. What needs the input alone is in `project` and runs once over all time;
what needs the parameters alone is in `weights` and runs once per forward; `step` is the only sequential part:

    inputs = cell.project(x)                                x [T, B, I]; each field [T, B, n]
    weights = cell.weights()
    state = cell.initial_state(B)                           each part [B, n]
    for t in range(T):
        state = cell.step(inputs at t, state, weights)
        output[t] = cell.output(state)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree

from unfading.errors import check_count, unknown

Activation = Literal["relu", "tanh", "sigmoid"]


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function behind an activation's name: the one place where a name becomes arithmetic."""
    if name not in get_args(Activation):
        raise ValueError(unknown("activation", name, get_args(Activation)))
    function: Callable[[Tensor], Tensor] = getattr(torch, name)
    return function


def known_activation(name: Activation) -> Activation:
    """The name itself, or a ValueError where there is no such activation: for constructors."""
    activation(name)
    return name


@dataclass(frozen=True)
class LowRank:
    """The matrix identity * I + left @ right, kept in its factors.

    Args:
        left: [n, r].
        right: [r, m], with m = n unless identity is 0.
        identity: the multiple of the identity matrix; 0 for a plain product.
    """

    left: Tensor
    right: Tensor
    identity: float = 1.0

    def dense(self) -> Tensor:
        """The matrix written out, [n, m]."""
        if self.identity == 0.0:
            return self.left @ self.right
        eye = torch.eye(self.right.shape[-1], dtype=self.right.dtype, device=self.right.device)
        return torch.addmm(eye, self.left, self.right, beta=self.identity)


# A tree node whose leaves are the two factors, so that torch.func, compile and export see tensors and no float.
_pytree.register_pytree_node(
    LowRank,
    lambda matrix: ([matrix.left, matrix.right], matrix.identity),
    lambda factors, identity: LowRank(*factors, identity),  # type: ignore[call-arg]
    serialized_type_name="unfading.LowRank",
)


@dataclass(frozen=True)
class Masked:
    """The matrix W diag(mask), with a mask of its own for each row of the batch: what recurrent dropout makes of W.

    Args:
        matrix: W, [n, m].
        mask: [B, m].
    """

    matrix: "Tensor | LowRank | Masked"
    mask: Tensor

    def __getitem__(self, rows: slice) -> "Masked":
        if isinstance(self.matrix, LowRank):
            raise TypeError("a LowRank matrix has no rows to take; keep each matrix of a step in a field of its own.")
        return Masked(self.matrix[rows], self.mask)


def linear(v: Tensor, W: Tensor | LowRank | Masked) -> Tensor:
    """v W^T over the last axis: one dot, or two thin ones where W is kept in its factors."""
    if isinstance(W, Masked):
        return linear(v * W.mask, W.matrix)
    if isinstance(W, Tensor):
        return functional.linear(v, W)
    product = functional.linear(functional.linear(v, W.right), W.left)
    return product if W.identity == 0.0 else W.identity * v + product


def at_least_float32(tensor: Tensor) -> Tensor:
    """For what half precision has not, or cannot do: complex numbers, matrix functions, fixed points."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Matrix(nn.Module):
    """A learnt matrix identity * I + N, with N dense or, given a rank, a product of two factors. Its cell starts it."""

    def __init__(self, rows: int, columns: int, *, rank: int | None = None, identity: float = 0.0):
        super().__init__()
        self.identity = identity
        shapes = [(rows, columns)] if rank is None else [(rows, rank), (rank, columns)]
        self.factors = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

    def forward(self) -> Tensor | LowRank:
        if len(self.factors) == 2:
            return LowRank(self.factors[0], self.factors[1], self.identity)
        N: Tensor = self.factors[0]
        if self.identity == 0.0:
            return N
        return self.identity * torch.eye(N.shape[0], dtype=N.dtype, device=N.device) + N


class Gains(NamedTuple):
    """Intervals that hold all singular values of a step's Jacobians: dh_t/dx_t, and dh_t/dh_{t-1} with other states held."""

    input: tuple[float, float]
    state: tuple[float, float]


class Cell(nn.Module, ABC):
    """One recurrent update and nothing else: no time loop, no batching policy.

    Inputs, weights and state are NamedTuples: names for people, tuples for torch.func, gradcheck and export. Every
    member is a tensor; a member of the weights may be a `LowRank`. `docs/guide/own-cell.md` walks through an example.

    Args:
        input_size: I, the features of x.
        output_size: the features of `output(state)`.
    """

    shared: tuple[str, ...] = ()
    """Fields of the inputs that are [T, 1, n]: one row for the whole batch, read by processing step (step sizes)."""

    constant: tuple[str, ...] = ()
    """Fields of the inputs that are [1, B, n]: one value for all time (a dropout mask)."""

    paper: ClassVar[str] = ""
    """Where the equation comes from: first author, year."""

    released: ClassVar[Mapping[str, Any] | None] = None
    """The options that turn the paper's equation into the one of its authors' released code, where they differ."""

    singular_values_at_zero: Gains | None = None
    """Claim: the step's gains at zero state, zero input, zero biases and square orthogonal matrices."""

    orthogonal_recurrence: str | None = None
    """Claim: this field of the weights is an orthogonal matrix (of a unitary one, in real pairs), however it is trained."""

    jacobian_at_equilibrium: float | None = None
    """Claim: dh_t/dh_{t-1} is this multiple of the identity, exactly."""

    bounded_state: float | None = None
    """Claim: from the initial state, whatever the input, no entry of the output exceeds this in absolute value."""

    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        check_count("input_size", input_size)
        check_count("output_size", output_size)
        self.input_size = input_size
        self.output_size = output_size

    @abstractmethod
    def project(self, x: Tensor, start: int = 0) -> Any:
        """The inputs of every step, from x [T, B, I] alone; `start` is the absolute index of x's first step.

        All that cuts time in pieces passes `start`, so that a cell whose arithmetic depends on the index of the step
        gives the same result whole and in pieces.
        """

    @abstractmethod
    def weights(self) -> Any:
        """The matrices, vectors and scalars that `step` uses, every reparametrisation done."""

    @abstractmethod
    def initial_state(self, batch: int) -> Any:
        """The state before the first step, each part [batch, n], on the device and in the dtype of the parameters."""

    @abstractmethod
    def step(self, inputs: Any, state: Any, weights: Any) -> Any:
        """The equation, line for line: the state after one step. Pure; inputs and state have lost their time axis."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """A cell is one step, not a layer: always an error, with the way out."""
        name = type(self).__name__
        raise TypeError(
            f"{name} is a cell, one step of a network, and cannot be called; run it with "
            f"unfading.Recurrent(lambda size: {name}(size, ...), input_size)."
        )

    def penalty(self) -> Tensor | None:
        """What training should add to the loss on account of this cell's parameters; None for nothing."""
        return None

    def output(self, state: Any) -> Tensor:
        """What the next layer sees of a state; any leading axes, so that it runs once over all time."""
        first: Tensor = state[0]
        return first
