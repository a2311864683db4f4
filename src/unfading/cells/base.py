"""The contract of a cell.

Letters in the whole library: T time, B batch, I input size, H hidden size. A file that needs others defines them in its
docstring. The layout inside the library is always [T, B, ...].

A cell is one recurrent update and nothing else. `project` computes what depends on the input alone, once for all time;
`weights` computes what depends on the parameters alone, once per forward pass; `step` is the only sequential part:

    inputs = cell.project(x)                                x [T, B, I]; each field [T, B, n]
    weights = cell.weights()
    state = cell.initial_state(B)                           each part [B, n]
    for t in range(T):
        state = cell.step(inputs at t, state, weights)
        output[t] = cell.output(state)

A convolutional cell reads frames: x is [T, B, I, height, width] with I channels, each input field [T, B, n, height, width] and
each part of the state [B, n, height, width].
"""

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from unfading.allocation import refuse_large
from unfading.cells.recipe import Recipe
from unfading.errors import check_count, check_flag, unknown

Activation = Literal["relu", "tanh", "sigmoid"]

# The NamedTuples of a cell. A type checker does not check a class that names none, `class Mine(Cell)`.
Inputs = TypeVar("Inputs", bound=tuple[Any, ...], default=Any)
State = TypeVar("State", bound=tuple[Any, ...], default=Any)
Weights = TypeVar("Weights", bound=tuple[Any, ...], default=Any)
AnyCell = TypeVar("AnyCell")


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of an activation's name."""
    if name not in get_args(Activation):
        raise ValueError(unknown("activation", name, get_args(Activation)))
    function: Callable[[Tensor], Tensor] = getattr(torch, name)
    return function


def known_activation(name: Activation) -> Activation:
    """The name itself; raises ValueError if there is no such activation. For constructors."""
    activation(name)
    return name


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 or wider, for what half precision lacks: complex numbers, matrix functions, exact fixed points."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Gains(NamedTuple):
    """Intervals of all singular values of a step's Jacobians: dh_t/dx_t, and dh_t/dh_{t-1} with the other states fixed."""

    input: tuple[float, float]
    state: tuple[float, float]


class CellClass(ABCMeta):
    """The class of cell classes: checks the flags of a cell, and refuses one that does not fit in memory."""

    def __call__(cls: "type[AnyCell]", *arguments: Any, **options: Any) -> "AnyCell":
        parameters = inspect.signature(cls).parameters if options else {}
        for name in options.keys() & parameters.keys():
            if isinstance(parameters[name].default, bool):
                check_flag(name, options[name])
        with refuse_large(cls.__name__, "input size, hidden size or number of units"):
            return type.__call__(cls, *arguments, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of the constructor; `inspect` would take those of `__call__`."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Cell(nn.Module, Generic[Inputs, State, Weights], metaclass=CellClass):
    """One recurrent update and nothing else: no loop over time, no layers, no handling of lengths.

    Inputs, weights and state are NamedTuples: readable names, and plain tuples for torch.func, gradcheck and export. Every
    field is a tensor; a field of the weights may be a `LowRank` or a `BlockDiagonal`. `docs/guide/own-cell.md` explains an
    example. A type checker checks the methods of a class `MyCell(Cell[Inputs, State, Weights])` against its NamedTuples.

    Args:
        input_size: I, the number of features of x.
        output_size: the number of features of `output(state)`.
    """

    shared: tuple[str, ...] = ()
    """Input fields that are [T, 1, n], equal for all batch rows (step sizes). The k-th step that is run reads entry k."""

    constant: tuple[str, ...] = ()
    """Input fields that are [1, B, n], equal for all time steps, such as a dropout mask."""

    example_frame: tuple[int, ...] = ()
    """Height and width of frames with which the library tests a convolutional cell; empty for cells that read vectors."""

    paper: ClassVar[str] = ""
    """Where the equation comes from: first author, year."""

    recipe: ClassVar[Recipe] = Recipe()
    """The settings with which the command line trains the cell where the user gives none."""

    released: ClassVar[Mapping[str, Any] | None] = None
    """The options that give the equation of the authors' released code, where it differs from the paper's."""

    singular_values_at_zero: Gains | None = None
    """Claim: the singular values of a step's Jacobians at zero state, input and biases, with square orthogonal matrices."""

    orthogonal_recurrence: str | None = None
    """Claim: this field of the weights stays an orthogonal matrix (or a unitary one, in real pairs) in training."""

    jacobian_at_equilibrium: float | None = None
    """Claim: dh_t/dh_{t-1} is this multiple of the identity, exactly."""

    bounded_state: float | None = None
    """Claim: from the initial state, for any input, no entry of the output exceeds this in absolute value."""

    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        check_count("input_size", input_size)
        check_count("output_size", output_size)
        self.input_size = input_size
        self.output_size = output_size

    @abstractmethod
    def project(self, x: Tensor, start: int = 0) -> Inputs:
        """The inputs of every step, from x [T, B, I] alone; `start` is the absolute index of x's first step.

        Code that runs a sequence in chunks passes `start`, so that a cell whose arithmetic depends on the index of the step
        gives the same result in chunks as in one call. A projection along time (a convolution, a cumulative sum, a norm over
        all steps) is allowed: it is computed once for the whole sequence, and refused where there is none, as in a stream.
        """

    @abstractmethod
    def weights(self) -> Weights:
        """The matrices, vectors and scalars that `step` uses, after every reparametrisation."""

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state before the first step, each part [batch, n], on the device and in the dtype of the parameters.

        A convolutional cell returns parts [batch, n, 1, 1], which the library expands to the size of the frames.
        """

    @abstractmethod
    def step(self, inputs: Inputs, state: State, weights: Weights) -> State:
        """The equation, line for line: the state after one step. A pure function; inputs and state have no time axis."""

    def state_frame(self, frame: tuple[int, ...]) -> tuple[int, ...]:
        """Height and width of the state for input frames of this height and width; raises ValueError if they do not fit."""
        return frame

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Always raises: a cell is one step and not a layer."""
        name = type(self).__name__
        raise TypeError(
            f"{name} is a cell, one step of a network, and cannot be called. Run it with "
            f"unfading.Recurrent(lambda size: {name}(size, ...), input_size)."
        )

    def penalty(self) -> Tensor | None:
        """A penalty on this cell's parameters that training adds to the loss, or None."""
        return None

    def output(self, state: State) -> Tensor:
        """The part of a state that the next layer reads. Accepts any leading axes, so that it runs once for all time."""
        first: Tensor = state[0]
        return first


def in_frame(state: Any, frame: tuple[int, ...]) -> Any:
    """A state of `initial_state` with frames of this size; the state itself where the frame is empty."""
    return type(state)(*(part.expand(*part.shape[:2], *frame) for part in state)) if frame else state
