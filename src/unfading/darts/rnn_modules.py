"""Darts' recurrent module with a layer of this library.

Darts' contract for a custom module, how inputs, covariates and states are passed, has changed between its versions. Its own
module keeps it in each of them, so it is taken as it is, and only its layer is replaced.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from unfading import catalogue
from unfading.darts.counted_layer import CountedLayer
from unfading.errors import unknown
from unfading.layers.factory import Layer, layer

try:
    from darts.models.forecasting.rnn_model import _RNNModule
except ImportError:
    raise ImportError("unfading.darts needs Darts with its models for torch: pip install 'unfading[darts]'.") from None


class RecurrentModule(_RNNModule):  # type: ignore[misc]  # Darts is an extra
    """A module for `RNNModel(model=...)`: a layer of this library and a linear output at each step.

    Subclasses set `layer` and, for options of the layer and of its cells, `options`. Darts gives sizes, layers and dropout.
    """

    layer: ClassVar[type[Layer]]
    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **settings: Any):
        # A checkpoint of Darts holds the name of the layer that is replaced here, and gives it back.
        super().__init__(**{**settings, "name": "RNN"})
        self.rnn = CountedLayer(
            self.layer(
                self.input_size, self.hidden_dim, self.num_layers, batch_first=True, dropout=self.dropout, **self.options
            )
        )


def module_class(name: str) -> type[RecurrentModule]:
    """The module class of a layer of the library, by name."""
    cells = {cell.__name__.removesuffix("Cell"): cell for cell in catalogue.cells()}
    if name not in cells:
        raise AttributeError(f"module 'unfading.darts': {unknown('layer', name, [*cells, 'RecurrentModule'])}")
    # Under this name `pickle`, with which Darts saves models, finds the class again.
    return type(name, (RecurrentModule,), {"layer": layer(cells[name]), "__module__": "unfading.darts", "__qualname__": name})
