"""Saturated and dead activations of a cell, and the sizes of its states.

    sigmoid   saturated where its slope s (1 - s) is below 1/1000 of the largest, 1/4: closed near 0, open near 1
    tanh      saturated where its slope 1 - y^2 is below 1/1000
    relu      a unit is dead if it is 0 at every step of every row

A cell does not declare its gates. Its projection and step run once more, over all steps as one batch, and a dispatch mode
records every sigmoid, tanh and ReLU together with the source expression that calls it.
"""

import linecache
import sys
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unfading.diagnostics.measure.observe import Chain, batch_steps, select_rows

# Relative slope below which an activation counts as saturated: a gradient that passes it shrinks by three decades.
SATURATED_SLOPE = 1e-3
KINDS = {
    torch.ops.aten.sigmoid.default: "sigmoid",
    torch.ops.aten.tanh.default: "tanh",
    torch.ops.aten.relu.default: "relu",
}


class Activation(NamedTuple):
    """One activation in a cell's code; shares are over all its units, steps and rows."""

    layer: str
    name: str  # the source expression
    kind: str  # sigmoid, tanh or relu
    units: int
    low: float  # share saturated at the lower end; for a ReLU, at 0
    high: float  # share saturated at the upper end
    dead: float  # share of units that are 0 throughout; for ReLUs only

    @property
    def saturated(self) -> float:
        """The share saturated at either end."""
        return self.low + self.high


class StateSize(NamedTuple):
    """The root mean square of a part of the state at one step, over entries and rows."""

    layer: str
    part: str
    step: int  # from 1, in the order of processing
    rms: float


def activations(chain: Chain, rows: list[int]) -> list[Activation]:
    """Every activation of a cell's projection and step."""
    T = chain.T
    running = torch.arange(T).unsqueeze(1) < chain.ends[rows]  # [T, rows]
    with torch.no_grad(), _ActivationRecorder() as projection:
        chain.cell.project(torch.stack([select_rows(x, rows) for x in chain.x]), chain.index[0])
    inputs, state = batch_steps(chain, range(T), rows)
    with torch.no_grad(), _ActivationRecorder() as step:
        chain.cell.step(inputs, state, _pytree.tree_map_only(Tensor, Tensor.detach, chain.weights))
    results = []
    for recorder in (projection, step):
        for (kind, name), outputs in recorder.outputs.items():
            flat = [value.flatten(0, 1) if value.shape[:2] == running.shape else value for value in outputs]
            # An activation without one value per step and row belongs to the weights, not to the step.
            values = [value[running.flatten()].flatten(1) for value in flat if len(value) == running.numel()]
            if values and all(value.shape == values[0].shape for value in values):
                results.append(_summarise(str(chain.position), name, kind, torch.stack(values).double()))
    return results


def state_sizes(chain: Chain) -> list[StateSize]:
    """The root mean square of every part of the state after every step, over the rows that have not ended."""
    results = []
    for i, part in enumerate(chain.parts):
        for t in range(1, chain.T + 1):
            value = chain.states[t][i].detach()[(t <= chain.ends).to(chain.x[0].device)]
            if len(value):
                results.append(StateSize(str(chain.position), part, t, float(value.double().square().mean().sqrt())))
    return results


def _summarise(layer: str, name: str, kind: str, value: Tensor) -> Activation:
    """The shares of one activation, from its values [calls, steps x rows, units]."""
    units = value.shape[-1]
    if kind == "relu":
        zero = value == 0
        return Activation(layer, name, kind, units, float(zero.double().mean()), 0.0, float(zero.all(1).double().mean()))
    slope = 4 * value * (1 - value) if kind == "sigmoid" else 1 - value * value
    saturated, middle = slope < SATURATED_SLOPE, 0.5 if kind == "sigmoid" else 0.0
    low, high = (float((saturated & side).double().mean()) for side in (value < middle, value > middle))
    return Activation(layer, name, kind, units, low, high, 0.0)


class _ActivationRecorder(TorchDispatchMode):
    """Records the output of every activation, by its kind and the source expression that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[tuple[str, str], list[Tensor]] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        kind = KINDS.get(function)
        if kind is not None:
            self.outputs.setdefault((kind, _source_expression(sys._getframe(1))), []).append(result.detach())
        return result


def _source_expression(frame: FrameType | None) -> str:
    """The source of the innermost call outside of torch, such as `torch.sigmoid(f)`."""
    torch_folder = torch.__file__.rpartition("/")[0]
    while frame is not None and frame.f_code.co_filename.startswith(torch_folder):
        frame = frame.f_back
    if frame is None:
        return "?"
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, last, begin, end = positions
    if line is None or line != last or begin is None or end is None:
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    # Columns are counted in bytes.
    return linecache.getline(frame.f_code.co_filename, line).encode()[begin:end].decode()
