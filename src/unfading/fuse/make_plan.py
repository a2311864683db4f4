"""Trace a cell's step on a small example, together with its projection where that pays, and make the plan of it."""

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.cells.base import Cell
from unfading.cells.matrix import LowRank
from unfading.cells.wrap import innermost
from unfading.fuse.cell_copy import CellCopy, varied, with_data, without_data
from unfading.fuse.contents import CACHE, Contents
from unfading.fuse.equal_cells import EqualCells
from unfading.fuse.frames.plan_frames import frame_plan
from unfading.fuse.ir.program import InputKind, Program
from unfading.fuse.ir.recurrence import independent_units
from unfading.fuse.isolation import WithoutDraws, apart
from unfading.fuse.plan import NAMES, PROGRAMS, FramePlan, Plan, Target, TensorNames, target_of
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.row_law import StepExample, check_program, check_rows_of_project, check_rows_of_step
from unfading.fuse.trace.projection import affine_project, with_project
from unfading.fuse.trace.recorder import Signature, trace
from unfading.fuse.trace.tree import Structure, as_matrix, flatten, is_low_rank, unflatten, weight_names, with_dense
from unfading.reference import check_inputs, leaf_names
from unfading.source_lines import definition_line, first_line

# The precisions that kernels are written in.
PRECISIONS: dict[Target, tuple[torch.dtype, ...]] = {"c": (torch.float32, torch.float64), "triton": (torch.float32,)}

# A GPU projects x inside the loop up to this many features; beyond it, one matrix product before the loop is faster.
PROJECTED_IN_LOOP = 1


_known: EqualCells[tuple[Target | None, Plan | FramePlan]] = EqualCells()


def make_plan(cell: Cell) -> tuple[Contents, Plan | FramePlan | Refusal]:
    """The plan of a cell, or why there is none, with the contents of the cell that it depends on.

    The methods of the cell run on copies of it, apart from the caller's modes and hooks. The cell is left as it was.
    """
    contents = Contents(cell)
    target = target_of(next(cell.parameters(), torch.empty(0)).device)
    for known, plan in _known.find(contents):
        if known == target:
            return contents, plan
    contents, result = apart(lambda: _plan_or_refusal(contents))
    if not isinstance(result, Refusal):
        _known.add(contents, (target, result))
    return contents, result


def _plan_or_refusal(contents: Contents) -> tuple[Contents, Plan | FramePlan | Refusal]:
    caches = [(part.value, part.value.cache_info().misses) for part in contents.parts if isinstance(part.value, CACHE)]
    result: Plan | FramePlan | Refusal
    try:
        if contents.of().example_frame:
            contents, result = frame_plan(contents, _target)
        else:
            example = _Example(contents)
            contents = example.contents
            result = _plan(example)
    except NotFusable as error:
        result = error.refusal
    except Exception as error:  # the cell breaks its contract; the reference loop will raise the full error
        result = Refusal(first_line(error))
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # it may hold tensors without data
    return contents.settled(), result


def _plan(example: "_Example") -> Plan:
    traced = _program(example)
    program, signature = traced.program, traced.signature
    key = program.key()
    PROGRAMS.setdefault(key, program)
    projected = signature is not example.signature
    inputs_read = ("x", *(name for name in example.names if name in example.cell.shared)) if projected else example.names
    weights_read = [*weight_names(example.weights), *traced.parameters]
    NAMES.setdefault(key, TensorNames(inputs_read, list(type(example.state)._fields), weights_read))
    return Plan(
        key,
        signature,
        inputs=example.input_structure,
        names=example.names,
        weights=example.weight_structure,
        dense=example.dense,
        parameters=() if traced.affine else traced.parameters,
        with_project=projected,
        affine=traced.affine,
        target=example.target,
    )


