"""What a step's activations do: which saturate, which are dead, and how large the states are.

    sigmoid   saturated where its slope s (1 - s) is under 1/1000 of the largest, 1/4: closed near 0, open near 1
    tanh      saturated where its slope 1 - y^2 is under 1/1000
    relu      a unit is dead where it is 0 at every step of every row

No cell has to say which gates it has: a step and its projection are run once more over all steps side by side, and every
sigmoid, tanh and ReLU that torch is asked for is noted, with the words of the source that asked for it.
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

from unfading.diagnostics.measure.observe import Chain, side_by_side, taken

# A gradient that passes such a slope loses three decades.
SLOPE = 1e-3
KINDS = {
    torch.ops.aten.sigmoid.default: "sigmoid",
    torch.ops.aten.tanh.default: "tanh",
    torch.ops.aten.relu.default: "relu",
}


class Activation(NamedTuple):
    """One place in a step where an activation is taken; shares over all its units, steps and rows."""

    layer: str
    name: str  # the words of the source
    kind: str  # sigmoid, tanh or relu
    units: int
    low: float  # share saturated at the lower end; of a ReLU, at 0
    high: float  # share saturated at the upper end
    dead: float  # share of units that are 0 throughout; of ReLUs only

    @property
    def saturated(self) -> float:
        """Share saturated at either end."""
        return self.low + self.high


class Size(NamedTuple):
    """How large a part of the state is at one step: root mean square over entries and rows."""

    layer: str
    part: str
    step: int  # from 1, in the order of processing
    rms: float


def activations(chain: Chain, rows: list[int]) -> list[Activation]:
    """Every activation of a cell's step and projection."""
    T = chain.T
    running = torch.arange(T).unsqueeze(1) < chain.ends[rows]  # [T, rows]
    with torch.no_grad(), _Listener() as projecting:
        chain.cell.project(torch.stack([taken(x, rows) for x in chain.x]), chain.index[0])
    inputs, state = side_by_side(chain, range(T), rows)
    with torch.no_grad(), _Listener() as stepping:
        chain.cell.step(inputs, state, _pytree.tree_map_only(Tensor, Tensor.detach, chain.weights))
    found = []
    for heard in (projecting.heard, stepping.heard):
        for (kind, name), values in heard.items():
            # Whatever is no value per step and row belongs to the weights, not to the step.
            kept = [value.flatten(0, 1) if value.shape[:2] == running.shape else value for value in values]
            kept = [value[running.flatten()].flatten(1) for value in kept if len(value) == running.numel()]
            if kept and all(value.shape == kept[0].shape for value in kept):
                found.append(_measured(str(chain.position), name, kind, torch.stack(kept).double()))
    return found


def sizes(chain: Chain) -> list[Size]:
    """Root mean square of every part of the state after every step, over the rows that still run."""
    found = []
    for i, part in enumerate(chain.parts):
        for t in range(1, chain.T + 1):
            value = chain.states[t][i].detach()[(t <= chain.ends).to(chain.x[0].device)]
            if len(value):
                found.append(Size(str(chain.position), part, t, float(value.double().square().mean().sqrt())))
    return found


def _measured(layer: str, name: str, kind: str, value: Tensor) -> Activation:
    """value [times called, steps and rows, units]"""
    units = value.shape[-1]
    if kind == "relu":
        zero = value == 0
        return Activation(layer, name, kind, units, float(zero.double().mean()), 0.0, float(zero.all(1).double().mean()))
    slope = 4 * value * (1 - value) if kind == "sigmoid" else 1 - value * value
    flat, middle = slope < SLOPE, 0.5 if kind == "sigmoid" else 0.0
    low, high = (float((flat & side).double().mean()) for side in (value < middle, value > middle))
    return Activation(layer, name, kind, units, low, high, 0.0)


class _Listener(TorchDispatchMode):
    """Notes the result of every activation, by kind and by the words of the source that asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[tuple[str, str], list[Tensor]] = {}

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
            self.heard.setdefault((kind, _words(sys._getframe(1))), []).append(result.detach())
        return result


def _words(frame: FrameType | None) -> str:
    """The source of the innermost call that is not torch's own: `torch.sigmoid(f)`."""
    torchs = torch.__file__.rpartition("/")[0]
    while frame is not None and frame.f_code.co_filename.startswith(torchs):
        frame = frame.f_back
    if frame is None:
        return "?"
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, last, begin, end = positions
    if line is None or line != last or begin is None or end is None:
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    # Columns count bytes.
    return linecache.getline(frame.f_code.co_filename, line).encode()[begin:end].decode()
