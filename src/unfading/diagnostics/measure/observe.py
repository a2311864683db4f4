"""One forward pass of any model, in which every state of every recurrent layer can be reached.

A `Chain` is what one cell went through, in its own order of processing (a backward cell begins at its row's end):

    s_t = step(project(x)_t, s_{t-1}, weights),   t = 1..T,   and s_t = s_{t-1} past a row's end

The states are nodes of the graph that leads to the model's prediction. A layer that is called several times, each time from
the state in which the last call ended, is one chain, also where that state was cut from its graph: the gradient then ends
there, as it does in training. Noise (dropout, zoneout) is off, as in evaluation.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unfading.backends.choose import run_by
from unfading.cells.base import Cell
from unfading.cells.wrap import innermost
from unfading.layers.recurrent import Recurrent
from unfading.lengths import flip
from unfading.reference import scan
from unfading.tasks.base import Batch


class LayerPosition(NamedTuple):
    """Where a cell stands in its model."""

    stack: str  # name of the `Recurrent` in the model, "" where it is the model
    layer: int  # from 1, the one that reads the input
    layers: int
    backward: bool
    bidirectional: bool

    def __str__(self) -> str:
        side = "" if not self.bidirectional else " backward" if self.backward else " forward"
        return f"{self.stack + ' ' if self.stack else ''}layer {self.layer}{side}"


@dataclass(frozen=True)
class Chain:
    """What one cell went through. T steps, B rows, I features of its input; a state has parts [B, n]."""

    position: LayerPosition
    cell: Cell
    x: list[Tensor]  # what the cell was given at each t, [B, I]
    index: list[int]  # the absolute index of each step, for cells that count
    inputs: list[Any]  # what step read at each t; a field is [B, n], or [1, n] where all rows share it
    states: list[Any]  # T + 1 of them, the initial one first
    weights: Any
    lengths: Tensor | None  # [B], where rows have lengths of their own

    @property
    def T(self) -> int:
        """Steps."""
        return len(self.inputs)

    @property
    def parts(self) -> dict[str, int]:
        """Names and sizes of the state's parts, the one that is called h first."""
        first = self.states[0]
        return {name: part.shape[-1] for name, part in zip(first._fields, first, strict=True)}

    @property
    def size(self) -> int:
        """Entries of the whole state of a row."""
        return sum(self.parts.values())

    @property
    def blocks(self) -> dict[str, int]:
        """What is measured: h alone and, where the state has more parts, all; each the first so many entries of the state."""
        h = next(iter(self.parts.values()))
        return {"h": h} if h == self.size else {"h": h, "all": self.size}

    @property
    def ends(self) -> Tensor:
        """[B] each row's own number of steps."""
        return torch.full((len(self.x[0]),), self.T) if self.lengths is None else self.lengths.cpu()


class Observation(NamedTuple):
    """A model's forward pass."""

    prediction: Any
    chains: list[Chain]  # from the input up; of a layer that was called on several sequences, its last


def observe(model: nn.Module, batch: Batch) -> Observation:
    """Run the model once, without noise, and keep what its cells went through."""
    places = _places(model)
    pieces: list[tuple[LayerPosition, Chain]] = []

    def watched(
        cell: Cell, x: Tensor, state: Any, weights: Any, *, lengths: Tensor | None, reverse: bool, start: int
    ) -> tuple[Any, Any]:
        place = places.get(id(innermost(cell)))
        x = _tracked(x)
        state = type(state)(*(_tracked(part) for part in state))
        recorder = _Recorder(cell)
        trajectory, final = scan(recorder, cell.project(x, start), state, weights, lengths=lengths, reverse=reverse)  # type: ignore[arg-type]
        if place is not None:
            ordered = list((flip(x, lengths) if reverse else x).detach().unbind(0))
            index = list(range(start, start + len(ordered)))
            states = [*recorder.states, final]
            pieces.append((place, Chain(place, cell, ordered, index, recorder.inputs, states, weights, lengths)))
        return trajectory, final

    with evaluating(model), run_by(watched), torch.enable_grad():
        called = model(batch.x) if batch.lengths is None else model(batch.x, lengths=batch.lengths)
    if not pieces:
        raise ValueError(f"the forward pass of {type(model).__name__} calls none of its unfading layers. Call one in it.")
    chains: dict[LayerPosition, Chain] = {}
    for place, piece in pieces:
        before = chains.pop(place, None)
        chains[place] = piece if before is None else _joined(before, piece)
    return Observation(called[0] if isinstance(called, tuple) else called, list(chains.values()))


class _Recorder:
    """The cell, seen by `scan`, with a note of all that its step is given."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.shared, self.constant = cell.shared, cell.constant
        self.inputs: list[Any] = []
        self.states: list[Any] = []

    def step(self, inputs: Any, state: Any, weights: Any) -> Any:
        self.inputs.append(inputs)
        self.states.append(state)
        new = self.cell.step(inputs, state, weights)
        # Nodes of their own: an LSTM's h_t is made from its c_t, and dL/dc_t is with h_t held.
        return tuple(part.view_as(part) for part in new) if isinstance(new, tuple) else new


def _places(model: nn.Module) -> dict[int, LayerPosition]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Recurrent):
            for i, cell in enumerate(module.cells):
                layer, direction = divmod(i, module.directions)
                found[id(cell)] = LayerPosition(name, layer + 1, module.num_layers, direction == 1, module.bidirectional)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer of unfading in it, so there is nothing to look into. Build it with one, or "
            f"bring a torch.nn layer over with unfading.from_torch."
        )
    return found


def _tracked(tensor: Tensor) -> Tensor:
    """The tensor as a node of the graph, also where nothing below it asks for a gradient."""
    return tensor if tensor.requires_grad else tensor.detach().clone().requires_grad_()


def _joined(before: Chain, after: Chain) -> Chain:
    """One chain, where the second begins in the state in which the first ended; else the second alone."""
    ended, begun = before.states[-1], after.states[0]
    apart = before.position.backward or before.lengths is not None or after.lengths is not None
    if apart or not all(torch.equal(a, b) for a, b in zip(ended, begun, strict=True)):
        return after
    return Chain(
        before.position,
        before.cell,
        before.x + after.x,
        before.index + after.index,
        before.inputs + after.inputs,
        # The state between the two is the one that the first call gave out: what reads its output reaches it too.
        before.states + after.states[1:],
        after.weights,
        None,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without noise; afterwards every module trains or not as before."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


def side_by_side(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> tuple[Any, Any]:
    """Inputs and states before the given steps (counted from 0) of the given rows, as one batch of their product.

    A step does not mix rows, so all steps can be taken at once, as if they were rows of one batch.
    """
    inputs = [_pytree.tree_flatten(chain.inputs[t]) for t in times]
    fields = [
        torch.cat([taken(value, rows) for value in field]) for field in zip(*(leaves for leaves, _ in inputs), strict=True)
    ]
    parts = [torch.cat([taken(chain.states[t][i], rows) for t in times]) for i in range(len(chain.parts))]
    return _pytree.tree_unflatten(fields, inputs[0][1]), type(chain.states[0])(*parts)


def taken(value: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows of a value [B, n], cut from its graph; [1, n] is the same in every row."""
    value = value.detach()
    return value.expand(len(rows), *value.shape[1:]) if len(value) == 1 else value[list(rows)]
