"""The plan of a convolutional cell: record its step, with its projection where that is a convolution of x that keeps the size
of frames, and test the program on data."""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import in_frame
from unfading.fuse.cell_copy import CellCopy, varied, with_data, without_data
from unfading.fuse.contents import Contents
from unfading.fuse.frames.frame_kernels import FRAME_PROGRAMS
from unfading.fuse.frames.frame_program import FrameProgram
from unfading.fuse.frames.interpret_frames import next_frames
from unfading.fuse.frames.trace_frames import trace_frames
from unfading.fuse.isolation import WithoutDraws, numbers
from unfading.fuse.locality import Noise
from unfading.fuse.plan import FramePlan, Target
from unfading.fuse.refusal import NotFusable
from unfading.fuse.trace.projection import projection_of
from unfading.fuse.trace.tree import Structure, flatten, unflatten
from unfading.reference import check_inputs, leaf_names
from unfading.source_lines import definition_line

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest entry: how far a program may be from its step
ROWS = 5  # of the frames with which a program is tested


class _Frames(NamedTuple):
    """A random step of a cell on frames of one size."""

    x: Tensor  # [2, ROWS, C, height, width]
    inputs: list[Tensor]  # of the second step
    state: list[Tensor]


class FrameExample:
    """A convolutional cell with small frames: what its step is handed, flattened and checked."""

    def __init__(self, contents: Contents, target_of_state: Callable[[Tensor], Target]):
        example = CellCopy(contents, with_data, example=True)
        cell = self.cell = example.cell
        with WithoutDraws(), torch.no_grad():
            frame = cell.state_frame(cell.example_frame)
            self.state = state = in_frame(cell.initial_state(2), frame)
            self.dtype, self.target = state[0].dtype, target_of_state(state[0])
            inputs = cell.project(state[0].new_zeros(2, 2, cell.input_size, *cell.example_frame))
            weights = cell.weights()
            check_inputs(cell, inputs, batch=2)
        written = example.written()
        self.contents = Contents(contents.of(), frozenset(written)) if written else contents
        self.before = contents
        leaves: list[Tensor] = []
        weight_leaves: list[Tensor] = []
        self.input_structure: Structure = flatten(inputs, leaves)
        self.weight_structure: Structure = flatten(weights, weight_leaves)
        self.names = tuple(leaf_names(inputs))
        for method, tensors, rank in (
            ("project", leaves, 5),
            ("initial_state", list(state), 4),
            ("weights", weight_leaves, None),
        ):
            for tensor in tensors:
                if tensor.dtype != self.dtype or (rank is not None and tensor.dim() != rank):
                    wanted = f"{self.dtype} tensors" if rank is None else f"{self.dtype} tensors with {rank} axes"
                    raise NotFusable(f"{method} returns {tensor.dtype} {list(tensor.shape)}; a fused step takes {wanted}")
        self.widths = [leaf.shape[2] for leaf in leaves]
        self.states = [part.shape[1] for part in state]
        self.weights = tuple(tuple(leaf.shape) for leaf in weight_leaves)

    def step_function(self) -> Callable[..., Any]:
        """`step` of a copy of the cell, as a function of flat lists of tensors."""
        twin, kind = CellCopy(self.contents, without_data({})), type(self.state)
        cell = twin.cell

        def step(inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
            new = cell.step(
                unflatten(self.input_structure, list(inputs)), kind(*states), unflatten(self.weight_structure, list(weights))
            )
            twin.refuse_writes("step")
            if not isinstance(new, tuple) or len(new) != len(states):
                got = f"a tuple of {len(new)}" if isinstance(new, tuple) else type(new).__name__
                reason = f"step must return its state, a tuple of {len(states)} tensors; got {got}"
                raise NotFusable(reason, definition_line(cell.step))
            return new

        step.__wrapped__ = cell.step  # type: ignore[attr-defined]
        return step


def frame_plan(contents: Contents, target_of_state: Callable[[Tensor], Target]) -> tuple[Contents, FramePlan]:
    """The plan of a convolutional cell, and the contents that it depends on. Raises NotFusable where there is none."""
    example = FrameExample(contents, target_of_state)
    step = example.step_function()
    parameters: tuple[str, ...] = ()
    tests = _Tests(example)
    try:
        if example.target == "triton":
            raise NotFusable("on a GPU the projection of all steps is one convolution before the loop")
        program, parameters = _with_project(example, step)
        tests.check(program, parameters, projected=True)
        with_project = True
    except NotFusable:
        program = trace_frames(step, example.widths, example.states, example.weights, example.dtype)
        tests.check(program, (), projected=False)
        parameters, with_project = (), False
    key = program.key()
    FRAME_PROGRAMS.setdefault(key, program)
    named = dict((*example.cell.named_parameters(), *example.cell.named_buffers()))
    return example.contents, FramePlan(
        key,
        example.dtype,
        inputs=example.input_structure,
        names=example.names,
        weights=example.weight_structure,
        parameters=parameters,
        with_project=with_project,
        channels=(*([example.cell.input_size] if with_project else example.widths), *example.states),
        shapes=(*example.weights, *(tuple(named[name].shape) for name in parameters)),
        target=example.target,
    )


def _with_project(example: FrameExample, step: Callable[..., Any]) -> tuple[FrameProgram, tuple[str, ...]]:
    """The program of projection and step, and the parameters that the projection reads."""
    cell = example.contents.of()
    if cell.shared or cell.constant:
        raise NotFusable("fields that are shared or constant come from the projection of the whole sequence")
    named = dict((*cell.named_parameters(), *cell.named_buffers()))
    names = [name for name, tensor in named.items() if tensor.dtype == example.dtype]
    while True:
        tensors = [named[name] for name in names]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        program = trace_frames(
            step,
            [cell.input_size],
            example.states,
            (*example.weights, *shapes),
            example.dtype,
            projection_of(example.contents, tensors),
            len(example.weights),
        )
        read = program.weights_read()
        used = [name for i, name in enumerate(names, start=len(example.weights)) if i in read]
        if used == names:
            return program, tuple(names)
        names = used


class _Tests:
    """Tests on data that a program computes what the step computes, whatever the size of the frames and the number of rows."""

    def __init__(self, example: FrameExample):
        self.example = example
        try:
            self.cell = CellCopy(example.before, varied(), example=True).cell
            self.weights = self._weights()
        except Exception:  # of a method that checks its numbers
            self.cell = example.cell
            self.weights = self._weights()

    def _weights(self) -> list[Tensor]:
        leaves: list[Tensor] = []
        with WithoutDraws(), torch.no_grad():
            flatten(self.cell.weights(), leaves)
        return leaves

    def check(self, program: FrameProgram, parameters: Sequence[str], *, projected: bool) -> None:
        """Raise NotFusable unless values and gradients of a program are those of the step."""
        height, width = self.example.cell.example_frame
        for frame in ((height, width), (height + 3, width + 1)):
            with torch.no_grad():
                random = self._frames(frame)
            self._check_gradients(program, parameters, random, projected)
            with torch.no_grad():
                self._check_rows(random, projected)

    def _frames(self, frame: tuple[int, int]) -> _Frames:
        cell, like = self.cell, self.example.state[0]
        x = _random((2, ROWS, cell.input_size, *frame), like, 0)
        with Noise(2, ROWS, 0):
            fields = _pytree.tree_leaves(cell.project(x))
        inputs = [field[-1] for field in fields]
        with WithoutDraws():
            state = in_frame(cell.initial_state(ROWS), cell.state_frame(frame))
        return _Frames(x, inputs, [part + _random(part.shape, like, i + 1) for i, part in enumerate(state)])

    def _step(self, inputs: Sequence[Tensor], state: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        structures = self.example
        with WithoutDraws():
            return self.cell.step(
                unflatten(structures.input_structure, list(inputs)),
                type(structures.state)(*state),
                unflatten(structures.weight_structure, list(weights)),
            )

    def _check_gradients(self, program: FrameProgram, parameters: Sequence[str], random: _Frames, projected: bool) -> None:
        weights = [_leaf(weight) for weight in self.weights]
        state = [_leaf(part) for part in random.state]
        further = [attrgetter(name)(self.cell) for name in parameters]
        with torch.enable_grad():
            if projected:
                x = _leaf(random.x[1])
                given = [x]
                with WithoutDraws():
                    inputs = [field[-1] for field in _pytree.tree_leaves(self.cell.project(torch.stack([random.x[0], x])))]
            else:
                given = inputs = [_leaf(each) for each in random.inputs]
            got = next_frames(program, given, state, [*weights, *further])
            want = list(self._step(inputs, state, weights))
            if [part.shape for part in got] != [part.shape for part in want]:
                raise self._refusal()
            arguments = [*given, *state, *weights, *(each for each in further if each.requires_grad)]
            d = [_random(part.shape, part, i + 10) for i, part in enumerate(want)]
            gradients = [_gradients(results, arguments, d) for results in (got, want)]
        pairs = [*zip(got, want, strict=True), *zip(*gradients, strict=True)]
        if not all(_equal(a, b) for a, b in pairs):
            raise self._refusal()

    def _refusal(self) -> NotFusable:
        reason = (
            "the step computes something else on frames of one pixel without data, on which it is recorded: beside its "
            "convolutions a compiled step computes each pixel alone"
        )
        return NotFusable(reason, definition_line(self.cell.step))

    def _check_rows(self, random: _Frames, projected: bool) -> None:
        """A row gives the same result whatever stands beside it, at any step."""
        whole = self._step(random.inputs, random.state, self.weights)
        for a, b in ((0, 1), (1, 3), (3, 5)):
            inputs = [each if len(each) == 1 else each[a:b] for each in random.inputs]
            part = self._step(inputs, [each[a:b] for each in random.state], self.weights)
            if not all(_equal(rows, all_rows[a:b]) for rows, all_rows in zip(part, whole, strict=True)):
                reason = "a row's state depends on other rows or on how many there are; a compiled step knows one row"
                raise NotFusable(reason, definition_line(self.cell.step))
        if not projected:
            return
        for T, B, start in ((1, 1, 3), (1, ROWS, 1000), (2, 1, 7), (2, 3, 1)):
            with WithoutDraws():
                fields = _pytree.tree_leaves(self.cell.project(random.x[-T:, :B], start))
            if not all(_equal(field[-1], all_rows[:B]) for field, all_rows in zip(fields, random.inputs, strict=True)):
                reason = "project depends on other rows, on their number or on the index of the step"
                raise NotFusable(reason, definition_line(self.cell.project))


def _equal(got: Tensor, want: Tensor) -> bool:
    size = want.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax().item() if want.numel() else 0.0
    tolerance = ROUNDING[want.dtype] * max(size, 1e-3) * (100 if want.is_cuda else 1)  # a GPU may convolve in tf32
    return bool(torch.isclose(got, want, rtol=0.0, atol=tolerance, equal_nan=True).all())


def _gradients(results: Sequence[Tensor], inputs: Sequence[Tensor], d: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(part, each) for part, each in zip(results, d, strict=True) if part.requires_grad]
    outputs, given = zip(*pairs, strict=True) if pairs else ((), ())
    gradients = torch.autograd.grad(outputs, inputs, given, allow_unused=True) if pairs else [None] * len(inputs)
    return [torch.zeros_like(tensor) if g is None else g for tensor, g in zip(inputs, gradients, strict=True)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _random(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    return 2 * (numbers(torch.zeros(1), seed, math.prod(shape)).reshape(tuple(shape)) - 0.5).to(like)
