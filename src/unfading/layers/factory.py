"""Layers: `layer(XCell)` makes the class `X`, a stack of that cell which is constructed like torch.nn's recurrent layers."""

import inspect
from functools import cache
from typing import Any, ClassVar, Self

import torch

from unfading.cells.base import Cell
from unfading.errors import check_count, unknown
from unfading.layers.recurrent import Recurrent, State


class Layer(Recurrent[State]):
    """A `Recurrent` of one kind of cell, constructed like torch.nn's recurrent layers. Made by `layer`."""

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
        for name in options:
            if name not in _options(self.cell):
                raise TypeError(unknown(f"option of {type(self).__name__}", name, inspect.signature(type(self)).parameters))
        check_count("hidden_size", hidden_size)
        super().__init__(
            lambda size: self.cell(size, hidden_size, bias=bias, **options),  # type: ignore[call-arg]
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
        """The form of the authors' released code, where it differs from the paper's; arguments as the class's own."""
        if cls.cell.released is None:
            raise ValueError(
                f"{cls.__name__} offers no released form; the docstring of {cls.cell.__module__} says what differs."
            )
        return cls(input_size, hidden_size, *arguments, **{**cls.cell.released, **options})


@cache
def layer(cell: type[Cell]) -> type[Layer]:
    """The layer class of a cell class: `STAR = layer(STARCell)`. Its signature and docstring come from the cell.

    The cell's constructor must be `(input_size, hidden_size, *, bias=True, <options with defaults>)`. One cell has one
    layer class, however often this is called.
    """
    name = cell.__name__.removesuffix("Cell")
    common = list(inspect.signature(Layer).parameters.values())[:-1]
    own = inspect.getdoc(cell) or ""
    summary, _, arguments = own.partition("Args:\n")
    namespace = {
        "cell": cell,
        # A user's layer belongs to the module of the user's cell; ours are all public names of the package.
        "__module__": "unfading" if cell.__module__.startswith("unfading.") else cell.__module__,
        "__qualname__": name,
        "__doc__": f"{summary.strip()}\n\nConstructed like `torch.nn.LSTM`; see `Recurrent` for what is common to all layers."
        + (f"\n\nArgs:\n{arguments}" if arguments else ""),
        "__signature__": inspect.Signature([*common, *_options(cell).values()]),
    }
    return type(name, (Layer,), namespace)


def _options(cell: type[Cell]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(cell).parameters
    return {n: p for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY and n != "bias"}
