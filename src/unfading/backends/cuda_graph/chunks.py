"""The reference loop over a sequence of any length, by recordings of a few fixed lengths.

A sequence is divided into chunks of CHUNK steps, and the rest into powers of two: 75 = 32 + 32 + 8 + 2 + 1. With x_p the inputs
of chunk p, s_p the state before it, y_p its states and w everything that is constant over time:

    forward     y_p, s_{p+1} = scan(x_p, s_p, w)
    backward    dx_p, ds_p, dw += the gradient of scan at (x_p, s_p, w) along (dy_p, ds_{p+1}), scan computed once more

Both are recorded on buffers, once per length. The arguments of a call are copied into the buffers chunk by chunk, and its
results are copied out: nothing that is returned or saved lies in a buffer, so any number of calls can be in progress.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.backends.cuda_graph import capture
from unfading.backends.cuda_graph.capture import Watch, undisturbed
from unfading.cells.base import Cell
from unfading.fuse.frames.fused_frames import scan_frames
from unfading.fuse.plan import FramePlan
from unfading.reference import scan

CHUNK = 32

Gradients = list[Tensor | None]


class Parts(NamedTuple):
    """The tensors of a call, in the order of processing."""

    timed: list[Tensor]  # [T, ...] inputs of every step
    whole: list[Tensor]  # constant inputs and weights
    state: list[Tensor]  # before the first step


class CallKind(NamedTuple):
    """Everything that a recording depends on, beside the cell."""

    inputs: Any  # the tree specs of inputs and weights
    weights: Any
    state: type
    is_timed: tuple[bool, ...]  # for each leaf of inputs and weights
    shapes: tuple[tuple[torch.Size, ...], ...]  # of timed (one step), whole, state
    dtypes: tuple[tuple[torch.dtype, ...], ...]
    wanted: tuple[tuple[bool, ...], ...]  # whether a gradient is wanted
    device: torch.device
    lengths: bool
    autocast: tuple[torch.dtype, bool]
    settings: tuple[Any, ...]  # of torch, that its choice of kernels depends on
    plan: FramePlan | None = None  # of a step with convolutions that is compiled

    @property
    def differentiable(self) -> bool:
        """Whether any gradient is wanted."""
        return any(any(group) for group in self.wanted)

    @property
    def input_bytes(self) -> int:
        """The memory of the inputs of a chunk."""
        sizes = zip(self.shapes[0], self.dtypes[0], strict=True)
        return CHUNK * sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)

    def scan(self, cell: Cell, parts: Parts, lengths: Tensor | None) -> list[Tensor]:
        """The reference loop, or that of a compiled step: the trajectory's parts, then the final state's."""
        timed, whole = iter(parts.timed), iter(parts.whole)
        leaves = [next(timed if is_timed else whole) for is_timed in self.is_timed]
        n = self.inputs.num_leaves
        inputs, weights = _pytree.tree_unflatten(leaves[:n], self.inputs), _pytree.tree_unflatten(leaves[n:], self.weights)
        # A cast in the cache of autocast would be read by others, after the recording that it belongs to.
        with torch.autocast(self.device.type, *self.autocast, cache_enabled=False):
            run = scan if self.plan is None else partial(scan_frames, self.plan)
            trajectory, final = run(cell, inputs, self.state(*parts.state), weights, lengths=lengths)
        return [*trajectory, *final]


class Buffers(NamedTuple):
    """The tensors that recordings read, and those that are passed from chunk to chunk."""

    parts: Parts  # after a chunk, the state is that before the next one
    lengths: Tensor | None  # of what is left of each row
    d_trajectory: list[Tensor]
    d_state: list[Tensor]  # after a chunk of the backward pass, that of the previous chunk
    d_whole: list[Tensor]  # summed over chunks


def cut(T: int) -> list[tuple[int, int]]:
    """(first step, steps) of each chunk."""
    chunks, begin, steps = [], 0, CHUNK
    while begin < T:
        while steps > T - begin:
            steps //= 2
        chunks.append((begin, steps))
        begin += steps
    return chunks


class RecordedLoop:
    """The recordings of one kind of call of one cell.

    Args:
        cell: whose step is recorded. Raises NotGraphable where that is impossible.
        kind: of the call.
    """

    def __init__(self, cell: Cell, kind: CallKind):
        self.kind = kind

        def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=kind.device)

        with undisturbed(kind.device.type):
            timed, whole, state = (list(map(zeros, *of_both)) for of_both in zip(kind.shapes, kind.dtypes, strict=True))
            timed = [each.new_zeros(CHUNK, *each.shape) for each in timed]
            back = kind.differentiable
            self.buffers = Buffers(
                Parts(timed, whole, state),
                zeros(state[0].shape[:1], torch.int64) if kind.lengths else None,
                [each.new_zeros(CHUNK, *each.shape) for each in state if back],
                [torch.zeros_like(each) for each in state if back],
                [torch.zeros_like(each) for each in whole if back],
            )
            with Watch([leaf for leaf in _pytree.tree_leaves(self.buffers) if leaf is not None]):
                self._forward(cell, 1, self.buffers)
        self.pool = capture.CapturedGraph.pool()
        self.forwards: dict[int, capture.CapturedGraph] = {}
        self.backwards: dict[int, capture.CapturedGraph] = {}

    def record(self, cell: Cell, T: int) -> None:
        """Record what T steps need and is not recorded yet."""
        with undisturbed(self.kind.device.type):
            for L in {steps for _, steps in cut(T)} - self.forwards.keys():
                if self.kind.differentiable:
                    self.backwards[L] = self._capture(partial(self._backward, cell, L))
                self.forwards[L] = self._capture(partial(self._forward, cell, L))

    def _capture(self, function: Callable[[Buffers], Gradients]) -> capture.CapturedGraph:
        return capture.CapturedGraph(function, self.buffers, self.pool)

    # -- the functions that are recorded

    def _scan(self, cell: Cell, L: int, buffers: Buffers) -> tuple[Parts, list[Tensor]]:
        """L steps of the reference loop on the buffers: its arguments and its results."""
        timed, whole, state = buffers.parts
        (for_timed, for_whole, _), back = self.kind.wanted, self.kind.differentiable
        parts = Parts(
            [each[:L].detach().requires_grad_(want) for each, want in zip(timed, for_timed, strict=True)],
            [each.detach().requires_grad_(want) for each, want in zip(whole, for_whole, strict=True)],
            [each.detach().requires_grad_(back) for each in state],  # inside a sequence it depends on earlier chunks
        )
        with torch.set_grad_enabled(back):
            return parts, self.kind.scan(cell, parts, buffers.lengths)

    def _forward(self, cell: Cell, L: int, buffers: Buffers) -> Gradients:
        _, results = self._scan(cell, L, buffers)
        n = len(buffers.parts.state)
        _write(buffers.parts.state, results[n:])
        return [part.detach() for part in results[:n]]

    def _backward(self, cell: Cell, L: int, buffers: Buffers) -> Gradients:
        parts, results = self._scan(cell, L, buffers)
        cotangents = [*(each[:L] for each in buffers.d_trajectory), *buffers.d_state]
        d_timed, d_whole, d_state = gradients(results, cotangents, parts)
        sums = [None if each is None else total.add_(each) for total, each in zip(buffers.d_whole, d_whole, strict=True)]
        _write(buffers.d_state, d_state)
        return [*d_timed, *sums]

    # -- replaying them

    def forward(self, parts: Parts, lengths: Tensor | None, T: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Trajectory, final state, and, where a gradient is wanted, the state before each chunk, [chunks, B, n]."""
        chunks, state = cut(T), self.buffers.parts.state
        trajectory = [each.new_empty(T, *each.shape) for each in state]
        borders = [each.new_empty(len(chunks), *each.shape) for each in state if self.kind.differentiable]
        with capture.CapturedGraph.turn(self.kind.device):
            _copy(self.buffers.parts.whole, parts.whole)
            _copy(state, parts.state)
            for p, (begin, L) in enumerate(chunks):
                _copy([each[p] for each in borders], state[: len(borders)])
                self._enter(parts, lengths, begin, L)
                _copy([each[begin : begin + L] for each in trajectory], self.forwards[L].replay())
            return trajectory, [each.clone() for each in state], borders

    def backward(
        self, d_outputs: Gradients, parts: Parts, lengths: Tensor | None, borders: list[Tensor], T: int
    ) -> tuple[Gradients, Gradients, Gradients]:
        """The gradients of the parts, from those of trajectory and final state; None for one that is not wanted or zero."""
        buffers, (for_timed, _, for_state) = self.buffers, self.kind.wanted
        n, m = len(borders), len(parts.timed)
        d_timed: Gradients = [
            each.new_empty(T, *each.shape[1:]) if want else None
            for each, want in zip(buffers.parts.timed, for_timed, strict=True)
        ]
        results: Gradients = []
        with capture.CapturedGraph.turn(self.kind.device):
            _copy(buffers.parts.whole, parts.whole)
            for each in (*buffers.d_trajectory, *buffers.d_state, *buffers.d_whole):
                each.zero_()
            _copy(buffers.d_state, d_outputs[n:])
            for p, (begin, L) in reversed(list(enumerate(cut(T)))):
                _copy(buffers.parts.state, [each[p] for each in borders])
                self._enter(parts, lengths, begin, L)
                d_chunk = [None if each is None else each[begin : begin + L] for each in d_outputs[:n]]
                _copy([each[:L] for each in buffers.d_trajectory], d_chunk)
                results = self.backwards[L].replay()
                there = [(to, each) for to, each in zip(d_timed, results, strict=False) if to is not None]
                _copy([to[begin : begin + L] for to, _ in there], [each for _, each in there])
            d_whole: Gradients = [None if total is None else total.clone() for total in results[m:]]
            d_state: Gradients = [each.clone() if want else None for each, want in zip(buffers.d_state, for_state, strict=True)]
        return [None if each is None else to for to, each in zip(d_timed, results, strict=False)], d_whole, d_state

    def _enter(self, parts: Parts, lengths: Tensor | None, begin: int, L: int) -> None:
        """Copy the inputs of a chunk into their buffers."""
        _copy([each[:L] for each in self.buffers.parts.timed], [each[begin : begin + L] for each in parts.timed])
        if self.buffers.lengths is not None and lengths is not None:
            torch.sub(lengths, begin, out=self.buffers.lengths)


def gradients(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], parts: Parts, *, create_graph: bool = False
) -> tuple[Gradients, Gradients, Gradients]:
    """The gradients of timed, whole and state; None where none is wanted or no output depends on the tensor."""
    wanted = [each for group in parts for each in group if each.requires_grad]
    pairs = [(out, d) for out, d in zip(outputs, cotangents, strict=True) if out.requires_grad and d is not None]
    results: Iterator[Tensor | None] = iter([None] * len(wanted))
    if pairs and wanted:
        tracked, given = zip(*pairs, strict=True)
        results = iter(torch.autograd.grad(tracked, wanted, given, create_graph=create_graph, allow_unused=True))
    timed, whole, state = ([next(results) if each.requires_grad else None for each in group] for group in parts)
    return timed, whole, state


def _write(buffers: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Write values that may themselves lie in the buffers, in another order: a step may pass parts of its state on."""
    copies = [None if value is None else value.detach().clone() for value in values]
    for buffer, copy in zip(buffers, copies, strict=True):
        buffer.zero_() if copy is None else buffer.copy_(copy)


def _copy(to: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Copy each value to its target; None leaves the target as it is."""
    for target, value in zip(to, values, strict=True):
        if value is not None:
            target.copy_(value)
