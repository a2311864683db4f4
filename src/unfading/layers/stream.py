"""Stream: run a layer one step at a time, for sensors and other endless sources.

    stream = layer.eval().stream()
    for sample in source:
        output = stream.push(sample)          # [B, I] -> [B, n]; [B, I, height, width] for a stream with a frame

Matrices are built and packed once, when the stream is created; a push does little more than the step. There are no gradients.
A stream has one state, so one thread uses it at a time; a call during another thread's call raises a RuntimeError.
"""

import copy
import threading
from typing import Any

import torch
from torch import Tensor

from unfading.backends.choose import choose, runs_compiled
from unfading.cells.base import Cell
from unfading.cells.wrap import NoiseCell
from unfading.fuse.locality import check_local
from unfading.fuse.one_step import OneStep
from unfading.reference import as_column, constants_of, projected

STEPS = 1024  # of the sequence with which it is tested that a projection needs one step at a time

# An error and not a wait: in which order the steps of two threads come would be left to chance.
IN_USE = (
    "this stream is in use by another thread, and a stream takes one call at a time. Push from one thread, or give each thread "
    "its own layer.stream()."
)


class Stream:
    """A layer that receives one step after the other and stores its state.

    Args:
        cells: the cells, from the lowest layer up.
        states: the state of each cell before the first step.
        initial: the state of each cell to which `push(x, resets=...)` returns.
        start: absolute index of the first step.
        backend: the layer's backend.
        frame: height and width of the input, for convolutional cells.
    """

    def __init__(
        self,
        cells: list[Cell],
        states: list[Any],
        initial: list[Any],
        start: int,
        backend: str,
        frame: tuple[int, ...] = (),
    ):
        if any(isinstance(cell, NoiseCell) and cell.noisy for cell in cells):
            raise ValueError(
                "a stream draws no noise, and the layer is in training mode with dropout or zoneout; call eval() first."
            )
        self.start = start
        originals, cells = cells, copy.deepcopy(cells)  # a later change of the layer does not affect the stream
        self._first, self._initial = ([_copied(state) for state in each] for each in (states, initial))
        self._shape = (states[0][0].shape[0], cells[0].input_size, *frame)
        self._steps: list[OneStep | ReferenceStep] = []
        with torch.no_grad():
            for cell in cells:
                on_cpu = states[0][0].device.type == "cpu"
                compiled = on_cpu and runs_compiled(choose(cell, backend)) and not frame
                self._steps.append(OneStep(cell) if compiled else ReferenceStep(cell, frame))
                frame = cell.state_frame(frame)
        untested = [cell for cell, step in zip(originals, self._steps, strict=True) if not step.local]
        check_local(untested, STEPS, "in a stream")
        self._dtype, self._device = states[0][0].dtype, states[0][0].device
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release  # bound once: a push takes a few microseconds
        self.reset()

    def reset(self) -> None:
        """Return to the state and the step index at which the stream began."""
        if not self._acquire(False):
            raise RuntimeError(IN_USE)
        try:
            self.index = self.start
            for step, state in zip(self._steps, self._first, strict=True):
                step.begin(state)
        finally:
            self._release()

    @property
    def states(self) -> list[Any]:
        """Copies of the state of each layer after the last push."""
        if not self._acquire(False):
            raise RuntimeError(IN_USE)
        try:
            return [step.state() for step in self._steps]
        finally:
            self._release()

    def push(self, x: Tensor, *, resets: Tensor | None = None) -> Tensor:
        """Take the input of the next step; return the output of the last layer.

        Args:
            x: [B, I] or [B, I, height, width].
            resets: bool [B]: the rows whose state is set to the layer's initial state before the step.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"push takes a Tensor of shape {list(self._shape)}; got {type(x).__name__}.")
        if x.shape != self._shape or x.dtype != self._dtype or x.device != self._device:
            raise ValueError(
                f"push takes {self._dtype} {list(self._shape)} on {self._device}, one step for every row; got {x.dtype} "
                f"{list(x.shape)} on {x.device}."
            )
        if resets is not None:
            self._check_resets(resets)
        if not self._acquire(False):
            raise RuntimeError(IN_USE)
        try:
            with torch.no_grad():
                if resets is not None:
                    for step, initial in zip(self._steps, self._initial, strict=True):
                        step.reset(resets, initial)
                for step in self._steps:
                    x = step.push(x, self.index)
            self.index += 1
            return x
        finally:
            self._release()

    def _check_resets(self, resets: Tensor) -> None:
        if not isinstance(resets, Tensor) or resets.dtype != torch.bool or resets.shape != self._shape[:1]:
            shape = [resets.dtype, list(resets.shape)] if isinstance(resets, Tensor) else type(resets).__name__
            raise ValueError(f"push takes resets of torch.bool {list(self._shape[:1])}, one for every row; got {shape}.")


def _copied(state: Any) -> Any:
    return type(state)(*(part.detach().clone() for part in state))


class ReferenceStep:
    """One step in plain torch, for cells that do not run fused."""

    local = False

    def __init__(self, cell: Cell, frame: tuple[int, ...]):
        self.cell, self.frame = cell, frame
        self.weights = cell.weights()
        self._state: Any = None

    def begin(self, state: Any) -> None:
        self._state = state
        B = state[0].shape[0]
        self.constants = constants_of(self.cell, state[0].new_zeros(1, B, self.cell.input_size, *self.frame), 0)

    def state(self) -> Any:
        return self._state

    def reset(self, rows: Tensor, initial: Any) -> None:
        """Set some rows of the state, given as bool [B], to those of another state."""
        parts = zip(initial, self._state, strict=True)
        self._state = type(initial)(*(torch.where(as_column(rows, old), new, old) for new, old in parts))

    def push(self, x: Tensor, index: int) -> Tensor:
        inputs = projected(self.cell, x.unsqueeze(0), index, self.constants)
        inputs = torch.utils._pytree.tree_map(lambda leaf: leaf[0], inputs)
        self._state = self.cell.step(inputs, self._state, self.weights)
        return self.cell.output(self._state)
