"""`layer(XCell)` returns the class `X`: a stack of that cell, constructed like torch.nn's recurrent layers.

The layer of a convolutional cell takes channels and a kernel size in the place of sizes, in the order of `torch.nn.Conv2d`.
"""

import inspect
import re
import sys
from functools import cache
from typing import Any, ClassVar, Self

import torch

from unfading.cells.base import Cell
from unfading.cells.convolution import ConvolutionalCell, Pair
from unfading.errors import check_count, check_flag, unknown
from unfading.layers.recurrent import Recurrent, State


class Layer(Recurrent[State]):
    """A `Recurrent` of one kind of cell, constructed like torch.nn's recurrent layers: the base class of what `layer` returns.

    Args:
        hidden_size: number of units of each cell.
        bias: whether the cells have biases.
    """

    cell: ClassVar[type[Cell]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        learn_initial_state: bool = False,
        checkpoint_every: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        """See the class: the options are those of the cell."""
        for name in options:
            if name not in _options(self.cell):
                raise TypeError(unknown(f"option of {type(self).__name__}", name, inspect.signature(type(self)).parameters))
        check_flag("bias", bias)
        check_count("hidden_size", hidden_size)
        takes_bias = "bias" in inspect.signature(self.cell).parameters
        if not takes_bias and not bias:
            raise ValueError(f"{self.cell.__name__} has no argument bias, so bias=False cannot be passed to it. Leave it out.")
        arguments = {"bias": bias, **options} if takes_bias else options
        super().__init__(
            lambda size: self.cell(size, hidden_size, **arguments),
            input_size,
            num_layers,
            batch_first,
            dropout,
            bidirectional,
            recurrent_dropout=recurrent_dropout,
            zoneout=zoneout,
            learn_initial_state=learn_initial_state,
            checkpoint_every=checkpoint_every,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.hidden_size = hidden_size
        self.options = options

    def extra_repr(self) -> str:
        sizes, _, rest = super().extra_repr().partition(", ")
        return ", ".join([sizes, str(self.hidden_size), rest, *(f"{name}={value!r}" for name, value in self.options.items())])

    @classmethod
    def released(cls, input_size: int, hidden_size: int, *arguments: Any, **options: Any) -> Self:
        """The layer with the equation of the authors' released code, where it differs from the paper. Same arguments."""
        if cls.cell.released is None:
            raise ValueError(
                f"{cls.__name__} offers no released form; the docstring of {cls.cell.__module__} explains the differences."
            )
        return cls(input_size, hidden_size, *arguments, **{**cls.cell.released, **options})


class ConvolutionalLayer(Layer[State]):
    """A stack of one kind of convolutional cell, over input [T, B, channels, height, width].

    Args:
        in_channels: number of channels of the input.
        hidden_channels: number of channels of the state of each cell.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: Pair = 3,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        learn_initial_state: bool = False,
        checkpoint_every: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        """See the class: the options are those of the cell."""
        check_count("in_channels", in_channels)
        check_count("hidden_channels", hidden_channels)
        super().__init__(
            in_channels,
            hidden_channels,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            recurrent_dropout=recurrent_dropout,
            zoneout=zoneout,
            learn_initial_state=learn_initial_state,
            checkpoint_every=checkpoint_every,
            backend=backend,
            device=device,
            dtype=dtype,
            kernel_size=kernel_size,
            **options,
        )


@cache
def layer(cell: type[Cell]) -> type[Layer]:
    """The layer class of a cell class: `STAR = layer(STARCell)`. Its signature and docstring include those of the cell.

    The cell's constructor must be `(input_size, hidden_size, *, bias=True, <options with defaults>)`, or that of a
    convolutional cell, `(in_channels, hidden_channels, *, bias=True, kernel_size=3, <options with defaults>)`. `bias` may be
    left out of both. One cell has one layer class: later calls return the same.
    """
    if not inspect.isclass(cell) or not issubclass(cell, Cell):
        raise TypeError(f"layer takes a subclass of unfading.Cell; got {cell!r}.")
    name = cell.__name__.removesuffix("Cell")
    ours = cell.__module__.startswith("unfading.")
    base = ConvolutionalLayer if issubclass(cell, ConvolutionalCell) else Layer
    common = {name: each for name, each in inspect.signature(base).parameters.items() if name != "options"}
    signature = inspect.Signature([*common.values(), *(each for name, each in _options(cell).items() if name not in common)])
    namespace = {
        "cell": cell,
        # A user's layer belongs to the module of the user's cell; ours are all public names of the package.
        "__module__": "unfading" if ours else cell.__module__,
        "__qualname__": name,
        "__doc__": _docstring(cell, base, signature, equation=(sys.modules[cell.__module__].__doc__ or "") if ours else ""),
        "__signature__": signature,
    }
    return type(name, (base,), namespace)


def _docstring(cell: type[Cell], base: type[Layer], signature: inspect.Signature, equation: str) -> str:
    """What the cell is, its equation, and every argument of the layer."""
    summary, _, _ = (inspect.getdoc(cell) or "").partition("Args:\n")
    texts = {**_argument_texts(Recurrent), **_argument_texts(Layer), **_argument_texts(base), **_argument_texts(cell)}
    arguments = "".join(f"    {name}: {texts[name]}\n" for name in signature.parameters if name in texts)
    like = (
        "Called like `torch.nn.LSTM`, with frames"
        if base is ConvolutionalLayer
        else "Constructed and called like `torch.nn.LSTM`"
    )
    constructed = f"{like}; see `Recurrent` for what all layers have in common."
    return "\n\n".join(filter(None, [summary.strip(), equation.strip(), constructed, f"Args:\n{arguments}"]))


def _argument_texts(owner: type) -> dict[str, str]:
    """The entries of the section Args of a docstring."""
    _, _, section = (inspect.getdoc(owner) or "").partition("Args:\n")
    return dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE))


def _options(cell: type[Cell]) -> dict[str, inspect.Parameter]:
    """The arguments of a cell after its two sizes, except bias. A layer takes them by keyword, with or without a `*`."""
    rest = list(inspect.signature(cell).parameters.values())[2:]
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p.replace(kind=named[0]) for p in rest if p.kind in named and p.name != "bias"}
