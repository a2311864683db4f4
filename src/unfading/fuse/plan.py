"""What is known of a cell's compiled step before any data comes: its program, or why there is none."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from unfading.cells.base import Cell
from unfading.cells.matrix import LowRank
from unfading.cells.wrap import innermost
from unfading.fuse.c.kernel import REAL, Kernel, compiled
from unfading.fuse.devices import place_of
from unfading.fuse.ir.program import InputKind, Program
from unfading.fuse.refusal import NotFusable, Refusal
from unfading.fuse.trace.projection import affine_project, with_project
from unfading.fuse.trace.recorder import Signature, trace
from unfading.fuse.trace.staleness import Options
from unfading.fuse.trace.tree import Structure, flatten, is_low_rank, unflatten, weight_names, with_dense
from unfading.fuse.triton.frame import Names
from unfading.fuse.triton.kernel import TritonKernel
from unfading.fuse.triton.launch_settings import DENSE
from unfading.fuse.triton.tiles import is_vector
from unfading.reference import check_inputs, leaf_names
from unfading.source_lines import definition_line, first_line
from unfading.torch_state import traced


class Plan(NamedTuple):
    """The program of a cell, and where the tensors that it reads come from."""

    key: str  # of the program, in PROGRAMS
    signature: Signature
    inputs: Structure  # of what project gives
    names: tuple[str, ...]  # of its leaves
    weights: Structure
    dense: tuple[bool, ...]  # of each LowRank among the weights: whether one product is cheaper than two
    parameters: tuple[str, ...]  # that project reads, where it is compiled with the step
    with_project: bool
    affine: bool  # and is x A + c of a single feature, whatever its parameters
    place: str  # c or triton


# Features of x up to which a GPU projects it inside the loop; else all of it at once, by the library's own product.
INSIDE = 1

# Every program traced in this process, by the hash of its text: what the operators are told by name.
PROGRAMS: dict[str, Program] = {}
NAMES: dict[str, Names] = {}  # what the first cell with a program calls the tensors in it
_kernels: dict[tuple[str, torch.dtype], Kernel] = {}
_triton_kernels: dict[str, TritonKernel | Refusal] = {}
# Per cell the plan, or the reason why there is none, and the options it was made with; one for training and one for
# evaluation, since a training loop goes to and fro.
_plans: "weakref.WeakKeyDictionary[Cell, dict[bool, tuple[Options, Plan | Refusal]]]" = weakref.WeakKeyDictionary()


def plan(cell: Cell) -> Plan | Refusal:
    """The plan of a cell as it stands, or why its step cannot be compiled."""
    plans, training = _plans.setdefault(cell, {}), innermost(cell).training  # a network does not own the wrappers of its cells
    known = plans.get(training)
    if known is None or not known[0].still_holds():
        known = (Options(cell), _made(cell))
        # Under a transform of torch.func parameters are not themselves; a refusal then is none for later.
        if not (isinstance(known[1], Refusal) and traced()):
            plans[training] = known
    return known[1]


def plan_or_raise(cell: Cell) -> Plan:
    """The plan of a cell; NotFusable where there is none."""
    found = plan(cell)
    if isinstance(found, Refusal):
        raise NotFusable(*found)
    return found


def kernel(key: str, dtype: torch.dtype) -> Kernel:
    """The compiled program for the CPU; built when first asked for. NoCompiler where it cannot be."""
    found = _kernels.get((key, dtype))
    if found is None:
        (found,) = compiled([_program(key)], dtype)
        _kernels[key, dtype] = found
    return found


def triton_kernel(key: str) -> TritonKernel:
    """The program for a GPU; written when first asked for, and compiled by Triton when it first runs. NoTriton, NotFusable."""
    found = _triton_kernels.get(key)
    if found is None:
        try:
            found = TritonKernel(_program(key), NAMES[key])
        except NotFusable as error:
            found = error.refusal
        _triton_kernels[key] = found
    if isinstance(found, Refusal):
        raise NotFusable(*found)
    return found


def _program(key: str) -> Program:
    if key not in PROGRAMS:
        raise RuntimeError(
            f"the fused program {key} is not known in this process; a layer with the same cell must be called once first."
        )
    return PROGRAMS[key]


def _made(cell: Cell) -> Plan | Refusal:
    """Made on the side: no mode that is recording the caller sees it, and random numbers are left as they were."""
    aside = (_disable_current_modes(), torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False))
    with aside[0], aside[1], aside[2], torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return _planned(cell)


def _planned(cell: Cell) -> Plan | Refusal:
    try:
        gpus = {tensor.device for tensor in cell.parameters() if tensor.is_cuda}
        with torch.random.fork_rng(devices=list(gpus)), torch.no_grad():  # masks are drawn in project
            return _example(cell)
    except NotFusable as error:
        return error.refusal
    except Exception as error:  # a cell that breaks its contract, or takes no example; the reference says how
        return Refusal(first_line(error))


def _example(cell: Cell) -> Plan | Refusal:
    state = cell.initial_state(2)
    dtype, place = state[0].dtype, place_of(state[0].device)
    if place is None:
        return Refusal(f"kernels are written for the CPU and for CUDA; the parameters are on {state[0].device}")
    if place == "c" and dtype not in REAL:
        return Refusal(f"{dtype} is compiled for no CPU; float32 and float64 are")
    if place == "triton" and dtype != torch.float32:
        return Refusal(f"kernels for a GPU compute in float32; the parameters are {dtype}")
    inputs = cell.project(state[0].new_zeros(2, 2, cell.input_size))
    weights = cell.weights()
    check_inputs(cell, inputs, batch=2)
    return _traced(cell, inputs, state, weights, dtype, place)


def _traced(cell: Cell, inputs: Any, state: Any, weights: Any, dtype: torch.dtype, place: str) -> Plan:
    low_rank = [w for w in _pytree.tree_leaves(weights, is_leaf=is_low_rank) if is_low_rank(w)]
    dense = tuple(_is_better_dense(w, place) for w in low_rank)
    weights = with_dense(weights, dense)
    input_leaves: list[Tensor] = []
    weight_leaves: list[Tensor] = []
    input_tree, weight_tree = flatten(inputs, input_leaves), flatten(weights, weight_leaves)
    for leaf in weight_leaves:
        if leaf.dtype != dtype:
            raise NotFusable(f"weights gives {leaf.dtype}; a fused step takes {dtype}, as the state is")
    for name, leaves, rank in (("project", input_leaves, 3), ("initial_state", list(state), 2)):
        for leaf in leaves:
            if leaf.dim() != rank or leaf.dtype != dtype:
                raise NotFusable(f"{name} gives {leaf.dtype} {list(leaf.shape)}; fused steps take {dtype} of {rank} axes")
    names = tuple(leaf_names(inputs))
    signature = Signature(
        tuple(leaf.shape[-1] for leaf in input_leaves),
        tuple(_input_kind(cell, name) for name in names),
        tuple(part.shape[-1] for part in state),
        tuple(tuple(leaf.shape) for leaf in weight_leaves),
        dtype,
    )

    def step(inputs: Sequence[Tensor], states: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        made = cell.step(unflatten(input_tree, list(inputs)), type(state)(*states), unflatten(weight_tree, list(weights)))
        if not isinstance(made, tuple) or len(made) != len(states):
            got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
            raise NotFusable(
                f"step must return its state, a tuple of {len(states)} tensors; got {got}", definition_line(cell.step)
            )
        return made

    step.__wrapped__ = cell.step  # type: ignore[attr-defined]
    parameters: tuple[str, ...] = ()
    affine = False
    try:
        if place == "triton" and cell.input_size > INSIDE:
            raise NotFusable("the projection stays outside")
        program, wide, parameters = with_project(cell, step, signature)
        if place == "triton" and _matrices(program) > _matrices(trace(step, signature)):
            program, wide, parameters = affine_project(cell, step, signature)
            affine = True
    except NotFusable:
        program, wide, parameters = trace(step, signature), signature, ()
    key = program.key()
    PROGRAMS.setdefault(key, program)
    read = names if wide is signature else ("x", *(name for name in names if name in cell.shared))
    NAMES.setdefault(key, Names(read, list(type(state)._fields), [*weight_names(weights), *parameters]))
    parameters = () if affine else parameters
    return Plan(key, wide, input_tree, names, weight_tree, dense, parameters, wide is not signature, affine, place)


def _input_kind(cell: Cell, name: str) -> InputKind:
    if name in cell.shared:
        return InputKind.SHARED
    return InputKind.CONSTANT if name in cell.constant else InputKind.SEQUENCE


def _matrices(program: Program) -> int:
    return sum(not is_vector(block) for block in program.blocks())


def _is_better_dense(matrix: LowRank, place: str) -> bool:
    """Whether one product costs less than two: on a GPU, where a second one costs its latency, as long as it fits on chip."""
    whole = matrix.left.shape[0] * matrix.right.shape[1]
    if place == "triton":
        return 4 * whole <= DENSE
    return matrix.left.numel() + matrix.right.numel() >= whole
