"""The layers of this library as modules for the RNNModel of Darts. They need the extra `darts`.

    RNNModel(model=unfading.darts.STAR, input_chunk_length=48, training_length=72, hidden_dim=32)

Options of the cell, and cells of your own, are class attributes of a subclass:

    class LongSTAR(unfading.darts.STAR):
        options = {"max_lag": 48}

    class Mine(unfading.darts.RecurrentModule):
        layer = unfading.layer(MyCell)
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """A module class, built when it is first used: Darts takes seconds to import."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = import_module("unfading.darts.rnn_modules")
    value = modules.RecurrentModule if name == "RecurrentModule" else modules.module_class(name)
    globals()[name] = value
    return value