class _Example:
    """A cell with inputs of two rows and two steps: what its step is handed, flattened and checked."""

    def __init__(self, contents: Contents):
        example = CellCopy(contents, with_data, example=True)
        cell = self.cell = example.cell
        with WithoutDraws(), torch.no_grad():
            self.state = state = cell.initial_state(2)
            dtype, self.target = state[0].dtype, _target(state[0])
            inputs = cell.project(state[0].new_zeros(2, 2, cell.input_size))
            weights = cell.weights()
            check_inputs(cell, inputs, batch=2)
            matrices = [w for w in _pytree.tree_leaves(weights, is_leaf=is_low_rank) if is_low_rank(w)]
            self.dense = tuple(_is_better_dense(matrix, self.target) for matrix in matrices)
            self.weights = with_dense(weights, self.dense)
        # These methods also run outside the loop, where they may write attributes. A step must not depend on those.
        written = example.written()
        self.contents = Contents(contents.of(), frozenset(written)) if written else contents
        self.before = contents
        input_leaves: list[Tensor] = []
        weight_leaves: list[Tensor] = []
        self.input_structure: Structure = flatten(inputs, input_leaves)
        self.weight_structure: Structure = flatten(self.weights, weight_leaves)
        self.names = tuple(leaf_names(inputs))
        for leaf in weight_leaves:
            if leaf.dtype != dtype:
                raise NotFusable(f"weights returns {leaf.dtype}; a fused step takes the dtype of the state, {dtype}")
        _check_leaves("project", input_leaves, 3, dtype)
        _check_leaves("initial_state", state, 2, dtype)
        self.signature = Signature(
            tuple(leaf.shape[-1] for leaf in input_leaves),
            tuple(_input_kind(cell, name) for name in self.names),
            tuple(part.shape[-1] for part in state),
            tuple(tuple(as_matrix(leaf).shape) for leaf in weight_leaves),
            dtype,
        )
        self.weight_shapes = [leaf.shape for leaf in weight_leaves]

    def weight_tree(self, leaves: Sequence[Tensor]) -> Any:
        """The weights as `weights` returns them, from the matrices that a kernel reads."""
        own = zip(leaves, self.weight_shapes, strict=True)
        return unflatten(self.weight_structure, [leaf.reshape(shape) if len(shape) > 2 else leaf for leaf, shape in own])

    @cached_property
    def of_step(self) -> StepExample:
        """A step with varied numbers in place of the cell's own, unless fewer of its results are finite."""
        try:
            other = self._step_of(CellCopy(self.before, varied(), example=True).cell)
            share = other.finite
        except Exception:  # of a method that checks its numbers
            return self._step_of(self.cell)
        if share == 1:
            return other
        own = self._step_of(self.cell)
        return own if own.finite > share else other

    def _step_of(self, cell: Cell) -> StepExample:
        tensors: list[Tensor] = []
        with WithoutDraws(), torch.no_grad():
            flatten(with_dense(cell.weights(), self.dense), tensors)
        with torch.no_grad():
            return StepExample(cell, [as_matrix(tensor) for tensor in tensors], self.weight_tree, self.state[0])

    def check_rows_of_project(self) -> None:
        """Test on data that rows of the projection do not depend on each other."""
        with WithoutDraws(), torch.no_grad():
            check_rows_of_project(self.of_step.cell, self.state[0])

    def check_rows_of_step(self) -> None:
        """Test on data that rows of the step do not depend on each other."""
        with torch.no_grad():
            check_rows_of_step(self.of_step)

    def check_program(self, traced: "_Traced") -> None:
        """Test on data that a program computes what the step computes."""
        with torch.no_grad():
            tensors = [*self.of_step.weights, *(attrgetter(name)(self.of_step.cell) for name in traced.parameters)]
            check_program(self.of_step, traced.program, tensors, projected=traced.signature is not self.signature)

    def step_function(self) -> Callable[..., Any]:
        """`step` of a copy of the cell, as a function of flat lists of tensors."""
        twin, state = CellCopy(self.contents, without_data({})), self.state
        cell = twin.cell

        def step(inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
            new = cell.step(
                unflatten(self.input_structure, list(inputs)),
                type(state)(*states),
                self.weight_tree(weights),
            )
            twin.refuse_writes("step")
            if not isinstance(new, tuple) or len(new) != len(states):
                got = f"a tuple of {len(new)}" if isinstance(new, tuple) else type(new).__name__
                raise NotFusable(
                    f"step must return its state, a tuple of {len(states)} tensors; got {got}", definition_line(cell.step)
                )
            return new

        step.__wrapped__ = cell.step  # type: ignore[attr-defined]
        return step


class _Traced(NamedTuple):
    """A program, what it is called with, and the parameters of the projection that it reads."""

    program: Program
    signature: Signature
    parameters: tuple[str, ...] = ()
    affine: bool = False


def _program(example: _Example) -> _Traced:
    """The program of projection and step together where that can be compiled and pays; else of the step alone."""
    contents, signature, step, target = example.contents, example.signature, example.step_function(), example.target
    try:
        # A mask of resets, which a wrapper reads as one more feature, is not projected.
        if target == "triton" and innermost(example.cell).input_size > PROJECTED_IN_LOOP:
            raise NotFusable("the projection stays outside the loop")
        if target == "triton" and independent_units(trace(step, signature)) is not None:
            # A unit has a thread of its own, which would have to sum the gradient of x over all units.
            raise NotFusable("the projection stays outside the loop")
        traced = _Traced(*with_project(contents, step, signature))
        example.check_rows_of_project()
        example.check_program(traced)
        if example.of_step.repetitive:
            example.check_program(_Traced(trace(step, signature), signature))
        if target == "triton" and _matrices(traced.program) > _matrices(trace(step, signature)):
            traced = _Traced(*affine_project(contents, step, signature), affine=True)
    except NotFusable:
        traced = _Traced(trace(step, signature), signature)
        example.check_program(traced)
    example.check_rows_of_step()
    return traced


def _target(state: Tensor) -> Target:
    """The kind of kernel for this state; NotFusable where there is none for its device or its dtype."""
    dtype, target = state.dtype, target_of(state.device)
    if target is None:
        raise NotFusable(f"kernels are written for the CPU and for CUDA; the parameters are on {state.device}")
    if dtype not in PRECISIONS[target]:
        if target == "c":
            raise NotFusable(f"kernels for the CPU compute in float32 and float64; the parameters are {dtype}")
        raise NotFusable(f"kernels for a GPU compute in float32; the parameters are {dtype}")
    return target


def _check_leaves(method: str, leaves: Sequence[Tensor], rank: int, dtype: torch.dtype) -> None:
    for leaf in leaves:
        if leaf.dim() != rank or leaf.dtype != dtype:
            raise NotFusable(
                f"{method} returns {leaf.dtype} {list(leaf.shape)}; a fused step takes {dtype} tensors with {rank} axes"
            )


def _input_kind(cell: Cell, name: str) -> InputKind:
    if name in cell.shared:
        return InputKind.SHARED
    return InputKind.CONSTANT if name in cell.constant else InputKind.SEQUENCE


def _matrices(program: Program) -> int:
    from unfading.fuse.triton.tiles import is_vector

    return sum(not is_vector(block) for block in program.blocks())


def _is_better_dense(matrix: LowRank, target: Target) -> bool:
    """Whether one dense product is faster than two thin ones: on a GPU, where a second product costs latency, if it fits on
    chip; on a CPU, if it needs fewer multiplications."""
    entries = matrix.left.shape[0] * matrix.right.shape[1]
    if target == "triton":
        from unfading.fuse.triton.launch_settings import DENSE

        return 4 * entries <= DENSE
    return matrix.left.numel() + matrix.right.numel() >= entries
