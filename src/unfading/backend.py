"""Which implementation runs the loop over time, and why the others do not.

Every layer has `backend="auto"`, which takes the first implementation that does not refuse the cell; a named one runs or
raises with its reason. `with use_backend("reference"):` overrides the layers' own choice for a block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from unfading.cells.base import Cell
from unfading.errors import unknown
from unfading.scan import scan

# In the order in which "auto" tries them. The reference takes every cell, so it stands last.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Any, Any]]] = {"reference": scan}

_override: ContextVar[str | None] = ContextVar("unfading_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every layer inside the block on the backend `name`, whatever the layers themselves say."""
    check_backend(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def check_backend(name: str) -> None:
    """Raise for a backend that does not exist."""
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(unknown("backend", name, ["auto", *IMPLEMENTATIONS]))


def run(
    cell: Cell, x: Tensor, state: Any, *, lengths: Tensor | None, reverse: bool, start: int, backend: str
) -> tuple[Any, Any]:
    """Project x [T, B, I] and run the cell over it: the states after every step, and the final state, as `scan`."""
    name = _override.get() or backend
    implementation = IMPLEMENTATIONS["reference" if name == "auto" else name]
    return implementation(cell, cell.project(x, start), state, cell.weights(), lengths=lengths, reverse=reverse)
