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
from typing import Any, ClassVar, Generic, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from unfading.errors import check_count, unknown

Activation = Literal["relu", "tanh", "sigmoid"]

# The NamedTuples of a cell. A class that names none, `class Mine(Cell)`, is not checked.
Inputs = TypeVar("Inputs", bound=tuple[Any, ...], default=Any)
State = TypeVar("State", bound=tuple[Any, ...], default=Any)
Weights = TypeVar("Weights", bound=tuple[Any, ...], default=Any)


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


def at_least_float32(tensor: Tensor) -> Tensor:
    """For what half precision has not, or cannot do: complex numbers, matrix functions, fixed points."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Gains(NamedTuple):
    """Intervals that hold all singular values of a step's Jacobians: dh_t/dx_t, and dh_t/dh_{t-1} with other states held."""

    input: tuple[float, float]
    state: tuple[float, float]


class Cell(nn.Module, ABC, Generic[Inputs, State, Weights]):
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
    def project(self, x: Tensor, start: int = 0) -> Inputs:
        """The inputs of every step, from x [T, B, I] alone; `start` is the absolute index of x's first step.

        All that cuts time in pieces passes `start`, so that a cell whose arithmetic depends on the index of the step
        gives the same result whole and in pieces.
        """

    @abstractmethod
    def weights(self) -> Weights:
        """The matrices, vectors and scalars that `step` uses, every reparametrisation done."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state before the first step, each part [batch, n], on the device and in the dtype of the parameters."""

    @abstractmethod
    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
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

    def output(self, state: State) -> Tensor:
        """What the next layer sees of a state; any leading axes, so that it runs once over all time."""
        first: Tensor = state[0]
        return first
