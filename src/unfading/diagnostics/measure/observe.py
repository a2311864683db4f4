"""Run any model once and record every state of every recurrent layer as a node of the autograd graph.

A `Chain` holds the inputs and states of one cell, in its order of processing (a backward cell starts at the end of a row):

    s_t = step(project(x)_t, s_{t-1}, weights),   t = 1..T,   and s_t = s_{t-1} past a row's end

The states are nodes of the graph that leads to the model's prediction. A layer may be called several times, each time from the
final state of the previous call. Its calls form one chain, even if that state was detached: the gradient then stops there, as
in training. Noise (dropout, zoneout) is off, as in evaluation.
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
from unfading.loop_options import LoopOptions
from unfading.reference import scan
from unfading.tasks.base import Batch


class LayerPosition(NamedTuple):
    """The position of a cell in its model."""

    stack: str  # name of the `Recurrent` module in the model; "" if it is the model itself
    layer: int  # from 1, the layer that reads the input
    layers: int
    backward: bool
    bidirectional: bool

    def __str__(self) -> str:
        side = "" if not self.bidirectional else " backward" if self.backward else " forward"
        return f"{self.stack + ' ' if self.stack else ''}layer {self.layer}{side}"


@dataclass(frozen=True)
class Chain:
    """The inputs and states of one cell: T steps, B rows, I input features. A state has parts [B, n].

    Over frames x is [B, I, height, width] and a part [B, n, height, width], whose n height width entries count one by one.
    """

    position: LayerPosition
    cell: Cell
    x: list[Tensor]  # the layer's input at each t, [B, I]
    index: list[int]  # the absolute index of each step, for cells that depend on it
    inputs: list[Any]  # the projected input at each t; a field is [B, n], or [1, n] if all rows share it
    states: list[Any]  # T + 1 states, the initial one first
    weights: Any
    lengths: Tensor | None  # [B]; None if all rows have T steps

    @property
    def T(self) -> int:
        """The number of steps."""
        return len(self.inputs)

    @property
    def parts(self) -> dict[str, int]:
        """Names and sizes of the parts of the state; h comes first."""
        first = self.states[0]
        return {name: part[0].numel() for name, part in zip(first._fields, first, strict=True)}

    @property
    def size(self) -> int:
        """The number of entries of the whole state, per row."""
        return sum(self.parts.values())

    @property
    def frame(self) -> tuple[int, ...]:
        """Height and width of the layer's input; empty where it reads vectors."""
        return tuple(self.x[0].shape[2:])

    @property
    def blocks(self) -> dict[str, int]:
        """The measured blocks of the state by name, as numbers of leading entries: h and, if there are more parts, all."""
        h = next(iter(self.parts.values()))
        return {"h": h} if h == self.size else {"h": h, "all": self.size}

    @property
    def ends(self) -> Tensor:
        """The number of steps of each row, [B]."""
        return torch.full((len(self.x[0]),), self.T) if self.lengths is None else self.lengths.cpu()


class Observation(NamedTuple):
    """The result of one observed forward pass."""

    prediction: Any
    chains: list[Chain]  # from the input up; a layer that was called on several sequences has the chain of the last one


