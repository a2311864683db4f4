"""Trace a cell's step on a small example, together with its projection where that pays, and make the plan of it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from unfading.cells.base import Cell
from unfading.cells.matrix import LowRank
from unfading.fuse.ir.program import InputKind, Program
from unfading.fuse.plan import NAMES, PROGRAMS, Plan, Target, TensorNames, target_of
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.trace.projection import affine_project, with_project
from unfading.fuse.trace.recorder import Signature, trace
from unfading.fuse.trace.tree import Structure, flatten, is_low_rank, unflatten, weight_names, with_dense
from unfading.reference import check_inputs, leaf_names
from unfading.source_lines import definition_line, first_line

# The precisions that kernels are written in.
PRECISIONS: dict[Target, tuple[torch.dtype, ...]] = {"c": (torch.float32, torch.float64), "triton": (torch.float32,)}

# A GPU projects x inside the loop up to this many features; beyond it, one matrix product before the loop is faster.
PROJECTED_IN_LOOP = 1


def make_plan(cell: Cell) -> Plan | Refusal:
    """The plan of a cell, or why there is none.

    Dispatch modes of the caller do not see the tracing, and random number generators are left as they were.
    """
    modes = (_disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False))
    with modes[0], modes[1], modes[2], torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        try:
            gpus = {tensor.device for tensor in cell.parameters() if tensor.is_cuda}
            with torch.random.fork_rng(devices=list(gpus)), torch.no_grad():  # project may draw masks
                return _plan(cell)
        except NotFusable as error:
            return error.refusal
        except Exception as error:  # the cell breaks its contract; the reference loop will raise the full error
            return Refusal(first_line(error))


def _plan(cell: Cell) -> Plan | Refusal:
    state = cell.initial_state(2)
    dtype, target = state[0].dtype, target_of(state[0].device)
    if target is None:
        return Refusal(f"kernels are written for the CPU and for CUDA; the parameters are on {state[0].device}")
    if dtype not in PRECISIONS[target]:
        if target == "c":
            return Refusal(f"kernels for the CPU compute in float32 and float64; the parameters are {dtype}")
        return Refusal(f"kernels for a GPU compute in float32; the parameters are {dtype}")
    inputs = cell.project(state[0].new_zeros(2, 2, cell.input_size))
    weights = cell.weights()
    check_inputs(cell, inputs, batch=2)
    matrices = [w for w in _pytree.tree_leaves(weights, is_leaf=is_low_rank) if is_low_rank(w)]
    dense = tuple(_is_better_dense(matrix, target) for matrix in matrices)
    example = _Example(cell, inputs, state, with_dense(weights, dense))
    traced = _program(example, target)
    program, signature = traced.program, traced.signature
    key = program.key()
    PROGRAMS.setdefault(key, program)
    projected = signature is not example.signature
    inputs_read = ("x", *(name for name in example.names if name in cell.shared)) if projected else example.names
    weights_read = [*weight_names(example.weights), *traced.parameters]
    NAMES.setdefault(key, TensorNames(inputs_read, list(type(state)._fields), weights_read))
    return Plan(
        key,
        signature,
        inputs=example.input_structure,
        names=example.names,
        weights=example.weight_structure,
        dense=dense,
        parameters=() if traced.affine else traced.parameters,
        with_project=projected,
        affine=traced.affine,
        target=target,
    )


class _Example:
    """A cell with inputs of two rows and two steps: what its step is handed, flattened and checked."""

    def __init__(self, cell: Cell, inputs: Any, state: Any, weights: Any):
        self.cell, self.state, self.weights = cell, state, weights
        input_leaves: list[Tensor] = []
        weight_leaves: list[Tensor] = []
        self.input_structure: Structure = flatten(inputs, input_leaves)
        self.weight_structure: Structure = flatten(weights, weight_leaves)
        self.names = tuple(leaf_names(inputs))
        dtype = state[0].dtype
        for leaf in weight_leaves:
            if leaf.dtype != dtype:
                raise NotFusable(f"weights returns {leaf.dtype}; a fused step takes the dtype of the state, {dtype}")
        _check_leaves("project", input_leaves, 3, dtype)
        _check_leaves("initial_state", state, 2, dtype)
        self.signature = Signature(
            tuple(leaf.shape[-1] for leaf in input_leaves),
            tuple(_input_kind(cell, name) for name in self.names),
            tuple(part.shape[-1] for part in state),
            tuple(tuple(leaf.shape) for leaf in weight_leaves),
            dtype,
        )

    def step_function(self) -> Callable[..., Any]:
        """`cell.step` as a function of flat lists of tensors."""
        cell, state = self.cell, self.state

        def step(inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
            new = cell.step(
                unflatten(self.input_structure, list(inputs)),
                type(state)(*states),
                unflatten(self.weight_structure, list(weights)),
            )
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


def _program(example: _Example, target: Target) -> _Traced:
    """The program of projection and step together where that can be compiled and pays; else of the step alone."""
    cell, signature, step = example.cell, example.signature, example.step_function()
    try:
        if target == "triton" and cell.input_size > PROJECTED_IN_LOOP:
            raise NotFusable("the projection stays outside the loop")
        traced = _Traced(*with_project(cell, step, signature))
        if target == "triton" and _matrices(traced.program) > _matrices(trace(step, signature)):
            traced = _Traced(*affine_project(cell, step, signature), affine=True)
        return traced
    except NotFusable:
        return _Traced(trace(step, signature), signature)


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