def observe(model: nn.Module, batch: Batch) -> Observation:
    """Run the model once, without noise, and record the inputs and states of its cells."""
    positions = _layer_positions(model)
    calls: list[Chain] = []

    def scan_and_record(cell: Cell, x: Tensor, state: Any, weights: Any, options: LoopOptions) -> tuple[Any, Any]:
        lengths, reverse, start = options[:3]
        position = positions.get(id(innermost(cell)))
        x = _requiring_grad(x)
        state = type(state)(*(_requiring_grad(part) for part in state))
        recorder = _StepRecorder(cell)
        trajectory, final = scan(recorder, cell.project(x, start), state, weights, lengths=lengths, reverse=reverse)  # type: ignore[arg-type]
        if position is not None:
            ordered = list((flip(x, lengths) if reverse else x).detach().unbind(0))
            index = list(range(start, start + len(ordered)))
            states = [*recorder.states, final]
            calls.append(Chain(position, cell, ordered, index, recorder.inputs, states, weights, lengths))
        return trajectory, final

    with evaluation_mode(model), run_by(scan_and_record), torch.enable_grad():
        result = model(batch.x) if batch.lengths is None else model(batch.x, lengths=batch.lengths)
    if not calls:
        raise ValueError(
            f"the forward pass of {type(model).__name__} calls none of its unfading layers, so there is nothing to measure. "
            f"Call at least one of them in forward."
        )
    chains: dict[LayerPosition, Chain] = {}
    for call in calls:
        earlier = chains.pop(call.position, None)
        chains[call.position] = call if earlier is None else _join(earlier, call)
    return Observation(result[0] if isinstance(result, tuple) else result, list(chains.values()))


class _StepRecorder:
    """Stands in for a cell in `scan` and records the arguments of every step."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.shared, self.constant = cell.shared, cell.constant
        self.inputs: list[Any] = []
        self.states: list[Any] = []

    def step(self, inputs: Any, state: Any, weights: Any) -> Any:
        self.inputs.append(inputs)
        self.states.append(state)
        new = self.cell.step(inputs, state, weights)
        # A node for each part: an LSTM computes h_t from c_t, and dL/dc_t is measured with h_t held fixed.
        return tuple(part.view_as(part) for part in new) if isinstance(new, tuple) else new


def _layer_positions(model: nn.Module) -> dict[int, LayerPosition]:
    """The position of every cell of the model, by the id of the cell."""
    positions = {}
    for name, module in model.named_modules():
        if isinstance(module, Recurrent):
            for i, cell in enumerate(module.cells):
                layer, direction = divmod(i, module.directions)
                positions[id(cell)] = LayerPosition(name, layer + 1, module.num_layers, direction == 1, module.bidirectional)
    if not positions:
        raise ValueError(
            f"{type(model).__name__} has no layer of unfading in it, so there is nothing to measure. Build it with one, or "
            f"convert a torch.nn layer with unfading.from_torch."
        )
    return positions


def _requiring_grad(tensor: Tensor) -> Tensor:
    """The tensor itself if it requires a gradient, else a copy of it that does."""
    return tensor if tensor.requires_grad else tensor.detach().clone().requires_grad_()


def _join(before: Chain, after: Chain) -> Chain:
    """Both chains as one if the second starts from the final state of the first, else the second alone."""
    separate = before.position.backward or before.lengths is not None or after.lengths is not None
    if separate or not all(torch.equal(a, b) for a, b in zip(before.states[-1], after.states[0], strict=True)):
        return after
    return Chain(
        before.position,
        before.cell,
        before.x + after.x,
        before.index + after.index,
        before.inputs + after.inputs,
        # The shared state is the node of the first call, which the readers of its output depend on too.
        before.states + after.states[1:],
        after.weights,
        None,
    )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; on exit every module returns to its previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def batch_steps(chain: Chain, times: Sequence[int], rows: Sequence[int]) -> tuple[Any, Any]:
    """The inputs of the given steps (counted from 0) and rows, and the states before them, as one batch of steps x rows.

    A step does not mix rows, so all steps can be computed at once, as rows of one batch.
    """
    inputs = [_pytree.tree_flatten(chain.inputs[t]) for t in times]
    fields = [
        torch.cat([select_rows(value, rows) for value in field])
        for field in zip(*(leaves for leaves, _ in inputs), strict=True)
    ]
    parts = [torch.cat([select_rows(chain.states[t][i], rows) for t in times]) for i in range(len(chain.parts))]
    return _pytree.tree_unflatten(fields, inputs[0][1]), type(chain.states[0])(*parts)


def select_rows(value: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows of a value [B, n], detached; a value [1, n] is shared by all rows and expanded."""
    value = value.detach()
    return value.expand(len(rows), *value.shape[1:]) if len(value) == 1 else value[list(rows)]
